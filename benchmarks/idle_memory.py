"""`python -m benchmarks.idle_memory`: the memory that the coordinator takes for each session that waits.

Sessions are begun and have their first tokens; then the workers are stopped (SIGSTOP), so that every session is there,
with its client, its streams to the workers and its record in the store, and nothing happens. The coordinator's memory
(Linux's /proc) is compared with what it was before, after a few sessions have come and gone: what a process frees it
keeps, and many sessions before would leave those that are measured room for nothing.

    python -m benchmarks.idle_memory --sessions 500 --draft-tokens 4
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from benchmarks.coordinator_rate import PROMPT, save_model
from benchmarks.measure import hardware
from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.serving.child import Child, print_errors
from specdec.serving.local import CannotRun, Options, running

MAX_TOKENS = 2048
SETTLE_S = 3.0
WARM_UP = 4  # sessions


def private_bytes(pid: int) -> int:
    """Return the memory that is this process's alone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


@contextmanager
def stopped(children: Sequence[Child]) -> Iterator[None]:
    """Stop processes while the context lasts."""
    for child in children:
        os.kill(child.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGCONT)


async def _begun(client: AsyncClient, stack: AsyncExitStack, number: int, num_draft_tokens: int) -> None:
    """Begin a session; return once its first chunk is there."""
    stream = client.generate(
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(temperature=1.0, seed=number, max_new_tokens=MAX_TOKENS, ignore_eos=True),
        speculation=SpeculationParams(num_draft_tokens=num_draft_tokens, drafter="model"),
    )
    await stack.enter_async_context(stream)
    await anext(stream)


async def measure(flags: argparse.Namespace, folder: Path) -> None:
    """Start the services, and print what a session takes."""
    model = str(save_model(folder / "model"))
    options = Options(target=model, draft=model, port=0, store=flags.store, dtype="float32", target_threads=1)
    async with running(options, print_errors) as services:
        workers = [child for child in services.children if "worker" in child.name]
        pid = next(child.pid for child in services.children if child.name == "coordinator")
        for num_sessions in (WARM_UP, flags.sessions):
            async with AsyncClient(services.address, timeout_s=600) as client:
                before = private_bytes(pid)
                async with AsyncExitStack() as stack:
                    begun = (_begun(client, stack, number, flags.draft_tokens) for number in range(num_sessions))
                    await asyncio.gather(*begun)
                    with stopped(workers):
                        await asyncio.sleep(SETTLE_S)
                        grown = private_bytes(pid) - before
                        print(
                            f"{num_sessions} sessions: {grown / 1e6:.1f} MB, {grown / 1e3 / num_sessions:.1f} kB each",
                            flush=True,
                        )
            await asyncio.sleep(SETTLE_S)


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=500, help="at once (default: %(default)s)")
    parser.add_argument("--draft-tokens", type=int, default=4, help="of a round (default: %(default)s)")
    parser.add_argument("--store", default="memory", help="memory, embedded, or a redis:// URL (default: %(default)s)")
    flags = parser.parse_args()
    print(hardware())
    with tempfile.TemporaryDirectory() as folder:
        try:
            asyncio.run(measure(flags, Path(folder)))
        except CannotRun as error:
            sys.exit(f"idle_memory: {error}")


if __name__ == "__main__":
    main()
