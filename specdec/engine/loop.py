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
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic

import torch

from specdec.engine.errors import EngineError
from specdec.engine.model import Feed
from specdec.engine.schedule import DECODING_TOKENS, Forwards, Schedule, TaskT
from specdec.engine.task import Task, TaskState

logger = logging.getLogger(__name__)


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
        self._schedule: Schedule[TaskT] = Schedule(model, max_batch_tokens, prefill_chunk_tokens)
        self._inbox: SimpleQueue[TaskT | Callable[[], None]] = SimpleQueue()
        self._forgotten: set[str] = set()
        self._num_arrived = 0
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
        state: TaskState[Any] = TaskState(self._num_arrived)
        task.take(state)
        self._inbox.put(task)
        if self._stopping:  # the thread may have emptied the inbox for the last time
            raise EngineError("the engine is stopping; ask another worker")
        try:
            return await state.future
        except asyncio.CancelledError:
            state.abandoned = True
            self._call(lambda: None)  # wakes the thread
            raise

    def forget(self, key: str) -> None:
        """Free the sequence `key` at the next step, or when the task that is using it ends. Returns at once."""
        self._call(lambda: self._forgotten.add(key))

    @property
    def load(self) -> Load:
        """How busy the engine is right now."""
        num_waiting = self._inbox.qsize() + len(self._schedule.waiting)
        return Load(num_waiting, len(self._schedule.running), self._model.cache.usage)

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
                self._take_arrivals(block=not self._schedule.tasks)
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

    def _take_arrivals(self, block: bool) -> None:
        """Empty the inbox; with `block`, wait until there is something in it."""
        with contextlib.suppress(Empty):
            while True:
                arrival = self._inbox.get(block=block)
                block = False
                if isinstance(arrival, Task):
                    self._schedule.waiting.append(arrival)
                else:
                    arrival()

    def _step(self) -> None:
        """Run one forward over whoever is ready, and the processor over whoever is due."""
        self._drop_abandoned()
        self._close_forgotten()
        batch = self._schedule.choose_batch()
        self._tell_ends()  # of those that ended in prepare
        if batch:
            self._forward(batch)
        self._tell_ends()

    def _drop_abandoned(self) -> None:
        for task in self._schedule.tasks:
            if task.state.abandoned:
                task.fail(EngineError("cancelled"))
                self._schedule.end(task)

    def _close_forgotten(self) -> None:
        for key in self._forgotten - {task.key for task in self._schedule.tasks}:
            self._model.cache.open(key).close()
            self._forgotten.discard(key)

    def _forward(self, batch: list[tuple[TaskT, Feed]]) -> None:
        began_s = time.perf_counter()
        try:
            logits = self._model.forward([feed for _, feed in batch])
        except Exception as error:
            self._fail([task for task, _ in batch], "the forward", error)
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
            self._check_on(task)

    def _check_on(self, task: TaskT) -> None:
        """Hold a processor to ending the task or giving it tokens that can be fed."""
        try:
            if not task.done:
                self._schedule.check(task)
        except Exception as error:
            task.fail(error)

    def _fail(self, tasks: list[TaskT], where: str, cause: Exception) -> None:
        logger.error("%s failed", where, exc_info=cause)
        for task in tasks:
            error = EngineError(f"{where} failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            task.fail(error)

    def _tell_ends(self) -> None:
        """Let go of the tasks that are done and wake whoever awaits them."""
        for task in self._schedule.tasks:
            if task.done:
                self._schedule.end(task)
        for task in self._schedule.ended:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody awaits the task any more
                task.state.event_loop.call_soon_threadsafe(task.state.deliver)
        self._schedule.ended.clear()

    def _fail_everything(self) -> None:
        self._take_arrivals(block=False)
        for task in self._schedule.tasks:
            task.fail(EngineError("the engine stopped before the task was done"))
        self._tell_ends()
