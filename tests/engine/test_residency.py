"""A cache that is full: who waits, who is suspended, who makes room."""

import asyncio
from typing import Any

import pytest
import torch

from specdec.engine import (
    CacheFull,
    CacheMiss,
    EngineLoop,
    TaskState,
)
from specdec.engine.batch import DECODING_TOKENS
from specdec.outside import Outside
from tests.engine.toy_engine import (
    MODULUS,
    Generation,
    ToyModel,
    decode,
    engine,
    generated,
    paused_forward,
    start,
    submitted,
)


class TestFullCache:
    async def test_tasks_wait_for_room(self) -> None:
        model = ToyModel(num_blocks=10)
        async with engine(model, prefill_chunk_tokens=DECODING_TOKENS) as loop:
            prompts = [[index] * 70 for index in range(4)]  # nine of ten blocks each
            results = await asyncio.gather(*(loop.run(Generation(str(p[0]), p, 5)) for p in prompts))
        assert results == [generated(prompt, 5) for prompt in prompts]
        assert all(sequence.num_pins == 0 for sequence in model.cache.sequences)

    async def test_evicted_task_restarts(self) -> None:
        model = ToyModel(num_blocks=10)
        tasks = [Generation(key, [3] * 4, 60) for key in "ab"]  # each grows to eight blocks
        async with engine(model) as loop:
            async with paused_forward(model, loop):
                futures = await submitted(loop, *tasks)
            assert await asyncio.gather(*futures) == [generated([3] * 4, 60)] * 2
        assert [task.num_prepared for task in tasks] == [1, 2]  # the younger task was evicted once

    async def test_tasks_larger_than_the_cache_fail(self) -> None:
        model = ToyModel(num_blocks=10)
        async with engine(model) as loop:
            with pytest.raises(CacheFull, match="do not fit"):
                await loop.run(Generation("a", [1] * 81))
            with pytest.raises(CacheFull, match="do not fit"):
                await loop.run(Generation("a", [1] * 79, 5))
            assert await loop.run(Generation("a", [1] * 79, 2)) == generated([1] * 79, 2)

    async def test_waiting_tasks_run_in_arrival_order(self) -> None:
        model = ToyModel(num_blocks=10)
        async with engine(model) as loop:
            async with paused_forward(model, loop):
                futures = await submitted(
                    loop, Generation("big", [1] * 60, 3), Generation("huge", [2] * 72), Generation("small", [3])
                )
            await asyncio.gather(*futures)
        first = {key: min(i for i, forward in enumerate(model.forwards) if key in forward) for key in ("huge", "small")}
        assert first["huge"] <= first["small"]

    async def test_idle_sequences_are_evicted(self) -> None:
        model = ToyModel(num_blocks=10)
        async with engine(model) as loop:
            for key in "abcdef":
                assert await loop.run(Generation(key, [ord(key) % 50] * 20, 2)) == generated([ord(key) % 50] * 20, 2)
            with pytest.raises(CacheMiss) as missed:
                await loop.run(Generation("a", [1], start=20))
            assert missed.value.cached_len == 0


