"""`python -m benchmarks.idle_memory`: the memory that the coordinator takes for each session that is idle, or waits.

Idle sessions are those whose client has left and may come back: a few at a time they are begun, have their first tokens
and are left. They wait in the store; what the coordinator remembers of them is its own, and so is the store in memory.

Waiting sessions are begun and have their first tokens; then the workers are stopped (SIGSTOP), so that every session is
there, with its client, its streams to the workers and its record in the store, and nothing happens.

The coordinator's memory (Linux's /proc) is compared with what it was before, after a few sessions have come and gone:
what a process frees it keeps, and many sessions before would leave those that are measured room for nothing.

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
NO_HURRY_S = 86400.0  # a deadline that nobody is refused for
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


class Sessions:
    """Sessions of one client, each with a seed of its own; all drafted by the model, so many tokens a round."""

    def __init__(self, client: AsyncClient, num_draft_tokens: int) -> None:
        self._client = client
        self._speculation = SpeculationParams(num_draft_tokens=num_draft_tokens, drafter="model")

    async def begin(self, stack: AsyncExitStack, number: int) -> None:
        """Begin a session, which lasts while the stack is open; return once its first chunk is there."""
        sampling = SamplingParams(temperature=1.0, seed=number, max_new_tokens=MAX_TOKENS, ignore_eos=True)
        stream = self._client.generate(prompt_token_ids=PROMPT, sampling=sampling, speculation=self._speculation)
        await stack.enter_async_context(stream)
        await anext(stream)

    async def begin_and_leave(self, num_sessions: int) -> None:
        """Begin sessions and leave them, a few at a time."""
        for first in range(0, num_sessions, WARM_UP):
            async with AsyncExitStack() as stack:
                numbers = range(first, min(first + WARM_UP, num_sessions))
                await asyncio.gather(*(self.begin(stack, number) for number in numbers))
        await asyncio.sleep(SETTLE_S)


async def measure(flags: argparse.Namespace, folder: Path) -> None:
    """Start the services, and print what a session takes."""
    model = str(save_model(folder / "model"))
    options = Options(target=model, draft=model, port=0, store=flags.store, dtype="float32", target_threads=1)
    async with running(options, print_errors) as services:
        workers = [child for child in services.children if "worker" in child.name]
        pid = next(child.pid for child in services.children if child.name == "coordinator")
        async with AsyncClient(services.address, timeout_s=NO_HURRY_S) as client:
            sessions = Sessions(client, flags.draft_tokens)
            await sessions.begin_and_leave(WARM_UP)
            before = private_bytes(pid)
            await sessions.begin_and_leave(flags.sessions)
            _tell("idle", flags.sessions, private_bytes(pid) - before)
            before = private_bytes(pid)
            async with AsyncExitStack() as stack:
                await asyncio.gather(*(sessions.begin(stack, number) for number in range(flags.sessions)))
                with stopped(workers):
                    await asyncio.sleep(SETTLE_S)
                    _tell("waiting", flags.sessions, private_bytes(pid) - before)


def _tell(what: str, num_sessions: int, num_bytes: int) -> None:
    print(f"{num_sessions} {what}: {num_bytes / 1e6:.1f} MB, {num_bytes / 1e3 / num_sessions:.1f} kB each", flush=True)


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
