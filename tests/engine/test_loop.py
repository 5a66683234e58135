"""The engine's thread: which tasks share a forward, chunked prefill, cancellation, how it stops; on a toy model."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.engine import (
    EngineError,
    EngineLoop,
    Feed,
    ForwardOutput,
    Task,
    TaskState,
)
from specdec.engine.batch import DECODING_TOKENS
from tests.engine.tiny_models import load
from tests.engine.toy_engine import (
    MODULUS,
    TIMELESS,
    Generation,
    ToyModel,
    decode,
    engine,
    generated,
    paused_forward,
    start,
    submitted,
    until,
)
from tests.support import architectures


async def test_tasks_arriving_together_share_a_forward() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        async with paused_forward(model, loop):
            futures = await submitted(loop, *(Generation(key, [ord(key) % 50], 3) for key in "abc"))
            assert loop.load.num_waiting == 3
            assert loop.load.num_running == 1
        assert await asyncio.gather(*futures) == [generated([ord(key) % 50], 3) for key in "abc"]
    assert model.forwards == [{"plug": 1}] + 3 * [{"a": 1, "b": 1, "c": 1}]


async def measured(model: ToyModel, loop: EngineLoop[Any]) -> None:
    """Let the engine measure what rounds and prompts cost, then forget the forwards."""
    await loop.run(Generation("round", [1], 3))
    await loop.run(Generation("prompt", [1] * 100))
    model.forwards.clear()


async def test_long_prompts_never_delay_decoding() -> None:
    model, prompt = ToyModel(), [index % 90 for index in range(1000)]
    async with engine(model, max_batch_tokens=100, prefill_chunk_tokens=100, outside=TIMELESS) as loop:
        await measured(model, loop)
        async with paused_forward(model, loop):
            futures = await submitted(loop, Generation("decoding", [5], 10), Generation("long", prompt))
            futures += await submitted(loop, Generation("longer", [3] * 1300))
        assert await asyncio.gather(*futures) == [
            generated([5], 10),
            generated(prompt, 1),
            generated([3] * 1300, 1),
        ]
    assert model.forwards[1] == {"decoding": 1, "long": 99}
    assert all(forward["decoding"] == 1 and sum(forward.values()) == 100 for forward in model.forwards[1:11])
    assert sum(forward.get("longer", 0) for forward in model.forwards) == 1300


async def test_prompts_share_the_prefill_budget() -> None:
    model = ToyModel()
    async with engine(model, max_batch_tokens=200, prefill_chunk_tokens=100, outside=TIMELESS) as loop:
        await measured(model, loop)
        async with paused_forward(model, loop):
            prompts = await submitted(loop, Generation("long", [2] * 200), Generation("longer", [3] * 300))
            decoding = await submitted(loop, Generation("short", [5] * 60, 3))
        await asyncio.gather(*prompts, *decoding)
    read = [sum(forward.get(key, 0) for key in ("long", "longer")) for forward in [*model.forwards[1:], {}][:6]]
    assert read == [100] * 5 + [0]
    assert [forward.get("short") for forward in model.forwards[1:4]] == [60, 1, 1]


async def test_rows_of_a_task_share_a_forward() -> None:
    rows: list[torch.Tensor] = []

    def keep(tasks: list[Task[None]], logits: torch.Tensor) -> None:
        rows.append(logits)
        tasks[0].finish(None)

    prompt = [index % 90 for index in range(130)]
    for num_rows in (0, 5, 90, 130):
        async with engine(ToyModel(), keep, max_batch_tokens=130, prefill_chunk_tokens=128) as loop:
            await loop.run(Task("a", 0, prompt, num_rows))
    expected = torch.tensor(prompt).cumsum(0) % MODULUS
    for logits, num_rows in zip(rows, (0, 5, 90, 130), strict=True):
        assert torch.equal(logits.argmax(-1), expected[len(prompt) - num_rows :])


async def test_batches_respect_max_batch_tokens() -> None:
    model = ToyModel()
    async with engine(model, max_batch_tokens=DECODING_TOKENS, prefill_chunk_tokens=DECODING_TOKENS) as loop:
        tasks = [Generation(str(index), [index] * 30, 4) for index in range(7)]
        async with paused_forward(model, loop):
            futures = await submitted(loop, *tasks)
        assert await asyncio.gather(*futures) == [generated([index] * 30, 4) for index in range(7)]
    assert max(sum(forward.values()) for forward in model.forwards) <= DECODING_TOKENS


async def test_tasks_of_one_sequence_run_in_turn() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        async with paused_forward(model, loop):
            first, second = Generation("a", [1, 2], 3), Generation("a", [9], 2, start=1)
            futures = await submitted(loop, first, second)
        assert await asyncio.gather(*futures) == [generated([1, 2], 3), generated([1, 9], 2)]
        assert model.cache.open("a").length == 3


async def test_cancelling_spares_sequence_and_other_tasks() -> None:
    class Endless(Generation):
        pass

    def decode_or_repeat(tasks: list[Generation], logits: torch.Tensor) -> None:
        for task, row in zip(tasks, logits, strict=True):
            if isinstance(task, Endless):
                task.sequence.truncate(task.sequence.length - 1)
                task.tokens = [1]
            else:
                decode([task], row[None])

    model = ToyModel()
    async with engine(model, decode_or_repeat) as loop:
        await loop.run(Generation("a", [1, 2, 3]))
        async with paused_forward(model, loop):
            futures = await submitted(loop, Endless("a", [4] * 9, start=2), Generation("other", [5], 2))
        assert await futures[1] == generated([5], 2)
        async with paused_forward(model, loop):
            other = await submitted(loop, Generation("other", [5], 2))
            assert model.cache.open("a").length >= 10
            futures[0].cancel()
            await asyncio.wait([futures[0]])
        assert futures[0].cancelled()
        assert await other[0] == generated([5], 2)
        assert list(model.cache.open("a").tokens) == [1, 2, *[4] * 8], "the text that was read, without what is drafted"
        assert await loop.run(Generation("a", [7], 1, start=2)) == generated([1, 2, 7], 1)
        assert loop.load.num_running == loop.load.num_waiting == 0


async def test_cancelled_prompts_keep_what_was_read() -> None:
    """Each attempt is given up in its first forward; together they read every token once."""
    model, prompt = ToyModel(), [token % 7 for token in range(8 * DECODING_TOKENS)]
    async with engine(model, prefill_chunk_tokens=DECODING_TOKENS, outside=TIMELESS) as loop:
        for _ in range(3):
            async with given_up_forward(model, loop):
                (future,) = await submitted(loop, Generation("a", prompt, match=True))
                await asyncio.to_thread(model.entered.acquire)
                future.cancel()
                await asyncio.wait([future])
        assert sum(forward.get("a", 0) for forward in model.forwards) == 3 * DECODING_TOKENS
        assert await loop.run(Generation("a", prompt, match=True)) == generated(prompt, 1)
    assert sum(forward.get("a", 0) for forward in model.forwards) == len(prompt)


@asynccontextmanager
async def given_up_forward(model: ToyModel, loop: EngineLoop[Any]) -> AsyncIterator[None]:
    """Hold every forward that begins meanwhile; in the end let them run, and the engine come to rest."""
    while model.entered.acquire(blocking=False):
        pass
    model.gate.clear()
    yield
    model.gate.set()
    await loop.run(Generation("plug", [1]))


async def test_task_cancelled_while_waiting_never_runs() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        async with paused_forward(model, loop):
            futures = await submitted(loop, Generation("a", [1]), Generation("b", [2]))
            futures[0].cancel()
            await asyncio.wait([futures[0]])
        assert await futures[1] == generated([2], 1)
    assert all("a" not in forward for forward in model.forwards)


async def test_event_loop_runs_during_forwards() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        assert not loop.is_stalled(0)
        async with paused_forward(model, loop):
            for _ in range(100):
                await asyncio.sleep(0)
            assert loop.last_step_age_s > 0
            assert loop.is_stalled(0)
            assert not loop.is_stalled(3600)
        await loop.run(Generation("a", [1]))
        await asyncio.to_thread(until, lambda: loop.last_step_age_s == 0)
        assert not loop.is_stalled(0)
    assert loop.is_stalled(3600), "a stopped thread makes no progress"


async def test_who_waits_is_told_when_the_next_forward_computes() -> None:
    """Not before, when the engine's thread would wait for the interpreter, and not after."""
    told_early: list[bool] = []

    class Watched(ToyModel):
        def forward(self, feeds: list[Feed], when_prepared: Callable[[], None]) -> ForwardOutput:
            if len(self.forwards) == 2:  # after the plug's, and that in which "a" has ended
                time.sleep(0.05)
                told_early.append(futures[0].done())
                when_prepared()
                until(futures[0].done)
            return super().forward(feeds, when_prepared)

    model = Watched()
    async with engine(model) as loop:
        async with paused_forward(model, loop):
            futures = await submitted(loop, Generation("a", [1]), Generation("b", [2], 2))
        assert await asyncio.gather(*futures) == [generated([1], 1), generated([2], 2)]
    assert told_early == [False]
    assert model.forwards == [{"plug": 1}, {"a": 1, "b": 1}, {"b": 1}]


