"""The engine thread: it alone touches the model and the cache.

A task's life:
1. `EngineLoop.run` puts it into the inbox and awaits it on the event loop.
2. Before the next forward the engine thread takes it up: opens its sequence and calls `prepare`.
3. Its tokens join the batch: decoding tasks first, then pieces of long prompts up to `prefill_chunk_tokens`.
4. When its last token is appended the processor gets the task and its logits, with everyone else's who is due.
5. The processor ends it, or gives it more tokens (3.). Its end wakes the awaiting coroutine.
A task that the cache has no room for waits, first come first served, until others end. A task that fails or is
cancelled takes its own tokens with it: its sequence is as long as when the task began.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch

from specdec.engine.errors import CacheFull, EngineError
from specdec.engine.kv import KvCache
from specdec.engine.model import Feed
from specdec.engine.task import Task, _Seat

DECODING_TOKENS = 64  # a task with at most so many tokens left is decoding: a round's draft, not a prompt

logger = logging.getLogger(__name__)


class Forwards(Protocol):
    """What the loop needs of a model."""

    cache: KvCache

    def check(self, feed: Feed) -> None:
        """Raise EngineError for a feed that `forward` would refuse."""
        ...

    def forward(self, feeds: list[Feed]) -> torch.Tensor:
        """Append the feeds' tokens; return logits, float32 [sum of num_rows, vocab_size]."""
        ...


TaskT = TypeVar("TaskT", bound=Task[Any])
Processor = Callable[[list[TaskT], torch.Tensor], None]
"""Takes the tasks that are due and their logits, float32 [sum of num_rows, vocab_size], in the tasks' order.

It runs on the engine thread and ends each task or sets its `tokens` and `num_rows` again. If it raises, all fail."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is."""

    num_waiting: int
    num_running: int
    kv_usage: float  # 0 to 1


@dataclass(slots=True)
class Counters:
    """What the engine has done since its start."""

    num_forwards: int = 0
    num_tokens: int = 0
    num_sequences: int = 0  # summed over forwards

    @property
    def mean_batch_size(self) -> float:
        """Sequences per forward."""
        return self.num_sequences / max(1, self.num_forwards)


