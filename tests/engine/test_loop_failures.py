"""Forwards and processors that fail: whom it costs what, and what is logged."""

import asyncio
import logging
from pathlib import Path

import pytest
import torch

from specdec.engine import (
    CacheMiss,
    EngineError,
)
from tests.engine.toy_engine import (
    POISON,
    VOCAB_SIZE,
    Generation,
    ToyModel,
    decode,
    engine,
    generated,
    paused_forward,
    submitted,
)


async def test_failing_forward_fails_only_its_batch(caplog: pytest.LogCaptureFixture) -> None:
    model = ToyModel()
    async with engine(model) as loop:
        await loop.run(Generation("other", [1, 2]))
        caplog.clear()
        async with paused_forward(model, loop):
            futures = await submitted(loop, Generation("other", [3], 1, start=2), Generation("bad", [POISON]))
        for failed in await asyncio.gather(*futures, return_exceptions=True):
            assert isinstance(failed, EngineError)
            assert "the forward failed: RuntimeError: poisoned" in str(failed)
        assert_logged(caplog, "engine_tasks_failed", stage="the forward", error="RuntimeError", num_tasks=2)
        assert loop.num_failed_forwards == 1
        assert model.cache.open("other").length == 2
        assert await loop.run(Generation("other", [3], 1, start=2)) == generated([1, 2, 3], 1)
        assert loop.num_failed_forwards == 0, "since the last one that succeeded"


def assert_logged(caplog: pytest.LogCaptureFixture, event: str, **facts: object) -> None:
    """Assert that one error was logged, with these facts and the place, without traceback or exception text."""
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage() == event
    assert {name: record.__dict__[name] for name in facts} == facts
    assert record.__dict__["where"].startswith((Path(__file__).name, "toy_engine.py"))
    assert record.exc_info is None
    assert not any("96" in str(value) for name, value in record.__dict__.items() if name in (*facts, "where", "msg"))


async def test_failing_processor_fails_only_due_tasks() -> None:
    def fail_once(tasks: list[Generation], logits: torch.Tensor) -> None:
        if any(task.key == "bad" for task in tasks):
            raise ZeroDivisionError
        decode(tasks, logits)

    model = ToyModel()
    async with engine(model, fail_once) as loop:
        async with paused_forward(model, loop):
            futures = await submitted(loop, Generation("bad", [1]), Generation("long", [2] * 500))
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(results[0], EngineError)
        assert isinstance(results[0].__cause__, ZeroDivisionError)
        assert results[1] == generated([2] * 500, 1)
        assert model.cache.open("bad").length == 0


async def test_failing_processor_counts_as_failing_forwards() -> None:
    """Prefill forwards in between, which the processor has no part in, do not hide that it always fails."""

    def fail(tasks: list[Generation], logits: torch.Tensor) -> None:
        raise ZeroDivisionError

    async with engine(ToyModel(), fail) as loop:
        for number in range(1, 4):
            with pytest.raises(EngineError):
                await loop.run(Generation(f"{number}", [2] * 500))
            assert loop.num_failed_forwards == number


async def test_check_is_a_forward_of_its_own() -> None:
    """The processor does not see it, and nothing of it stays."""
    model = ToyModel()
    async with engine(model) as loop:
        with pytest.raises(EngineError, match="poisoned"):
            await loop.run(Generation("bad", [POISON]))
        assert loop.num_failed_forwards == 1
        await asyncio.gather(loop.check(), loop.run(Generation("good", [1])))
        assert loop.num_failed_forwards == 0
        await loop.run(Generation("later", [1]))
        assert {sequence.key for sequence in model.cache.sequences} == {"good", "later"}


async def test_invalid_task_fails_alone() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        async with paused_forward(model, loop):
            futures = await submitted(loop, Generation("bad", [VOCAB_SIZE]), Generation("good", [1]))
        results = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(results[0], EngineError)
    assert results[1] == generated([1], 1)
    assert model.forwards[-1] == {"good": 1}


async def test_processor_must_finish_or_continue_tasks() -> None:
    async with engine(ToyModel(), lambda tasks, logits: None) as loop:
        with pytest.raises(EngineError, match="neither"):
            await loop.run(Generation("a", [1]))


async def test_processor_can_fail_one_task() -> None:
    def fail_bad(tasks: list[Generation], logits: torch.Tensor) -> None:
        for task in tasks:
            if task.key == "bad":
                task.fail(ArithmeticError("not finite"))
            else:
                task.finish([1])

    model = ToyModel()
    async with engine(model, fail_bad) as loop:
        async with paused_forward(model, loop):
            futures = await submitted(loop, *(Generation(key, [1]) for key in ("a", "bad", "b")))
        results = await asyncio.gather(*futures, return_exceptions=True)
    assert results[0] == results[2] == [1]
    assert isinstance(results[1], ArithmeticError)


async def test_missing_prefix_is_reported() -> None:
    async with engine(ToyModel()) as loop:
        await loop.run(Generation("a", [1, 2, 3]))
        with pytest.raises(CacheMiss) as missed:
            await loop.run(Generation("a", [1], start=5))
        assert missed.value.cached_len == 3
        assert await loop.run(Generation("a", [4], 1, start=3)) == generated([1, 2, 3, 4], 1)


async def test_tasks_may_end_in_prepare() -> None:
    class Early(Generation):
        def prepare(self) -> None:
            self.finish([self.sequence.length])

    model = ToyModel()
    async with engine(model) as loop:
        await loop.run(Generation("a", [1, 2, 3]))
        assert await loop.run(Early("a", [4])) == [3]
        assert loop.load.num_running == loop.load.num_waiting == 0
    assert len(model.forwards) == 1