class TestResidency:
    """More sessions than the cache holds: each takes rounds, and waits for a place in the cache."""

    @staticmethod
    async def session(loop: EngineLoop[Any], key: str, num_rounds: int) -> int:
        """Run a session's rounds; return how often its tokens had been evicted."""
        text, num_missed, start = [ord(key) % 50] * 20, 0, 0
        for _ in range(num_rounds):
            try:
                (token,) = await loop.run(Generation(key, text[start:], start=start))
            except CacheMiss:
                num_missed += 1
                (token,) = await loop.run(Generation(key, text))
            assert token == sum(text) % MODULUS
            start = len(text)
            text.append(token)
            await asyncio.sleep(0)
        loop.forget(key)
        return num_missed

    async def test_residents_are_not_evicted_between_rounds(self) -> None:
        model = ToyModel(num_blocks=20)  # for five sessions
        async with engine(model) as loop:
            missed = await asyncio.gather(*(self.session(loop, key, 12) for key in "abcdefghijklmnop"))
        assert sum(missed) == 0
        num_fed = sum(sum(forward.values()) for forward in model.forwards)
        assert num_fed == 16 * (20 + 11), "nothing was read twice"

    async def test_long_residents_make_room_for_those_that_wait(self) -> None:
        model, clock = ToyModel(num_blocks=8), iter(range(1_000_000))
        # each look at the clock takes a second
        async with engine(model, turn_s=30.0, outside=Outside(lambda: float(next(clock)))) as loop:
            missed = await asyncio.gather(*(self.session(loop, key, 40) for key in "abc"))
        assert any(missed)
        begun = [next(i for i, forward in enumerate(model.forwards) if key in forward) for key in "abc"]
        ended = [max(i for i, forward in enumerate(model.forwards) if key in forward) for key in "abc"]
        assert max(begun) < min(ended), "all had a turn before one had all of its rounds"

    async def test_sessions_that_stay_away_make_room(self) -> None:
        model = ToyModel(num_blocks=5)
        async with engine(model) as loop:
            await loop.run(Generation("away", [1] * 20))
            assert await loop.run(Generation("new", [2] * 20)) == generated([2] * 20, 1)
            assert model.cache.open("away").length == 0

    async def test_sessions_that_were_left_make_room_at_once(self) -> None:
        model = ToyModel(num_blocks=5)
        frozen = Outside(lambda: 0.0)  # nobody is ever away for long
        async with engine(model, outside=frozen) as loop:
            await loop.run(Generation("left", [1] * 20))
            loop.leave("left")
            assert await loop.run(Generation("new", [2] * 20)) == generated([2] * 20, 1)

    async def test_sessions_with_text_come_before_new_ones(self) -> None:
        class WithText(Generation):
            def __init__(self, key: str, tokens: list[int]) -> None:
                super().__init__(key, tokens)
                self.has_text = True

        model = ToyModel(num_blocks=4)
        async with engine(model) as loop:
            await loop.run(Generation("resident", [1] * 20))
            async with paused_forward(model, loop):
                new = await submitted(loop, *(Generation(key, [2] * 20) for key in "abc"))
                resumed = await submitted(loop, WithText("resumed", [3] * 20))
            await asyncio.gather(*new, *resumed)
        order = list(dict.fromkeys(key for forward in model.forwards for key in forward))
        assert order.index("resumed") < order.index("a")

    async def test_evicted_sessions_are_told_at_once(self) -> None:
        model = ToyModel(num_blocks=4)
        async with engine(model, turn_s=1000.0) as loop:
            await loop.run(Generation("resident", [1] * 20))
            async with paused_forward(model, loop):
                waiting = await submitted(loop, Generation("waiting", [2] * 20))
                (missed,) = await submitted(loop, Generation("gone", [2], start=20))
            with pytest.raises(CacheMiss):
                await missed
            assert not waiting[0].done()
            await waiting[0]


async def test_forgotten_sequences_are_freed_when_idle() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        await loop.run(Generation("idle", [1] * 30))
        async with paused_forward(model, loop):
            futures = await submitted(loop, Generation("busy", [2] * 30, 3))
            loop.forget("idle")
            loop.forget("busy")
        assert await futures[0] == generated([2] * 30, 3)
        await loop.run(Generation("last", [1]))
        assert {sequence.key for sequence in model.cache.sequences} == {"plug", "last"}


async def test_forgotten_sequences_are_not_reused() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        await loop.run(Generation("a", [1] * 30))
        async with paused_forward(model, loop):
            loop.forget("a")
            (late,) = await submitted(loop, Generation("a", [2], start=20))
        with pytest.raises(CacheMiss) as missed:
            await late
        assert missed.value.cached_len == 0


async def test_full_cache_suspends_the_youngest_task() -> None:
    model, seen = ToyModel(num_blocks=10), set[tuple[str, TaskState]]()
    tasks = [Generation(key, [3] * 4, 60) for key in "ab"]  # each grows to eight blocks

    def watch(due: list[Generation], logits: torch.Tensor) -> None:
        seen.update((task.key, task.state) for task in tasks)
        decode(due, logits)

    async with engine(model, watch) as loop:
        await asyncio.gather(*start(loop, *tasks))
    assert ("b", TaskState.SUSPENDED) in seen
    assert ("a", TaskState.SUSPENDED) not in seen
