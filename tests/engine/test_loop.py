"""The engine thread: batching, chunked prompts, cancellation, failures, scarce memory; a model with known output."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.engine import CacheFull, CacheMiss, EngineError, EngineLoop, Feed, KvCache, LanguageModel, Task
from specdec.engine.kv import LayerShape
from specdec.engine.schedule import DECODING_TOKENS
from tests.support import architectures

VOCAB_SIZE = 97
MODULUS = 89
BLOCK_TOKENS = 8
POISON = 96  # a token that the toy's forward dies of


class ToyModel:
    """The next token is the sum of all tokens so far modulo 89, read back from the cache.

    `forwards` lists each forward as {key: number of tokens}. While `gate` is closed, forwards stand still.
    """

    def __init__(self, num_blocks: int = 1000) -> None:
        shape = LayerShape(1, 1, 1)
        num_bytes = num_blocks * BLOCK_TOKENS * shape.num_bytes(torch.float32)
        self.cache = KvCache([shape], num_bytes=num_bytes, block_tokens=BLOCK_TOKENS)
        self.forwards: list[dict[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def check(self, feed: Feed) -> None:
        if not all(0 <= token < VOCAB_SIZE for token in feed.tokens):
            raise EngineError("unknown token")

    def forward(self, feeds: list[Feed]) -> torch.Tensor:
        self.forwards.append({feed.sequence.key: len(feed.tokens) for feed in feeds})
        self.entered.release()
        self.gate.wait()
        if any(POISON in feed.tokens for feed in feeds):
            raise RuntimeError("poisoned")
        return torch.cat([self._append(feed) for feed in feeds])

    def _append(self, feed: Feed) -> torch.Tensor:
        sequence = feed.sequence
        assert sequence.num_pins == 1
        keys = self.cache.layers[0].keys[:, 0, 0]
        begin, length = sequence.first_slot, sequence.length
        keys[begin + length : begin + length + len(feed.tokens)] = torch.tensor(feed.tokens, dtype=torch.float32)
        sequence.advance(len(feed.tokens))
        sums = keys[begin : begin + sequence.length].cumsum(0).long() % MODULUS
        return torch.nn.functional.one_hot(sums[sequence.length - feed.num_rows :], VOCAB_SIZE).float()


class Generation(Task[list[int]]):
    """Greedy generation of `num_new` tokens."""

    def __init__(self, key: str, tokens: list[int], num_new: int = 1, start: int = 0) -> None:
        super().__init__(key, start, tokens, 1)
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
            task.tokens, task.num_rows = [token], 1


def distribution(tokens: list[int], num_new: int) -> list[int]:
    """What the toy model generates."""
    text = list(tokens)
    for _ in range(num_new):
        text.append(sum(text) % MODULUS)
    return text[len(tokens) :]


@asynccontextmanager
async def engine(model: Any, processor: Callable[..., None] = decode, **options: int) -> AsyncIterator[EngineLoop[Any]]:
    loop: EngineLoop[Any] = EngineLoop(model, processor, **options)
    loop.start()
    try:
        yield loop
    finally:
        getattr(model, "gate", threading.Event()).set()
        await asyncio.to_thread(loop.stop)


@asynccontextmanager
async def standing_still(model: ToyModel, loop: EngineLoop[Any]) -> AsyncIterator[None]:
    """Hold the engine inside a forward, so that what is submitted meanwhile arrives together."""
    while model.entered.acquire(blocking=False):
        pass
    model.gate.clear()
    plug = asyncio.ensure_future(loop.run(Generation("plug", [1])))
    await asyncio.to_thread(model.entered.acquire)
    yield
    model.gate.set()
    await plug


def until(happened: Callable[[], bool]) -> None:
    """Wait for something on another thread; the test's own timeout ends a wait in vain."""
    while not happened():
        pass


def start(loop: EngineLoop[Any], *tasks: Generation) -> list[asyncio.Future[list[int]]]:
    return [asyncio.ensure_future(loop.run(task)) for task in tasks]


async def submitted(loop: EngineLoop[Any], *tasks: Generation) -> list[asyncio.Future[list[int]]]:
    """Start the tasks and return once they are in the inbox, in order."""
    futures = start(loop, *tasks)
    await asyncio.sleep(0)
    return futures