async def test_a_model_that_never_says_that_it_computes_keeps_nobody_waiting() -> None:
    class Silent(ToyModel):
        def forward(self, feeds: list[Feed], when_prepared: Callable[[], None]) -> ForwardOutput:
            return super().forward(feeds, lambda: None)

    model = Silent()
    async with engine(model) as loop:
        async with paused_forward(model, loop):
            futures = await submitted(loop, Generation("a", [1]), Generation("b", [2], 2))
        assert await asyncio.gather(*futures) == [generated([1], 1), generated([2], 2)]


async def test_timings_add_up() -> None:
    model, task = ToyModel(), Generation("a", [1] * 600, 3)
    async with engine(model) as loop:
        async with paused_forward(model, loop):
            futures = await submitted(loop, task)
        await futures[0]
    assert task.timings.queue_s > 0
    assert task.timings.forward_s > 0
    assert task.timings.queue_s + task.timings.forward_s <= task.timings.total_s


async def test_a_task_knows_how_many_tokens_its_forward_had() -> None:
    """Of all tasks, in the last forward; nothing where prompts were read in it, whose time is no round's."""
    model, rounds, prompt = ToyModel(), [Generation(key, [1] * 3, 2) for key in "abc"], Generation("p", [1] * 600)
    async with engine(model) as loop:
        for tasks, last in ((rounds, 3), ([Generation("d", [2] * 4), prompt], 0)):
            async with paused_forward(model, loop):
                futures = await submitted(loop, *tasks)
            await asyncio.gather(*futures)
            assert {task.timings.num_forward_tokens for task in tasks} == {last}


