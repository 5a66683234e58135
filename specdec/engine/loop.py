"""The engine thread: only it uses the model and the cache.

A task's life:
1. `EngineLoop.run` puts it into the inbox and awaits it on the event loop.
2. Once its session has room in the cache the engine thread takes it up: opens its sequence and calls `prepare`.
3. Its tokens join the batch: rounds first, then pieces of prompts up to `prefill_chunk_tokens`, fewer beside rounds.
4. When its last token is appended the processor gets the task and its logits, together with all others that are due.
5. The processor ends it, or gives it more tokens (3.). Its end wakes the awaiting coroutine: when the next forward is
   about to compute, which needs no interpreter, so that the thread does not wait for the coroutine's steps.
A task that follows another one (`EngineLoop.follow`) arrives the moment that one has ended well, without a way through
the event loop. A session that the cache has no room for waits, first come first served, until others end or had their
turn. When a task fails, its sequence is truncated to the length that it had when the task began. When it is cancelled,
the sequence keeps what was read of the committed text too: a prompt that takes longer than its caller waits is read in
several attempts.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch

from specdec.engine.batch import DECODING_TOKENS, TaskT
from specdec.engine.errors import Abandoned, EngineError, where_raised
from specdec.engine.feed import Feed, ForwardOutput
from specdec.engine.schedule import Forwards, Schedule
from specdec.engine.task import Submission, Task, TaskState
from specdec.engine.worker_thread import WorkerThread
from specdec.outside import REAL, Outside

logger = logging.getLogger(__name__)


Processor = Callable[[list[TaskT], torch.Tensor], None]
"""Takes the tasks that are due and their logits, float32 [sum of num_rows, vocab_size], in the tasks' order.

A task's `hidden_states` are set by then. It runs on the engine thread and ends each task or lets it go on with
`Task.proceed`. If it raises, all of them fail."""


CHECK_KEY = " check"  # of a sequence; no session's id begins with a space


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is."""

    num_waiting: int
    num_running: int
    kv_usage: float  # 0 to 1
    num_resident: int = 0  # sessions with a place in the cache
    num_without_place: int = 0  # of the waiting ones
    num_prompt_tokens: int = 0  # still to be read
    prompt_s: float = 0.0  # that reading them takes