async def test_tasks_that_arrive_during_a_forward_share_the_next() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        async with standing_still(model, loop):
            futures = await submitted(loop, *(Generation(key, [ord(key) % 50], 3) for key in "abc"))
            assert loop.load.num_waiting == 3
            assert loop.load.num_running == 1
        assert await asyncio.gather(*futures) == [distribution([ord(key) % 50], 3) for key in "abc"]
    assert model.forwards == [{"plug": 1}] + 3 * [{"a": 1, "b": 1, "c": 1}]
    assert (loop.counters.num_forwards, loop.counters.num_tokens, loop.counters.mean_batch_size) == (4, 10, 2.5)


async def test_long_prompts_never_keep_a_decoding_task_waiting() -> None:
    model, prompt = ToyModel(), [index % 90 for index in range(1000)]
    async with engine(model, max_batch_tokens=100, prefill_chunk_tokens=100) as loop:
        async with standing_still(model, loop):
            futures = await submitted(loop, Generation("decoding", [5], 10), Generation("long", prompt))
            futures += await submitted(loop, Generation("longer", [3] * 300))
        assert await asyncio.gather(*futures) == [
            distribution([5], 10),
            distribution(prompt, 1),
            distribution([3] * 300, 1),
        ]
    assert model.forwards[1:11] == [{"decoding": 1, "long": 99}] * 10
    assert sum(forward.get("longer", 0) for forward in model.forwards) == 300


async def test_prompts_share_one_chunk_and_leave_room_for_who_decodes() -> None:
    model = ToyModel()
    async with engine(model, max_batch_tokens=200, prefill_chunk_tokens=100) as loop:
        async with standing_still(model, loop):
            prompts = await submitted(loop, Generation("long", [2] * 200), Generation("longer", [3] * 300))
            decoding = await submitted(loop, Generation("decoding", [5] * 60, 3))
        await asyncio.gather(*prompts, *decoding)
    assert [forward.get("long", 0) + forward.get("longer", 0) for forward in model.forwards[1:6]] == [100] * 5
    assert [forward.get("decoding") for forward in model.forwards[1:4]] == [60, 1, 1]


async def test_all_rows_of_a_task_come_from_one_forward() -> None:
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


async def test_a_batch_is_never_larger_than_allowed() -> None:
    model = ToyModel()
    async with engine(model, max_batch_tokens=DECODING_TOKENS, prefill_chunk_tokens=DECODING_TOKENS) as loop:
        tasks = [Generation(str(index), [index] * 30, 4) for index in range(7)]
        async with standing_still(model, loop):
            futures = await submitted(loop, *tasks)
        assert await asyncio.gather(*futures) == [distribution([index] * 30, 4) for index in range(7)]
    assert max(sum(forward.values()) for forward in model.forwards) <= DECODING_TOKENS


async def test_one_sequence_serves_its_tasks_one_after_another() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        async with standing_still(model, loop):
            first, second = Generation("a", [1, 2], 3), Generation("a", [9], 2, start=1)
            futures = await submitted(loop, first, second)
        assert await asyncio.gather(*futures) == [distribution([1, 2], 3), distribution([1, 9], 2)]
        assert model.cache.open("a").length == 3


async def test_a_cancelled_task_leaves_its_sequence_and_its_batch_mates_alone() -> None:
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
        async with standing_still(model, loop):
            futures = await submitted(loop, Endless("a", [4] * 9, start=2), Generation("mate", [5], 2))
        assert await futures[1] == distribution([5], 2)
        async with standing_still(model, loop):
            mate = await submitted(loop, Generation("mate", [5], 2))
            assert model.cache.open("a").length >= 10
            futures[0].cancel()
            await asyncio.wait([futures[0]])
        assert futures[0].cancelled()
        assert await mate[0] == distribution([5], 2)
        assert model.cache.open("a").length == 2
        assert await loop.run(Generation("a", [7], 1, start=2)) == distribution([1, 2, 7], 1)
        assert loop.load.num_running == loop.load.num_waiting == 0


async def test_a_task_cancelled_while_it_waits_never_runs() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        async with standing_still(model, loop):
            futures = await submitted(loop, Generation("a", [1]), Generation("b", [2]))
            futures[0].cancel()
            await asyncio.wait([futures[0]])
        assert await futures[1] == distribution([2], 1)
    assert all("a" not in forward for forward in model.forwards)


