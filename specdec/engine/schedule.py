"""The scheduler: which tasks take part in the next forward.

Decoding tasks first, in order of arrival, then pieces of prompts. A task runs from its first forward to its end, with
its sequence pinned; a waiting task holds nothing that cannot be evicted. When memory is short the youngest running task
is suspended until another one has ended; and a task that waits for room is served before those that came later.
"""

import time
from typing import Generic, Protocol

from specdec.engine.batch import DECODING_TOKENS, Batch, TaskT
from specdec.engine.cache import KvCache
from specdec.engine.errors import CacheFull, EngineError
from specdec.engine.feed import Feed, ForwardOutput
from specdec.engine.task import TaskState


class Forwards(Protocol):
    """The model interface that the loop needs."""

    @property
    def cache(self) -> KvCache:
        """Where the sequences are."""
        ...

    def check(self, feed: Feed) -> None:
        """Raise EngineError for a feed that `forward` would refuse."""
        ...

    def forward(self, feeds: list[Feed]) -> ForwardOutput:
        """Append the feeds' tokens; return what they ask for."""
        ...


class _Place(Generic[TaskT]):
    """A task in the schedule."""

    def __init__(self, task: TaskT) -> None:
        self.task = task
        self.begun_length = 0  # of the sequence when the task began
        self.suspended_length = 0  # of the sequence when the task was suspended
        self.num_ended = 0  # tasks that had ended when the task was suspended

    @property
    def number(self) -> int:
        """The order of arrival."""
        return self.task.submission.number

    @property
    def is_decoding(self) -> bool:
        return len(self.task.tokens) <= DECODING_TOKENS


class Schedule(Generic[TaskT]):
    """The waiting and the running tasks, on the engine thread."""

    def __init__(self, model: Forwards, max_batch_tokens: int, prefill_chunk_tokens: int) -> None:
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._waiting: list[_Place[TaskT]] = []  # and suspended; in order of arrival
        self._running: list[_Place[TaskT]] = []
        self._ended: list[TaskT] = []  # whose results are not delivered yet
        self._num_ended = 0

    @property
    def num_waiting(self) -> int:
        """Waiting and suspended tasks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Running tasks."""
        return len(self._running)

    @property
    def tasks(self) -> list[TaskT]:
        """All tasks that have not ended, running ones first."""
        return [place.task for place in (*self._running, *self._waiting)]

    def add(self, task: TaskT) -> None:
        """Let a task that was submitted wait for its first forward."""
        self._waiting.append(_Place(task))

    def choose_batch(self) -> list[tuple[TaskT, Feed]]:
        """Reserve room for, and return, what goes into the next forward."""
        batch = Batch[TaskT](self._max_batch_tokens, self._prefill_chunk_tokens)
        self._continue_running(batch)
        self._admit_waiting(batch)
        return batch.feeds

    def end_done(self) -> list[TaskT]:
        """Take out the tasks that are done; return those that ended since the last call."""
        for place in [*self._running, *self._waiting]:
            if place.task.done:
                self._end(place)
        ended, self._ended = self._ended, []
        return ended

    def check(self, task: TaskT) -> None:
        """Raise what would make the task fail in a forward, where it would fail the batch."""
        if not task.tokens:
            raise EngineError(f"task {task.key!r} was neither ended nor given tokens; do one of them")
        self._model.check(task.next_feed(len(task.tokens)))
        if task.num_together > self._max_batch_tokens:
            raise EngineError(
                f"{task.num_together} rows do not fit into one forward of {self._max_batch_tokens} tokens"
            )
        length = task.sequence.length + len(task.tokens)
        if length > self._model.cache.num_tokens:
            raise CacheFull(
                f"{length} tokens do not fit into the KV cache, which holds {self._model.cache.num_tokens}; "
                "give it more bytes or shorten the sequence"
            )

    def _continue_running(self, batch: Batch[TaskT]) -> None:
        """Add each running task to the batch; while the cache is full suspend the youngest, or the task itself."""
        for place in sorted(self._running, key=lambda place: (not place.is_decoding, place.number)):
            while place.task.state is TaskState.RUNNING and not self._reserve(place.task, batch):
                self._suspend(self._youngest_outside(batch))

    def _admit_waiting(self, batch: Batch[TaskT]) -> None:
        """Admit waiting tasks in order of arrival, up to the first that does not fit.

        A task whose sequence is in use waits, and does not hold up the tasks after it.
        """
        busy = {place.task.key for place in self._running}
        for place in list(self._waiting):
            if self._waits_for_an_end(place):
                return
            if place.task.key not in busy and self._begin(place):
                if not self._reserve(place.task, batch):
                    return
                self._run(place, batch)
            busy.add(place.task.key)

    def _waits_for_an_end(self, place: _Place[TaskT]) -> bool:
        """Whether the task was suspended, and no task has ended since."""
        is_suspended = place.task.state is TaskState.SUSPENDED
        return is_suspended and bool(self._running) and place.num_ended == self._num_ended

    def _youngest_outside(self, batch: Batch[TaskT]) -> _Place[TaskT]:
        """Return the running task that must make room for an older one, or for itself."""
        return max((place for place in self._running if not batch.has(place.task)), key=lambda place: place.number)

    def _begin(self, place: _Place[TaskT]) -> bool:
        """Prepare a task, unless it is suspended and still cached; return whether it can go on."""
        task = place.task
        task.sequence = self._model.cache.open(task.key)
        if task.state is TaskState.SUSPENDED and task.sequence.length == place.suspended_length:
            return True
        try:
            task.restart()
            task.prepare()
            place.begun_length = task.sequence.length
            if not task.done:
                self.check(task)
        except Exception as error:
            task.fail(error)
        if task.done:
            self._end(place)
        return not task.done

    def _reserve(self, task: TaskT, batch: Batch[TaskT]) -> bool:
        """Add the task's next piece to the batch, if the batch has room; return False where the cache is full."""
        num_tokens = batch.num_tokens_for(task)
        if num_tokens == 0:
            return True
        try:
            task.sequence.reserve(task.sequence.length + num_tokens)
        except CacheFull:
            return False
        batch.add(task, num_tokens)
        return True

    def _run(self, place: _Place[TaskT], batch: Batch[TaskT]) -> None:
        """Let a task run if it is part of the batch; the batch may have had no room."""
        task = place.task
        if batch.has(task):
            self._waiting.remove(place)
            self._running.append(place)
            task.sequence.pin()
            task.state = TaskState.RUNNING
            task.timings.queue_s = task.timings.queue_s or time.perf_counter() - task.submission.arrived_s

    def _suspend(self, place: _Place[TaskT]) -> None:
        """Let a running task wait for room; what it has cached may be evicted."""
        self._running.remove(place)
        place.task.sequence.unpin()
        place.task.state = TaskState.SUSPENDED
        place.suspended_length = place.task.sequence.length
        place.num_ended = self._num_ended
        self._waiting.append(place)
        self._waiting.sort(key=lambda place: place.number)

    def _end(self, place: _Place[TaskT]) -> None:
        """Release what a finished task holds; if it failed, truncate its sequence to its initial length."""
        task, state = place.task, place.task.state
        self._num_ended += 1
        task.state = TaskState.ENDED
        if state is TaskState.RUNNING:
            self._running.remove(place)
            task.sequence.unpin()
        else:
            self._waiting.remove(place)
        if state is not TaskState.WAITING and task.submission.error is not None:
            task.sequence.truncate(min(task.sequence.length, place.begun_length))
        self._ended.append(task)
