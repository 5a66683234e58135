"""Measure what a long prompt does to others: a short one's first token, and the gaps of a text that is being written.

python -m benchmarks.head_of_line --long 8000 --short 200

The demo target is served with a longer context than it was trained for: the texts mean nothing, the times do.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.measure import hardware
from benchmarks.served import demo_pair
from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.serving.child import print_errors
from specdec.serving.local import CannotRun, running

NUM_ALONE = 5  # first tokens measured alone
NEIGHBOUR_TOKENS = 20_000  # more than it writes while it is watched
SETTLE_S = 1.0
VOCABULARY = range(10, 4000)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random prompts, each another one, so that nothing is cached."""

    random: random.Random

    def of(self, num_tokens: int) -> list[int]:
        """Return a prompt of so many tokens."""
        return self.random.choices(VOCABULARY, k=num_tokens)


@contextmanager
def longer_context(model: Path, context_length: int) -> Iterator[Path]:
    """Yield a folder with the model's files and another context length."""
    with tempfile.TemporaryDirectory(prefix="specdec-model-") as name:
        folder = Path(name) / model.name
        folder.mkdir()
        for file in model.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": context_length}
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
        yield folder


async def first_token_s(client: AsyncClient, prompt: Sequence[int], num_draft_tokens: int) -> float:
    """Return the seconds until the first token of a prompt."""
    begin = time.perf_counter()
    async with client.generate(
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True),
        speculation=SpeculationParams(num_draft_tokens=num_draft_tokens),
    ) as stream:
        async for _ in stream:
            break
    return time.perf_counter() - begin


class Neighbour:
    """A text that is being written; notes when each chunk arrived."""

    def __init__(self, client: AsyncClient, prompt: Sequence[int], num_draft_tokens: int) -> None:
        self._arrived_s: list[float] = []
        self._task = asyncio.create_task(self._write(client, prompt, num_draft_tokens))

    async def _write(self, client: AsyncClient, prompt: Sequence[int], num_draft_tokens: int) -> None:
        async with client.generate(
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_new_tokens=NEIGHBOUR_TOKENS, ignore_eos=True),
            speculation=SpeculationParams(num_draft_tokens=num_draft_tokens),
        ) as stream:
            async for _ in stream:
                self._arrived_s.append(time.perf_counter())

    def gaps_s(self, since_s: float) -> list[float]:
        """Return the seconds between chunks that arrived since then."""
        times = [arrived for arrived in self._arrived_s if arrived >= since_s]
        return [later - earlier for earlier, later in pairwise(times)]

    async def stop(self) -> None:
        """Stop writing. Raises what went wrong."""
        self._task.cancel()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended


def told(gaps_s: Sequence[float]) -> str:
    """Return gaps as text."""
    if len(gaps_s) < 2:
        return f"{len(gaps_s)} gaps"
    middle, high = statistics.median(gaps_s), statistics.quantiles(gaps_s, n=20)[-1]
    shown = f"median {1e3 * middle:.1f}, 95 % {1e3 * high:.1f}, largest {1e3 * max(gaps_s):.1f} ms"
    return f"{shown} ({len(gaps_s)} gaps)"


async def measure(flags: argparse.Namespace) -> None:
    """Serve the demo target; print the times."""
    prompts, length = Prompts(random.Random(flags.seed)), flags.long + NEIGHBOUR_TOKENS + 1000
    options = demo_pair().options
    os.environ["SPECDEC_MAX_NEW_TOKENS"] = str(NEIGHBOUR_TOKENS)
    with longer_context(Path(options.target), length) as target:
        options = replace(options, target=str(target), dtype=flags.dtype, draft=flags.draft)
        options = replace(options, eagle3_head=None, dflash_head=None, medusa_head=None)
        async with running(options, print_errors) as stack, AsyncClient(stack.address, timeout_s=600) as client:
            print(f"{hardware()}; demo target, {flags.dtype}, K = {flags.draft_tokens}, seed {flags.seed}")
            await _measure(client, prompts, flags)


async def _measure(client: AsyncClient, prompts: Prompts, flags: argparse.Namespace) -> None:
    long_alone_s = await _measure_short(client, prompts, flags)
    neighbour = Neighbour(client, prompts.of(50), flags.draft_tokens)
    await asyncio.sleep(SETTLE_S)
    begin = time.perf_counter()
    await asyncio.sleep(2 * SETTLE_S)
    gaps_alone, begin = neighbour.gaps_s(begin), time.perf_counter()
    long_beside_s = await first_token_s(client, prompts.of(flags.long), flags.draft_tokens)
    gaps_beside = neighbour.gaps_s(begin)
    await neighbour.stop()
    print(f"a neighbour's gaps alone: {told(gaps_alone)}")
    print(f"a neighbour's gaps beside {flags.long} tokens: {told(gaps_beside)}")
    print(f"the median gap is {statistics.median(gaps_beside) / statistics.median(gaps_alone):.2f} times that alone")
    print(f"first token of {flags.long} tokens: {long_alone_s:.2f} s alone, {long_beside_s:.2f} s beside a neighbour")


async def _measure_short(client: AsyncClient, prompts: Prompts, flags: argparse.Namespace) -> float:
    """Print the times of short prompts; return that of a long one alone."""
    count = flags.draft_tokens
    await first_token_s(client, prompts.of(flags.short), count)
    alone = [await first_token_s(client, prompts.of(flags.short), count) for _ in range(NUM_ALONE)]
    print(f"first token of {flags.short} tokens alone: median {statistics.median(alone):.3f} s")
    long_alone_s = await first_token_s(client, prompts.of(flags.long), count)
    behind = list[float]()
    for _ in range(flags.repetitions):
        reading = asyncio.create_task(first_token_s(client, prompts.of(flags.long), count))
        await asyncio.sleep(min(SETTLE_S, long_alone_s / 4))
        behind.append(await first_token_s(client, prompts.of(flags.short), count))
        await reading
    ratio = statistics.median(behind) / statistics.median(alone)
    print(f"behind {flags.long} tokens: median {statistics.median(behind):.3f} s, {ratio:.2f} times alone")
    return long_alone_s


def main() -> None:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", type=int, default=8000, help="tokens of the long prompt (default: %(default)s)")
    parser.add_argument("--short", type=int, default=200, help="tokens of the short prompt (default: %(default)s)")
    parser.add_argument("--draft", default="none", help="what drafts, as of specdec up (default: %(default)s)")
    parser.add_argument("--draft-tokens", type=int, default=0, help="K (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="of the models (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="of the short prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: %(default)s)")
    try:
        asyncio.run(measure(parser.parse_args()))
    except CannotRun as error:
        sys.exit(f"head_of_line: {error}")


if __name__ == "__main__":
    main()
