"""How long rounds are waited for."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.pool.pool import WorkerPool
from coordinator.pool.worker import Worker
from coordinator.round_times import FEW_TOKENS, MIN_ROUNDS, NUM_REMEMBERED, TOKENS_PER_CEILING, RoundTimes
from coordinator.streams import SessionOpening, WorkerGroup, WorkerStream
from specdec.types import SamplingParams


def times(*decode_s: float) -> RoundTimes:
    made = RoundTimes(floor_s=1.0, ceiling_s=60.0, factor=4.0)
    for elapsed_s in decode_s:
        made.observe(elapsed_s, 1)
    return made


def test_without_rounds_the_ceiling_holds() -> None:
    assert times().limit_s(1) == 60.0
    assert times(*[0.01] * (MIN_ROUNDS - 1)).limit_s(1) == 60.0


def test_quick_rounds_are_waited_for_shortly() -> None:
    assert times(*[0.01] * MIN_ROUNDS).limit_s(1) == 1.0


def test_slow_rounds_are_waited_for_longer() -> None:
    assert times(*[2.0] * MIN_ROUNDS).limit_s(1) == 8.0
    assert times(*[200.0] * MIN_ROUNDS).limit_s(1) == 60.0


def test_one_slow_round_in_a_hundred_changes_nothing() -> None:
    assert times(*[0.01] * 99, 50.0).limit_s(1) == 1.0


def test_old_rounds_are_forgotten() -> None:
    assert times(*[5.0] * NUM_REMEMBERED, *[0.01] * NUM_REMEMBERED).limit_s(1) == 1.0


def test_prompts_are_measured_by_the_token() -> None:
    made = times(*[0.01] * MIN_ROUNDS)
    for _ in range(MIN_ROUNDS):
        made.observe(2.0, 1000)
    assert made.limit_s(1) == 1.0, "prompts do not count for rounds that read few tokens"
    assert made.limit_s(FEW_TOKENS + 1) < 1.5
    assert made.limit_s(4000) == pytest.approx(4 * (4 * 2.0 + 0.01))


def test_ceiling_grows_with_the_prompt() -> None:
    assert times().limit_s(4 * TOKENS_PER_CEILING) == 5 * 60.0


def test_rounds_given_up_make_the_next_ones_patient() -> None:
    """Where all rounds are slow, giving up each of them would never let one end."""
    made = times(*[0.01] * NUM_REMEMBERED)
    limits = []
    for _ in range(100):
        limits.append(made.limit_s(1))
        made.observe(limits[-1], 1)
    assert limits[0] == 1.0
    assert limits[-1] == 60.0


@dataclass
class Forgetful:
    """A draft worker's stream that loses the session's cache once, and reads the whole text in 0.3 s."""

    replies: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 5000), (0.0, 0), (0.3, 5001)])

    asked: int = 0

    async def write(self, message: object) -> None:
        if isinstance(message, int):
            self.asked = message

    async def read(self) -> SimpleNamespace:
        pause_s, cached_len = self.replies.pop(0)
        await asyncio.sleep(pause_s)
        return SimpleNamespace(cached_len=cached_len, round=self.asked)

    def cancel(self) -> None: ...


async def test_a_text_that_is_read_again_has_the_time_of_its_length() -> None:
    async def describe(channel: object) -> object:
        return channel

    worker = Worker("a", None, describe)
    await worker.probe()
    pool: WorkerPool[object] = WorkerPool()
    pool.workers["a"] = worker
    quick = RoundTimes(floor_s=0.1, ceiling_s=10.0, factor=4.0)
    for _ in range(NUM_REMEMBERED):
        quick.observe(0.01, 1)
    session = SessionOpening("s", 1, SamplingParams(seed=1), 1, lambda length: b"")
    stream: WorkerStream[Any, object] = WorkerStream(
        WorkerGroup("draft", pool, quick), lambda channel: Forgetful(), session, "open", "close"
    )
    text = list(range(5000))
    for committed in (text, [*text, 1]):
        reply = await stream.ask(committed, lambda start, tokens, digest, number: number)
        assert reply.cached_len == len(committed)
