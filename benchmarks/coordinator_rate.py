"""`python -m benchmarks.coordinator_rate`: rounds for each second of the coordinator's own processor time.

The workers serve tiny random models, and they and the store are processes of their own: nothing but the user and system
time of the coordinator's process is counted (Linux's /proc), which the noise of a shared machine changes little.

    python -m benchmarks.coordinator_rate --sessions 1,64 --draft-lengths 0,4
    python -m benchmarks.coordinator_rate --store redis://127.0.0.1:6379
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks.bench import counts
from benchmarks.measure import hardware
from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.serving.child import print_errors
from specdec.serving.local import CannotRun, Options, running

VOCAB_SIZE = 512
PROMPT = tuple(range(1, 33))
WARM_UP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Load:
    """So many sessions at once, each with K draft tokens a round."""

    num_sessions: int
    num_draft_tokens: int
    temperature: float
    num_tokens: int

    async def rounds(self, client: AsyncClient) -> int:
        """Generate, and return how many rounds it took."""
        completions = await asyncio.gather(*(self._generate(client, seed) for seed in range(self.num_sessions)))
        return sum(completions)

    async def _generate(self, client: AsyncClient, seed: int) -> int:
        completion = await client.complete(
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(
                temperature=self.temperature, seed=seed, max_new_tokens=self.num_tokens, ignore_eos=True
            ),
            speculation=SpeculationParams(num_draft_tokens=self.num_draft_tokens, drafter="model"),
        )
        return completion.statistics.num_rounds


def save_model(folder: Path) -> Path:
    """Save a tiny random Llama with one letter a token."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(BPE({chr(256 + token): token for token in range(VOCAB_SIZE)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def processor_s(pid: int) -> float:
    """Return the user and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def rates(client: AsyncClient, pid: int, load: Load, repetitions: int) -> list[float]:
    """Return rounds for each second of this process's time, of each repetition."""
    found = []
    for _ in range(repetitions):
        before_s = processor_s(pid)
        num_rounds = await load.rounds(client)
        found.append(num_rounds / (processor_s(pid) - before_s))
    return found


def loads_of(flags: argparse.Namespace) -> Iterator[Load]:
    """Yield what is measured; few sessions generate longer texts."""
    for num_sessions, num_draft_tokens, temperature in product(flags.sessions, flags.draft_lengths, (0.0, 1.0)):
        yield Load(num_sessions, num_draft_tokens, temperature, max(64, flags.tokens // num_sessions))


async def measure(flags: argparse.Namespace, folder: Path) -> Table:
    """Start the services, and return the table."""
    model = str(save_model(folder / "model"))
    options = Options(target=model, draft=model, port=0, store=flags.store, dtype="float32", target_threads=1)
    table = Table(title=f"{hardware()}; store {flags.store}: rounds a second of the coordinator's processor time")
    for title in ("sessions", "K", "temperature", "rounds/s", "lowest to highest"):
        table.add_column(title, justify="right")
    async with running(options, print_errors) as stack, AsyncClient(stack.address, timeout_s=600) as client:
        pid = next(child.pid for child in stack.children if child.name == "coordinator")
        await Load(8, 4, 1.0, WARM_UP_TOKENS).rounds(client)
        for load in loads_of(flags):
            found = await rates(client, pid, load, flags.repetitions)
            words = (load.num_sessions, load.num_draft_tokens, f"{load.temperature:g}")
            spread = f"{min(found):.0f} to {max(found):.0f}"
            table.add_row(*map(str, words), f"{statistics.median(found):.0f}", spread)
            print(*words, f"{statistics.median(found):.0f}", file=sys.stderr, flush=True)
    return table


def main() -> None:
    """Read the flags, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--sessions", type=counts, default=(1, 64), metavar="N,...", help="at once (default: 1,64)")
    add("--draft-lengths", type=counts, default=(0, 4), metavar="K,...", help="(default: 0,4)")
    add("--tokens", type=int, default=4096, help="of all sessions together, at least (default: %(default)s)")
    add("--repetitions", type=int, default=3, help="of each load (default: %(default)s)")
    add("--store", default="memory", help="memory, embedded, or a redis:// URL (default: %(default)s)")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            Console().print(asyncio.run(measure(flags, Path(folder))))
        except CannotRun as error:
            sys.exit(f"coordinator_rate: {error}")


if __name__ == "__main__":
    main()
