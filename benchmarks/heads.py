"""`python -m benchmarks.heads`: how long a draft of a head takes in the worker, by K and by sessions at once.

States and tokens are random: a forward costs what it costs with real ones, but the depth of an EAGLE-3 head's tree, and
so the number of its forwards, depends on the head's confidence. Plain decoding of the target is timed in the same run,
as one forward of one token after the same context.

    python -m benchmarks.heads --target models/smollm2 --eagle3-head FOLDER
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draft_service.heads.build import load_head
from draft_service.heads.drafter import HeadDrafter
from draft_service.heads.loop import HeadLoop
from draft_service.heads.settings import HeadSettings
from specdec.drafting.request import DraftRequest
from specdec.engine import Feed, LanguageModel, load_language_model
from specdec.exact.values import Observations
from specdec.heads.drafting.loading import LOADERS
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams

NUM_CONTEXT = 200
TOKENS_PER_ROUND = 3  # that a round commits
NUM_ROUNDS = 40
WARM_UP = 5
KV_CACHE_BYTES = 64 << 20


@contextmanager
def running(kind: str, folder: str, target: str, dtype: str) -> Iterator[HeadDrafter]:
    """Run a head as the worker does."""
    settings = HeadSettings.model_validate({"head_target": target, "dtype": dtype})
    runner, model = load_head(kind, folder, settings)
    loop: HeadLoop[Any] = HeadLoop(runner)
    loop.start()
    try:
        yield HeadDrafter(kind, runner, loop, model)
    finally:
        loop.stop()


class PlayedSession:
    """A session with random tokens and states."""

    def __init__(self, drafter: HeadDrafter, number: int) -> None:
        self._drafter = drafter
        self._session = WorkerSession(f"{number}", 1, SamplingParams(temperature=0.0, seed=number), 0)
        self._generator = torch.Generator().manual_seed(number)
        self._length = 0

    async def play(self, num_new: int, num_draft_tokens: int) -> tuple[int, int]:
        """Commit tokens, observe all but the last, draft; return the proposal's size and depth."""
        asked, info = self._drafter.observations, self._drafter.model
        tokens = torch.randint(info.vocab_size, (num_new,), generator=self._generator).tolist()
        begin = max(0, self._length - 1)
        count = self._length + num_new - 1 - begin
        states = torch.randn(count, len(asked.hidden_layers) * info.hidden_size, generator=self._generator)
        hidden = tuple(row.tobytes() for row in states.bfloat16().view(torch.int16).numpy())
        request = DraftRequest(self._length, tokens, num_draft_tokens, Observations(begin, hidden))
        self._length += num_new
        proposal = (await self._drafter.propose(self._session, request, match=False)).proposal
        return len(proposal), proposal.depth if len(proposal) else 0


async def timed(drafter: HeadDrafter, num_draft_tokens: int, num_sessions: int) -> tuple[float, float, float]:
    """Return the median seconds of a round of all sessions, and the mean size and depth of their proposals."""
    sessions = [PlayedSession(drafter, number) for number in range(num_sessions)]
    await asyncio.gather(*(each.play(NUM_CONTEXT, 0) for each in sessions))
    elapsed, proposals = [], []
    for _ in range(NUM_ROUNDS):
        begin = time.perf_counter()
        proposals += await asyncio.gather(*(each.play(TOKENS_PER_ROUND, num_draft_tokens) for each in sessions))
        elapsed.append(time.perf_counter() - begin)
    sizes, depths = zip(*proposals, strict=True)
    return statistics.median(elapsed[WARM_UP:]), statistics.mean(sizes), statistics.mean(depths)


def plain_s(target: LanguageModel) -> float:
    """Return the median seconds of a forward of one token after the context."""
    sequence = target.cache.open("plain")
    target.forward([Feed(sequence, [1] * NUM_CONTEXT, num_rows=1)])
    elapsed = []
    for _ in range(NUM_ROUNDS):
        begin = time.perf_counter()
        target.forward([Feed(sequence, [1], num_rows=1)])
        elapsed.append(time.perf_counter() - begin)
    return statistics.median(elapsed[WARM_UP:])


def table(rows: Sequence[Sequence[str]], title: str) -> Table:
    """Return all figures."""
    figures = Table(title=title)
    for heading in ("head", "K", "sessions", "ms a round", "of a plain token", "tokens drafted", "depth"):
        figures.add_column(heading, justify="left" if heading == "head" else "right")
    for row in rows:
        figures.add_row(*row)
    return figures


async def measured(flags: argparse.Namespace, kind: str, folder: str, plain: float) -> list[tuple[str, ...]]:
    """Return the lines of one head."""
    rows: list[tuple[str, ...]] = []
    with running(kind, folder, flags.target, flags.dtype) as drafter:
        for num_draft_tokens in flags.num_draft_tokens:
            for num_sessions in flags.sessions:
                elapsed_s, size, depth = await timed(drafter, num_draft_tokens, num_sessions)
                figures = (f"{1e3 * elapsed_s:.2f}", f"{elapsed_s / plain:.2f}", f"{size:.1f}", f"{depth:.1f}")
                rows.append((kind, str(num_draft_tokens), str(num_sessions), *figures))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads", description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, help="the target's folder")
    for kind in LOADERS:
        parser.add_argument(f"--{kind}-head", help="folder of a head")
    parser.add_argument("--dtype", default="auto", help="number type of target and heads (default: %(default)s)")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4, 8, 16], help="K")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8], help="sessions at once")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    target = load_language_model(flags.target, dtype=flags.dtype, kv_cache_bytes=KV_CACHE_BYTES)
    with torch.inference_mode():
        plain = plain_s(target)
    heads = {kind: getattr(flags, f"{kind}_head") for kind in LOADERS}
    rows = [row for kind, head in heads.items() if head for row in asyncio.run(measured(flags, kind, head, plain))]
    dtype = str(target.dtype).removeprefix("torch.")
    title = f"{target.name}, {dtype}, one thread: a plain token takes {1e3 * plain:.1f} ms"
    Console(width=100).print(table(rows, title))


if __name__ == "__main__":
    main()