async def test_a_failing_forward_fails_its_batch_only() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        await loop.run(Generation("mate", [1, 2]))
        async with standing_still(model, loop):
            futures = await submitted(loop, Generation("mate", [3], 1, start=2), Generation("bad", [POISON]))
        for failed in await asyncio.gather(*futures, return_exceptions=True):
            assert isinstance(failed, EngineError)
            assert "the forward failed: RuntimeError: poisoned" in str(failed)
        assert model.cache.open("mate").length == 2
        assert await loop.run(Generation("mate", [3], 1, start=2)) == distribution([1, 2, 3], 1)


async def test_a_failing_processor_fails_only_who_was_due() -> None:
    def fail_once(tasks: list[Generation], logits: torch.Tensor) -> None:
        if any(task.key == "bad" for task in tasks):
            raise ZeroDivisionError
        decode(tasks, logits)

    model = ToyModel()
    async with engine(model, fail_once) as loop:
        async with standing_still(model, loop):
            futures = await submitted(loop, Generation("bad", [1]), Generation("long", [2] * 500))
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(results[0], EngineError)
        assert isinstance(results[0].__cause__, ZeroDivisionError)
        assert results[1] == distribution([2] * 500, 1)
        assert model.cache.open("bad").length == 0


async def test_a_bad_task_fails_before_it_can_harm_a_batch() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        async with standing_still(model, loop):
            futures = await submitted(loop, Generation("bad", [VOCAB_SIZE]), Generation("good", [1]))
        results = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(results[0], EngineError)
    assert results[1] == distribution([1], 1)
    assert model.forwards[-1] == {"good": 1}


async def test_a_processor_must_end_a_task_or_give_it_tokens() -> None:
    async with engine(ToyModel(), lambda tasks, logits: None) as loop:
        with pytest.raises(EngineError, match="neither"):
            await loop.run(Generation("a", [1]))


async def test_a_processor_can_fail_one_task() -> None:
    def fail_bad(tasks: list[Generation], logits: torch.Tensor) -> None:
        for task in tasks:
            if task.key == "bad":
                task.fail(ArithmeticError("not finite"))
            else:
                task.finish([1])

    model = ToyModel()
    async with engine(model, fail_bad) as loop:
        async with standing_still(model, loop):
            futures = await submitted(loop, *(Generation(key, [1]) for key in ("a", "bad", "b")))
        results = await asyncio.gather(*futures, return_exceptions=True)
    assert results[0] == results[2] == [1]
    assert isinstance(results[1], ArithmeticError)


async def test_a_task_that_builds_on_more_than_is_cached_is_told_how_much_is() -> None:
    async with engine(ToyModel()) as loop:
        await loop.run(Generation("a", [1, 2, 3]))
        with pytest.raises(CacheMiss) as missed:
            await loop.run(Generation("a", [1], start=5))
        assert missed.value.cached_len == 3
        assert await loop.run(Generation("a", [4], 1, start=3)) == distribution([1, 2, 3, 4], 1)


async def test_a_task_may_end_in_prepare() -> None:
    class Early(Generation):
        def prepare(self) -> None:
            self.finish([self.sequence.length])

    model = ToyModel()
    async with engine(model) as loop:
        await loop.run(Generation("a", [1, 2, 3]))
        assert await loop.run(Early("a", [4])) == [3]
        assert loop.load.num_running == loop.load.num_waiting == 0
    assert len(model.forwards) == 1