class EngineLoop(Generic[TaskT]):
    """Runs tasks in batches on one thread of its own."""

    def __init__(
        self,
        model: Forwards,
        processor: Processor[TaskT],
        *,
        max_batch_tokens: int = 2048,
        prefill_chunk_tokens: int = 256,
    ) -> None:
        if not DECODING_TOKENS <= prefill_chunk_tokens <= max_batch_tokens:
            raise EngineError(
                f"prefill_chunk_tokens {prefill_chunk_tokens} must lie between {DECODING_TOKENS} and "
                f"max_batch_tokens {max_batch_tokens}; change one of them"
            )
        self.counters = Counters()
        self._model = model
        self._processor = processor
        self._max_batch_tokens = max_batch_tokens
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._inbox: SimpleQueue[TaskT | Callable[[], None]] = SimpleQueue()
        self._waiting: list[TaskT] = []  # in order of arrival
        self._running: list[TaskT] = []  # each has its sequence pinned
        self._forgotten: set[str] = set()
        self._num_arrived = 0
        self._num_ended = 0
        self._step_began_s: float | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    # --- called from anywhere

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step in progress; tasks that are not done fail with EngineError. Blocks until then."""
        self._call(self._set_stopping)
        self._thread.join()

    async def run(self, task: TaskT) -> Any:
        """Run `task` to its end and return what it finished with, or raise what it failed with.

        Cancelling drops the task at the next step; tasks that share its batch do not notice.
        """
        if self._stopping or not self._thread.is_alive():
            raise EngineError("the engine is not running; start it first, or ask another worker")
        self._num_arrived += 1
        seat: _Seat[Any] = _Seat(self._num_arrived)
        task._seat = seat
        self._inbox.put(task)
        try:
            return await seat.future
        except asyncio.CancelledError:
            seat.abandoned = True
            self._call(lambda: None)  # wakes the thread
            raise

    def forget(self, key: str) -> None:
        """Free the sequence `key` at the next step, or when the task that is using it ends. Returns at once."""
        self._call(lambda: self._forgotten.add(key))

    @property
    def load(self) -> Load:
        """How busy the engine is right now."""
        return Load(self._inbox.qsize() + len(self._waiting), len(self._running), self._model.cache.usage)

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the step in progress began; 0 when the engine is idle."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.perf_counter() - began_s

    def is_stalled(self, max_age_s: float) -> bool:
        """Whether there is work that makes no progress: a step takes longer than `max_age_s`, or the thread is gone."""
        return self.last_step_age_s > max_age_s or not self._thread.is_alive()

    def _call(self, function: Callable[[], None]) -> None:
        self._inbox.put(function)

    def _set_stopping(self) -> None:
        self._stopping = True

    # --- called on the engine thread

    def _work(self) -> None:
        try:
            while True:
                self._take_arrivals()
                if self._stopping:
                    break
                self._step_began_s = time.perf_counter()
                self._step()
                self._step_began_s = None
        except BaseException:
            logger.exception("the engine thread ended")
            raise
        finally:
            self._stopping = True
            self._fail_everything()

    def _take_arrivals(self) -> None:
        """Empty the inbox; wait for something when there is no other work."""
        idle = not self._waiting and not self._running
        with contextlib.suppress(Empty):
            while True:
                arrival = self._inbox.get(block=idle)
                idle = False
                if isinstance(arrival, Task):
                    self._waiting.append(arrival)
                else:
                    arrival()

    def _step(self) -> None:
        """Run one forward over whoever is ready, and the processor over whoever is due."""
        self._drop_abandoned()
        self._close_forgotten()
        batch = self._choose_batch()
        if batch:
            self._forward(batch)

    def _drop_abandoned(self) -> None:
        for task in [*self._running, *self._waiting]:
            if _seat(task).abandoned:
                task.fail(EngineError("cancelled"))
                self._retire(task)

    def _close_forgotten(self) -> None:
        for key in self._forgotten - {task.key for task in [*self._running, *self._waiting]}:
            self._model.cache.open(key).close()
            self._forgotten.discard(key)

    def _choose_batch(self) -> list[tuple[TaskT, Feed]]:
        """Reserve room for, and return, what goes into the next forward."""
        batch = _Batch[TaskT](self._max_batch_tokens, self._prefill_chunk_tokens)
        for task in sorted(self._running, key=lambda task: (len(task.tokens) > DECODING_TOKENS, _seat(task).number)):
            while task in self._running and not self._reserve(task, batch):
                self._put_back(self._youngest_outside(batch))
        busy = {task.key for task in self._running}
        for task in list(self._waiting):
            if self._is_blocked(task):
                break  # first come, first served: whoever comes later must not take the room
            if task.key not in busy and self._begin(task) and not self._reserve(task, batch):
                break
            busy.add(task.key)
        return batch.feeds

    def _youngest_outside(self, batch: "_Batch[TaskT]") -> TaskT:
        """Return the running task that must make way for an older one, or for itself."""
        fed = {id(task) for task, _ in batch.feeds}
        return max((task for task in self._running if id(task) not in fed), key=lambda task: _seat(task).number)

    def _is_blocked(self, task: TaskT) -> bool:
        """Whether the task lost its room, and nobody has ended since."""
        return bool(self._running) and _seat(task).num_ended_before == self._num_ended

    def _begin(self, task: TaskT) -> bool:
        """Prepare a waiting task, unless it stands where it stopped; return whether it can go on."""
        seat = _seat(task)
        task.sequence = self._model.cache.open(task.key)
        if seat.length == task.sequence.length:
            return True
        try:
            task._restart()
            task.prepare()
            if not task.done:
                seat.first_length = task.sequence.length
                self._check(task)
        except Exception as error:
            task.fail(error)
        if task.done:
            self._retire(task)
        return not task.done

    def _check(self, task: TaskT) -> None:
        """Raise what would make the task fail in a forward, where it could harm others."""
        if not task.tokens:
            raise EngineError(f"task {task.key!r} was neither ended nor given tokens; do one of them")
        self._model.check(Feed(task.sequence, task.tokens, task.num_rows))
        if task.num_rows > self._max_batch_tokens:
            raise EngineError(f"{task.num_rows} rows do not fit into one forward of {self._max_batch_tokens} tokens")
        length = task.sequence.length + len(task.tokens)
        if length > self._model.cache.num_tokens:
            raise CacheFull(
                f"{length} tokens do not fit into the KV cache, which holds {self._model.cache.num_tokens}; "
                "give it more bytes or shorten the sequence"
            )

    def _reserve(self, task: TaskT, batch: "_Batch[TaskT]") -> bool:
        """Add the task's next piece to the batch, if there is a turn for it; return False where the cache is full."""
        num_tokens = batch.num_tokens_for(task)
        if num_tokens == 0:
            return True
        try:
            task.sequence.reserve(task.sequence.length + num_tokens)
        except CacheFull:
            return False
        self._seat_among_running(task)
        batch.add(task, num_tokens)
        return True

    def _seat_among_running(self, task: TaskT) -> None:
        if task in self._waiting:
            self._waiting.remove(task)
            self._running.append(task)
            task.sequence.pin()
            task.timings.queue_s = task.timings.queue_s or time.perf_counter() - _seat(task).arrived_s

    def _put_back(self, task: TaskT) -> None:
        """Let a running task wait for room; what it has cached may be evicted."""
        self._running.remove(task)
        task.sequence.unpin()
        _seat(task).length = task.sequence.length
        _seat(task).num_ended_before = self._num_ended
        self._waiting.append(task)
        self._waiting.sort(key=lambda task: _seat(task).number)

    def _forward(self, batch: list[tuple[TaskT, Feed]]) -> None:
        began_s = time.perf_counter()
        tasks = [task for task, _ in batch]
        try:
            logits = self._model.forward([feed for _, feed in batch])
        except Exception as error:
            self._fail(tasks, "the forward", error)
            return
        self._count(batch, time.perf_counter() - began_s)
        due = [task for task, feed in batch if len(feed.tokens) == len(task.tokens)]
        for task, feed in batch:
            task.tokens = task.tokens[len(feed.tokens) :]
        if due:
            self._process(due, logits)

    def _count(self, batch: list[tuple[TaskT, Feed]], forward_s: float) -> None:
        self.counters.num_forwards += 1
        self.counters.num_sequences += len(batch)
        for task, feed in batch:
            self.counters.num_tokens += len(feed.tokens)
            task.timings.forward_s += forward_s

    def _process(self, due: list[TaskT], logits: torch.Tensor) -> None:
        try:
            with torch.inference_mode():
                self._processor(due, logits)
        except Exception as error:
            self._fail([task for task in due if not task.done], "the processor", error)
        for task in due:
            self._follow_up(task)

    def _follow_up(self, task: TaskT) -> None:
        """Check what the processor made of a task, and let go of it when it is done."""
        if not task.done:
            try:
                self._check(task)
            except Exception as error:
                task.fail(error)
        if task.done:
            self._retire(task)

    def _fail(self, tasks: Iterable[TaskT], where: str, cause: Exception) -> None:
        logger.error("%s failed", where, exc_info=cause)
        for task in tasks:
            error = EngineError(f"{where} failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            task.fail(error)
            self._retire(task)

    def _retire(self, task: TaskT) -> None:
        """Give back what the task holds and wake whoever awaits it."""
        self._num_ended += 1
        seat = _seat(task)
        began = task in self._running or seat.length is not None
        if task in self._running:
            self._running.remove(task)
            task.sequence.unpin()
        elif task in self._waiting:
            self._waiting.remove(task)
        if began and seat.error is not None:
            task.sequence.truncate(min(task.sequence.length, seat.first_length))
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody awaits the task any more
            seat.event_loop.call_soon_threadsafe(seat.deliver)

    def _fail_everything(self) -> None:
        self._take_rest()
        for task in [*self._running, *self._waiting]:
            task.fail(EngineError("the engine stopped before the task was done"))
            self._retire(task)

    def _take_rest(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                arrival = self._inbox.get(block=False)
                if isinstance(arrival, Task):
                    self._waiting.append(arrival)


class _Batch(Generic[TaskT]):
    """The next forward while it is being put together."""

    def __init__(self, max_tokens: int, max_prefill_tokens: int) -> None:
        self.feeds: list[tuple[TaskT, Feed]] = []
        self._room = max_tokens
        self._prefill_room = max_prefill_tokens

    def num_tokens_for(self, task: TaskT) -> int:
        """Return how many of its tokens the task may append now; 0 when it must wait for a later forward.

        All rows of a task come from one forward, so the last piece is never shorter than they are.
        """
        num_left = len(task.tokens)
        if num_left <= max(DECODING_TOKENS, task.num_rows):
            return num_left if num_left <= self._room else 0
        room = min(self._room, self._prefill_room)
        return num_left if num_left <= room else min(room, num_left - task.num_rows)

    def add(self, task: TaskT, num_tokens: int) -> None:
        """Put the task's next `num_tokens` tokens into the forward."""
        is_last = num_tokens == len(task.tokens)
        self.feeds.append((task, Feed(task.sequence, task.tokens[:num_tokens], task.num_rows if is_last else 0)))
        self._room -= num_tokens
        if len(task.tokens) > max(DECODING_TOKENS, task.num_rows):
            self._prefill_room -= num_tokens


def _seat(task: Task[Any]) -> _Seat[Any]:
    assert task._seat is not None
    return task._seat
