"""An engine on a toy model whose next token is a sum, and forwards that a test can hold."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch

from specdec.engine import (
    ContiguousPool,
    EngineError,
    EngineLoop,
    Feed,
    ForwardOutput,
    KvCache,
    LayerShape,
    Task,
)
from specdec.exact.tree import path_to
from specdec.outside import Outside

TIMELESS = Outside(lambda: 0.0)  # nothing takes time: prompts are limited by tokens alone
VOCAB_SIZE = 97
MODULUS = 89
BLOCK_TOKENS = 8
POISON = 96  # the toy model's forward fails on this token


class ToyModel:
    """The next token is the sum of all tokens so far modulo 89, read back from the cache.

    Hidden states after layer l are that sum plus l. `forwards` lists each forward as {key: number of tokens}. While
    `gate` is closed, forwards wait.
    """

    def __init__(self, num_blocks: int = 1000) -> None:
        shape = LayerShape(1, 1, 1)
        num_bytes = num_blocks * BLOCK_TOKENS * shape.num_bytes(torch.float32)
        self.pool = ContiguousPool([shape], num_bytes=num_bytes, block_tokens=BLOCK_TOKENS)
        self.cache = KvCache(self.pool)
        self.forwards: list[dict[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def check(self, feed: Feed) -> None:
        if not all(0 <= token < VOCAB_SIZE for token in feed.tokens):
            raise EngineError("unknown token")
        feed.sequence.check_append(feed.tokens, feed.parents)

    def forward(self, feeds: list[Feed], when_prepared: Callable[[], None]) -> ForwardOutput:
        when_prepared()
        self.forwards.append({feed.sequence.key: len(feed.tokens) for feed in feeds})
        self.entered.release()
        self.gate.wait()
        if any(POISON in feed.tokens for feed in feeds):
            raise RuntimeError("poisoned by 96")
        sums = [self._append(feed) for feed in feeds]
        rows = [total[len(total) - feed.num_rows :] for total, feed in zip(sums, feeds, strict=True)]
        logits = torch.nn.functional.one_hot(torch.cat(rows), VOCAB_SIZE).float()
        return ForwardOutput(logits, tuple(map(self._observe, feeds, sums)))

    def _append(self, feed: Feed) -> torch.Tensor:
        """Return the sum at each token of the sequence."""
        sequence = feed.sequence
        assert sequence.num_pins == 1
        keys = self.pool.layers[0].keys[:, 0, 0]
        begin, length = self.pool.first_slot(sequence.key), sequence.length
        keys[begin + length : begin + length + len(feed.tokens)] = torch.tensor(feed.tokens, dtype=torch.float32)
        sequence.append(feed.tokens, feed.parents)
        cached = keys[begin : begin + sequence.length]
        base = sequence.length - len(feed.parents)
        sums = cached[:base].cumsum(0)
        paths = [path_to(node + 1, feed.parents) for node in range(len(feed.parents))]
        tree = [sums[-1] + sum(cached[base + node] for node in path) for path in paths]
        return torch.cat([sums, torch.tensor(tree)]).long() % MODULUS

    def _observe(self, feed: Feed, sums: torch.Tensor) -> torch.Tensor | None:
        if not feed.num_observed:
            return None
        return sums[len(sums) - feed.num_observed :, None, None] + torch.tensor(feed.hidden_layers)[:, None]


class Generation(Task[list[int]]):
    """Greedy generation of `num_new` tokens."""

    def __init__(self, key: str, tokens: list[int], num_new: int = 1, start: int = 0, *, match: bool = False) -> None:
        super().__init__(key, start, tokens, 1, match=match)
        self.num_new = num_new
        self.output: list[int] = []
        self.num_prepared = 0

    def prepare(self) -> None:
        self.num_prepared += 1
        self.output = []
        super().prepare()


def decode(tasks: list[Generation], logits: torch.Tensor) -> None:
    assert logits.shape[0] == sum(task.num_rows for task in tasks)
    for task, token in zip(tasks, logits.argmax(-1).tolist(), strict=True):
        task.output.append(token)
        if len(task.output) == task.num_new:
            task.finish(task.output)
        else:
            task.proceed([token])


def generated(tokens: list[int], num_new: int) -> list[int]:
    """Return the tokens that the toy model generates."""
    text = list(tokens)
    for _ in range(num_new):
        text.append(sum(text) % MODULUS)
    return text[len(tokens) :]


@asynccontextmanager
async def engine(model: Any, processor: Callable[..., None] = decode, **options: Any) -> AsyncIterator[EngineLoop[Any]]:
    loop: EngineLoop[Any] = EngineLoop(model, processor, **options)
    loop.start()
    try:
        yield loop
    finally:
        getattr(model, "gate", threading.Event()).set()
        await asyncio.to_thread(loop.stop)


@asynccontextmanager
async def paused_forward(model: ToyModel, loop: EngineLoop[Any]) -> AsyncIterator[None]:
    """Hold the engine inside a forward, so that tasks submitted meanwhile arrive together."""
    while model.entered.acquire(blocking=False):
        pass
    model.gate.clear()
    plug = asyncio.ensure_future(loop.run(Generation("plug", [1])))
    await asyncio.to_thread(model.entered.acquire)
    yield
    model.gate.set()
    await plug


def until(happened: Callable[[], bool]) -> None:
    """Wait for a condition set by another thread; only the test's timeout limits the wait."""
    while not happened():
        time.sleep(0.0005)


def start(loop: EngineLoop[Any], *tasks: Task[Any]) -> list[asyncio.Future[Any]]:
    return [asyncio.ensure_future(loop.run(task)) for task in tasks]


async def submitted(loop: EngineLoop[Any], *tasks: Task[Any]) -> list[asyncio.Future[Any]]:
    """Start the tasks and return once they are in the inbox, in order."""
    futures = start(loop, *tasks)
    await asyncio.sleep(0)
    return futures