class TestScarceMemory:
    async def test_a_task_waits_until_others_make_room(self) -> None:
        model = ToyModel(num_blocks=10)
        async with engine(model, prefill_chunk_tokens=DECODING_TOKENS) as loop:
            prompts = [[index] * 70 for index in range(4)]  # nine of ten blocks each
            results = await asyncio.gather(*(loop.run(Generation(str(p[0]), p, 5)) for p in prompts))
        assert results == [distribution(prompt, 5) for prompt in prompts]
        assert all(sequence.num_pins == 0 for sequence in model.cache.sequences)

    async def test_a_task_that_lost_its_room_starts_again(self) -> None:
        model = ToyModel(num_blocks=10)
        tasks = [Generation(key, [3] * 4, 60) for key in "ab"]  # each grows to eight blocks
        async with engine(model) as loop:
            async with standing_still(model, loop):
                futures = await submitted(loop, *tasks)
            assert await asyncio.gather(*futures) == [distribution([3] * 4, 60)] * 2
        assert [task.num_prepared for task in tasks] == [1, 2]  # the younger made way, once

    async def test_what_can_never_fit_fails_at_once(self) -> None:
        model = ToyModel(num_blocks=10)
        async with engine(model) as loop:
            with pytest.raises(CacheFull, match="do not fit"):
                await loop.run(Generation("a", [1] * 81))
            with pytest.raises(CacheFull, match="do not fit"):
                await loop.run(Generation("a", [1] * 79, 5))
            assert await loop.run(Generation("a", [1] * 79, 2)) == distribution([1] * 79, 2)

    async def test_first_come_first_served(self) -> None:
        model = ToyModel(num_blocks=10)
        async with engine(model) as loop:
            async with standing_still(model, loop):
                futures = await submitted(
                    loop, Generation("big", [1] * 60, 3), Generation("huge", [2] * 72), Generation("small", [3])
                )
            await asyncio.gather(*futures)
        first = {key: min(i for i, forward in enumerate(model.forwards) if key in forward) for key in ("huge", "small")}
        assert first["huge"] <= first["small"]

    async def test_idle_sequences_give_way_and_come_back(self) -> None:
        model = ToyModel(num_blocks=10)
        async with engine(model) as loop:
            for key in "abcdef":
                assert await loop.run(Generation(key, [ord(key) % 50] * 20, 2)) == distribution([ord(key) % 50] * 20, 2)
            with pytest.raises(CacheMiss) as missed:
                await loop.run(Generation("a", [1], start=20))
            assert missed.value.cached_len == 0


async def test_forgetting_frees_a_sequence_once_it_is_idle() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        await loop.run(Generation("idle", [1] * 30))
        async with standing_still(model, loop):
            futures = await submitted(loop, Generation("busy", [2] * 30, 3))
            loop.forget("idle")
            loop.forget("busy")
        assert await futures[0] == distribution([2] * 30, 3)
        await loop.run(Generation("last", [1]))
        assert {sequence.key for sequence in model.cache.sequences} == {"plug", "last"}


async def test_the_event_loop_lives_while_a_forward_runs() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        assert not loop.is_stalled(0)
        async with standing_still(model, loop):
            for _ in range(100):
                await asyncio.sleep(0)
            assert loop.last_step_age_s > 0
            assert loop.is_stalled(0)
            assert not loop.is_stalled(3600)
        await loop.run(Generation("a", [1]))
        await asyncio.to_thread(until, lambda: loop.last_step_age_s == 0)
        assert not loop.is_stalled(0)
    assert loop.is_stalled(3600), "a dead thread makes no progress"


async def test_timings_add_up() -> None:
    model, task = ToyModel(), Generation("a", [1] * 600, 3)
    async with engine(model) as loop:
        async with standing_still(model, loop):
            futures = await submitted(loop, task)
        await futures[0]
    assert task.timings.queue_s > 0
    assert task.timings.forward_s > 0
    assert task.timings.queue_s + task.timings.forward_s <= task.timings.total_s


async def test_stopping_fails_what_is_not_done() -> None:
    model = ToyModel()
    loop = EngineLoop(model, decode)
    with pytest.raises(EngineError, match="not running"):
        await loop.run(Generation("a", [1]))
    loop.start()
    async with standing_still(model, loop):
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
async def test_greedy_text_does_not_depend_on_company(tmp_path: Path, kv_cache_bytes: int) -> None:
    folder = architectures.build("llama", tmp_path)
    model = LanguageModel.load(str(folder), device="cpu", dtype="float32", kv_cache_bytes=kv_cache_bytes)
    tasks = [Generation(str(index), [index + 1] * (1 + 9 * index), 20) for index in range(9)]
    alone: list[list[int]] = []
    async with engine(model) as loop:
        for task in tasks:
            alone.append(await loop.run(Generation("alone", task.tokens, task.num_new)))
        together = await asyncio.gather(*start(loop, *tasks))
    assert together == alone