class EngineLoop(WorkerThread[TaskT]):
    """Runs tasks in batches on one thread of its own."""

    def __init__(
        self,
        model: Forwards,
        processor: Processor[TaskT],
        *,
        max_batch_tokens: int = 2048,
        prefill_chunk_tokens: int = 256,
        turn_s: float = 30.0,
        outside: Outside = REAL,
    ) -> None:
        if not DECODING_TOKENS <= prefill_chunk_tokens <= max_batch_tokens:
            raise EngineError(
                f"prefill_chunk_tokens {prefill_chunk_tokens} must lie between {DECODING_TOKENS} and "
                f"max_batch_tokens {max_batch_tokens}; change one of them"
            )
        super().__init__("engine")
        self._model = model
        self._processor = processor
        self._outside = outside
        self._schedule: Schedule[TaskT] = Schedule(model, max_batch_tokens, prefill_chunk_tokens, turn_s, outside)
        self._followers: SimpleQueue[tuple[TaskT, TaskT]] = SimpleQueue()  # of tasks, each after one before it
        self._forgotten: set[str] = set()
        self._untold = deque[Submission[Any]]()  # of tasks that have ended
        self._numbers = itertools.count(1)  # of tasks, as they arrive
        self._num_put, self._num_taken = 0, 0  # tasks, into the inbox and out of it
        self._num_failed_batches = 0  # of those that the processor got, since the last one that it took

    # --- called from anywhere

    async def run(self, task: TaskT) -> Any:
        """Run `task` to its end, if it does not run already; return what it ends with, or raise what it fails with.

        Cancelling drops the task at the next step; other tasks of its batch are not affected.
        """
        if self._stopping or not self._thread.is_alive():
            raise EngineError("the engine is not running; start it first, or ask another worker")
        if not task.follows:
            self._submit(task)
            self._num_put += 1
            self._inbox.put(task)
        if self._stopping and not task.done:  # the thread may have emptied the inbox for the last time
            raise EngineError("the engine is stopping; ask another worker")
        try:
            return await task.submission.future
        except asyncio.CancelledError:
            self.drop(task)
            raise

    def follow(self, previous: TaskT, task: TaskT) -> None:
        """Begin `task` when `previous`, whose sequence it goes on with, has ended well; `run` awaits its end.

        It fails where `previous` fails. Returns at once.
        """
        task.follows = True
        self._submit(task)
        self._followers.put((previous, task))
        self._call(self._take_followers)

    def drop(self, task: TaskT) -> None:
        """Give up a task that nobody awaits. Returns at once."""
        self._call(lambda: self._drop(task))

    def _submit(self, task: TaskT) -> None:
        task.submit(Submission(next(self._numbers), self._outside.now_s))

    def forget(self, key: str) -> None:
        """Free the sequence `key`, once the tasks on it that were run before have ended. Returns at once."""
        self._call(lambda: self._forget(key))

    def leave(self, key: str) -> None:
        """Let the sequence `key` be evicted for others before it is used again. Returns at once."""
        self._call(lambda: self._schedule.leave(key))

    async def check(self) -> None:
        """Run a forward of one token, which counts as any other. Raises EngineError if it fails."""
        try:
            await self.run(_Check(CHECK_KEY, 0, [0], 0))  # type: ignore[arg-type]  # no processor gets it
        finally:
            self.forget(CHECK_KEY)

    @property
    def num_failed_forwards(self) -> int:
        """How many forwards, or how many runs of the processor, have failed since the last one that succeeded."""
        return max(self._num_failed, self._num_failed_batches)

    @property
    def load(self) -> Load:
        """How busy the engine is right now."""
        num_waiting = self._num_put - self._num_taken + self._schedule.num_waiting
        queue = self._schedule.queue
        return Load(
            num_waiting,
            self._schedule.num_running,
            self._model.cache.usage,
            queue.num_resident,
            queue.num_without_place,
            queue.num_prompt_tokens,
            queue.prompt_s,
        )

    # --- called on the engine thread

    def _take_arrivals(self) -> None:
        """Empty the inbox; wait for something in it without a task, or where a forward should wait for it."""
        block = not self._schedule.tasks and not self._stopping
        hold_s = 0.0 if block or self._stopping else self._schedule.hold_s()
        if block or hold_s > 0:
            self._tell_ends()
        with contextlib.suppress(Empty):
            while True:
                arrival = self._inbox.get(block=block or hold_s > 0, timeout=hold_s or None)
                block, hold_s = False, 0.0
                if isinstance(arrival, Task):
                    self._num_taken += 1
                    self._schedule.add(arrival)
                else:
                    arrival()

    def _step(self) -> None:
        """Run one forward over the tasks that are ready, and the processor over those that are due."""
        self._fail_abandoned()
        self._close_forgotten()
        batch = self._schedule.choose_batch()
        self._deliver_ends()  # of those that ended in prepare
        if batch:
            self._forward(batch)
        else:
            self._tell_ends()
        self._deliver_ends()

    def _drop(self, task: TaskT) -> None:
        task.submission.abandoned = True

    def _take_followers(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                previous, task = self._followers.get_nowait()
                if previous.state is TaskState.ENDED:
                    self._begin_after(previous, task)
                else:
                    previous.following = task

    def _begin_after(self, previous: Task[Any], task: Task[Any]) -> None:
        """Let a task arrive, unless what it follows has failed, its session is over, or it is not wanted after all."""
        is_over = previous.submission.error or task.submission.abandoned or task.key in self._forgotten
        if is_over or not task.begin_after(previous):
            task.fail(EngineError("what it follows failed, or was the last, or another task follows"))
            task.state = TaskState.ENDED
            self._deliver_end(task)
            return
        task.submission.arrive(next(self._numbers), self._outside.now_s())
        self._schedule.add(task)  # type: ignore[arg-type]  # of the type of `previous`

    def _fail_abandoned(self) -> None:
        abandoned = [task for task in self._schedule.tasks if task.submission.abandoned]
        for task in abandoned:
            task.fail(Abandoned("nobody awaits the task any more"))
        if abandoned:
            self._deliver_ends()

    def _forget(self, key: str) -> None:
        self._forgotten.add(key)
        self._close_forgotten()  # now: a task that arrives after this one must not find the sequence

    def _close_forgotten(self) -> None:
        if not self._forgotten:
            return
        for key in self._forgotten - {task.key for task in self._schedule.tasks}:
            self._schedule.forget(key)
            self._model.cache.open(key).close()
            self._forgotten.discard(key)

    def _forward(self, batch: list[tuple[TaskT, Feed]]) -> None:
        began_s = self._outside.now_s()
        try:
            output = self._model.forward([feed for _, feed in batch], self._tell_ends)
            _synchronize(output)
        except Exception as error:
            self._num_failed += 1
            self._fail([task for task, _ in batch], "the forward", error)
            return
        self._num_failed = 0
        forward_s = self._outside.now_s() - began_s
        num_tokens = self._schedule.num_round_tokens
        self._schedule.note_forward(forward_s)
        for (task, feed), hidden_states in zip(batch, output.hidden_states, strict=True):
            task.timings.forward_s += forward_s
            task.timings.num_forward_tokens = num_tokens
            task.num_batched = len(batch)
            task.note_fed(feed, hidden_states)
        due = [task for task, _ in batch if not task.tokens and not _is_check(task)]
        self._take_followers()  # that came during the forward: the processor may look at what follows
        if due:
            self._process(due, output.logits)

    def _process(self, due: list[TaskT], logits: torch.Tensor) -> None:
        try:
            with torch.inference_mode():
                self._processor(due, logits)
            self._num_failed_batches = 0
        except Exception as error:
            self._num_failed_batches += 1
            self._fail([task for task in due if not task.done], "the processor", error)
        for task in due:
            self._check_processed(task)

    def _check_processed(self, task: TaskT) -> None:
        """Fail a task that the processor neither ended nor gave tokens that can be fed."""
        try:
            if not task.done:
                self._schedule.check(task)
        except Exception as error:
            task.fail(error)

    def _fail(self, tasks: list[TaskT], stage: str, cause: Exception) -> None:
        facts = {"stage": stage, "error": type(cause).__name__, "where": where_raised(cause), "num_tasks": len(tasks)}
        logger.error("engine_tasks_failed", extra=facts)
        for task in tasks:
            error = EngineError(f"{stage} failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            task.fail(error)

    def _deliver_ends(self) -> None:
        """Take out the tasks that are done, and begin those that follow; who awaits them is told by `_tell_ends`."""
        for task in self._schedule.end_done():
            self._deliver_end(task)

    def _deliver_end(self, task: Task[Any]) -> None:
        if task.following:
            self._begin_after(task, task.following)
        self._untold.append(task.submission)

    def _tell_ends(self) -> None:
        """Wake the coroutines that await tasks which have ended."""
        while self._untold:
            submission = self._untold.popleft()
            with contextlib.suppress(RuntimeError):  # the event loop is closed: no coroutine awaits the task any more
                submission.event_loop.call_soon_threadsafe(submission.deliver)

    def _fail_everything(self) -> None:
        self._take_arrivals()
        for task in self._schedule.tasks:
            task.fail(EngineError("the engine stopped before the task was done"))
        self._deliver_ends()
        self._tell_ends()


class _Check(Task[None]):
    """Ends as soon as its forward has succeeded."""


def _is_check(task: Task[Any]) -> bool:
    """End a check; return whether it is one."""
    if isinstance(task, _Check):
        task.finish(None)
    return isinstance(task, _Check)


def _synchronize(output: ForwardOutput) -> None:
    """Wait for a GPU, so that the time of a forward is the forward's and its errors are raised here."""
    if output.logits.is_cuda:
        torch.cuda.synchronize(output.logits.device)
