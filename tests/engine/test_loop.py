"""The engine thread: batching, chunked prefill, cancellation, failures, a full cache; on a toy model."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.engine import (
    CacheFull,
    CacheMiss,
    ContiguousPool,
    EngineError,
    EngineLoop,
    Feed,
    ForwardOutput,
    KvCache,
    LayerShape,
    Task,
    TaskState,
)
from specdec.engine.batch import DECODING_TOKENS
from specdec.exact.tree import path_to
from specdec.outside import Outside
from tests.engine.tiny_models import load
from tests.support import architectures

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

    def forward(self, feeds: list[Feed]) -> ForwardOutput:
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
        pass


def start(loop: EngineLoop[Any], *tasks: Task[Any]) -> list[asyncio.Future[Any]]:
    return [asyncio.ensure_future(loop.run(task)) for task in tasks]


async def submitted(loop: EngineLoop[Any], *tasks: Task[Any]) -> list[asyncio.Future[Any]]:
    """Start the tasks and return once they are in the inbox, in order."""
    futures = start(loop, *tasks)
    await asyncio.sleep(0)
    return futures


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
    assert record.__dict__["where"].startswith(Path(__file__).name)
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


async def test_timings_add_up() -> None:
    model, task = ToyModel(), Generation("a", [1] * 600, 3)
    async with engine(model) as loop:
        async with paused_forward(model, loop):
            futures = await submitted(loop, task)
        await futures[0]
    assert task.timings.queue_s > 0
    assert task.timings.forward_s > 0
    assert task.timings.queue_s + task.timings.forward_s <= task.timings.total_s


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
        await asyncio.to_thread(until, lambda: loop.load.num_waiting == 3)
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


class Scoring(Task[list[int]]):
    """One round of a target: the greedy token at the last committed token and at each draft token."""

    def __init__(
        self, start: int, committed: list[int], draft: list[int], parents: tuple[int, ...], **more: Any
    ) -> None:
        super().__init__("a", start, [*committed, *draft], len(draft) + 1, parents=parents, **more)
        self.committed = committed


def score(tasks: list[Any], logits: torch.Tensor) -> None:
    """Finish each task with the greedy tokens of its rows."""
    parts = torch.split(logits.argmax(-1), [task.num_rows for task in tasks])
    for task, rows in zip(tasks, parts, strict=True):
        task.finish(rows.tolist())


class TestTrees:
    """Rounds on one sequence: the text 1 2 3, then the tree 10 (20, 21), 11."""

    TREE = (10, 20, 21, 11)
    PARENTS = (0, 1, 1, 0)

    def first_round(self, **more: Any) -> Scoring:
        return Scoring(0, [1, 2, 3], list(self.TREE), self.PARENTS, **more)

    async def test_rows_follow_their_paths(self) -> None:
        async with engine(ToyModel(), score) as loop:
            assert await loop.run(self.first_round()) == [6, 16, 36, 37, 17]

    async def test_accepted_path_is_not_fed_again(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            assert await loop.run(Scoring(3, [10, 21, 5], [30], (0,))) == [42, 72]
            assert await loop.run(Scoring(6, [30, 7], [], ())) == [79]
        assert [forward["a"] for forward in model.forwards] == [7, 2, 1]

    async def test_repeated_rounds_feed_the_same_tokens(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            for _ in range(3):
                assert await loop.run(Scoring(3, [10, 21, 5], [30, 31], (0, 0))) == [42, 72, 73]
        assert [forward["a"] for forward in model.forwards] == [7, 3, 3, 3]

    @pytest.mark.parametrize("num_rows", [1, 91])
    async def test_trees_are_never_split(self, num_rows: int) -> None:
        model, prompt = ToyModel(), [1] * 150
        task = Task[list[int]]("a", 0, [*prompt, *[2] * 90], num_rows, parents=(0,) * 90)
        async with engine(model, score, max_batch_tokens=100, prefill_chunk_tokens=100) as loop:
            assert await loop.run(task) == ([150 % MODULUS] + [152 % MODULUS] * 90)[-num_rows:]
        assert sum(forward["a"] for forward in model.forwards) == 240

    async def test_failed_rounds_keep_the_accepted_path(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            with pytest.raises(EngineError, match="poisoned"):
                await loop.run(Scoring(3, [10, 20, 4], [POISON, 5], (0, 0)))
            assert list(model.cache.open("a").tokens) == [1, 2, 3, 10, 20]
            assert await loop.run(Scoring(3, [10, 20, 4], [6, 5], (0, 0))) == [40, 46, 45]
        assert [forward["a"] for forward in model.forwards] == [7, 3, 3]

    async def test_cancelled_rounds_can_be_repeated(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            await asyncio.to_thread(model.entered.acquire)
            model.gate.clear()
            (future,) = await submitted(loop, Scoring(3, [10, 20, 4], [5, 6], (0, 0)))
            await asyncio.to_thread(model.entered.acquire)  # the forward has begun
            future.cancel()
            await asyncio.wait([future])
            model.gate.set()
            assert await loop.run(Scoring(3, [10, 20, 4], [5, 6], (0, 0))) == [40, 45, 46]
        assert [forward["a"] for forward in model.forwards] == [7, 3, 3]

    async def test_rounds_cancelled_while_waiting_keep_the_tree(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            async with paused_forward(model, loop):
                (future,) = await submitted(loop, Scoring(3, [11, 4], [5], (0,)))
                future.cancel()
                await asyncio.wait([future])
            assert await loop.run(Scoring(3, [10, 21, 4], [], ())) == [41]
        assert [forward["a"] for forward in model.forwards if "a" in forward] == [7, 1]

    async def test_evicted_trees_are_reported(self) -> None:
        model = ToyModel(num_blocks=2)
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            await loop.run(Task("big", 0, [1] * 16, 1))
            with pytest.raises(CacheMiss) as missed:
                await loop.run(Scoring(3, [10, 4], [5], (0,)))
            assert missed.value.cached_len == 0
            assert await loop.run(Scoring(0, [1, 2, 3, 10, 4], [5], (0,))) == [20, 25]

    async def test_new_streams_keep_matching_tokens(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            assert await loop.run(Scoring(0, [1, 2, 3, 10, 21, 9], [4], (0,), match=True)) == [46, 50]
        assert [forward["a"] for forward in model.forwards] == [7, 2]

    async def test_accepted_draft_is_not_fed_again(self) -> None:
        model = ToyModel()
        async with engine(model) as loop:
            drafted = await loop.run(Generation("a", [1, 2, 3], 3))
            assert drafted == generated([1, 2, 3], 3)
            await loop.run(Generation("a", [*drafted[:2], 7], 1, start=3))
        assert [forward["a"] for forward in model.forwards] == [3, 1, 1, 1]
        assert list(model.cache.open("a").tokens) == [1, 2, 3, *drafted[:2], 7]


class TestHiddenStates:
    async def observed(self, task: Task[Any], **options: int) -> torch.Tensor | None:
        seen: list[torch.Tensor | None] = []

        def observe(tasks: list[Task[Any]], logits: torch.Tensor) -> None:
            seen.extend(task.hidden_states for task in tasks)
            score(tasks, logits)

        async with engine(ToyModel(), observe, **options) as loop:
            await loop.run(task)
        return seen[0]

    @pytest.mark.parametrize("count", [1, 50, 150, 300])
    async def test_states_span_prefill_chunks(self, count: int) -> None:
        prompt = [index % 90 for index in range(300)]
        task = Task[Any]("a", 0, prompt, 1, hidden_layers=(0, 2), num_observed=count)
        states = await self.observed(task, max_batch_tokens=64, prefill_chunk_tokens=64)
        sums = torch.tensor(prompt).cumsum(0) % MODULUS
        assert states is not None
        assert torch.equal(states, torch.stack([sums, sums + 2], dim=1)[300 - count :, :, None])

    async def test_tree_states_include_the_root(self) -> None:
        task = Scoring(0, [1, 2, 3], [10, 20], (0, 0), hidden_layers=(1,), num_observed=3)
        states = await self.observed(task)
        assert states is not None
        assert states.flatten().tolist() == [7, 17, 27]

    async def test_no_states_unless_requested(self) -> None:
        assert await self.observed(Task[Any]("a", 0, [1, 2], 1)) is None


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