async def test_stopping_fails_unfinished_tasks() -> None:
    model = ToyModel()
    loop = EngineLoop(model, decode)
    with pytest.raises(EngineError, match="not running"):
        await loop.run(Generation("a", [1]))
    loop.start()
    async with paused_forward(model, loop):
        futures = await submitted(loop, Generation("a", [1]), Generation("b", [1] * 500, 2))
        stopping = threading.Thread(target=loop.stop)
        stopping.start()
        await asyncio.to_thread(until, lambda: loop._inbox.qsize() == 3)
    await asyncio.to_thread(stopping.join)
    for result in await asyncio.gather(*futures, return_exceptions=True):
        assert isinstance(result, EngineError)
        assert "stopped" in str(result)
    with pytest.raises(EngineError, match="not running"):
        await loop.run(Generation("a", [1]))


def test_chunks_must_fit_into_batches() -> None:
    with pytest.raises(EngineError, match="change one of them"):
        EngineLoop(ToyModel(), decode, max_batch_tokens=100, prefill_chunk_tokens=200)


@pytest.mark.parametrize("kv_cache_bytes", [1 << 20, 3 * 2 * 2 * 12 * 4 * 128])
async def test_greedy_text_is_independent_of_batch(tmp_path: Path, kv_cache_bytes: int) -> None:
    folder = architectures.build("llama", tmp_path)
    model = load(folder, kv_cache_bytes=kv_cache_bytes)
    tasks = [Generation(str(index), [index + 1] * (1 + 9 * index), 20) for index in range(9)]
    alone: list[list[int]] = []
    async with engine(model) as loop:
        for task in tasks:
            alone.append(await loop.run(Generation("alone", task.tokens, task.num_new)))
        together = await asyncio.gather(*start(loop, *tasks))
    assert together == alone


async def test_task_passes_through_its_states() -> None:
    model, task = ToyModel(), Generation("a", [1])
    states = [task.state]
    async with engine(model) as loop:
        async with paused_forward(model, loop):
            (future,) = await submitted(loop, task)
            states.append(task.state)
        await future
        assert [*states, task.state] == [TaskState.NEW, TaskState.WAITING, TaskState.ENDED]
        with pytest.raises(EngineError, match="already run"):
            await loop.run(task)
