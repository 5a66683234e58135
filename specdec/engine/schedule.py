"""Who takes part in the next forward.

Decoding tasks first, in order of arrival, then pieces of prompts. A task runs from its first forward to its end, with
its sequence pinned; what waits holds nothing that cannot be evicted. When memory is short the youngest running task
makes way and waits until somebody has ended; and whoever waits for room is served before whoever came later.
"""

import time
from typing import Any, Generic, Protocol, TypeVar

import torch

from specdec.engine.errors import CacheFull, EngineError
from specdec.engine.kv import KvCache
from specdec.engine.model import Feed
from specdec.engine.task import Task

DECODING_TOKENS = 64  # a task with at most so many tokens left is decoding: a round's draft, not a prompt


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


class Schedule(Generic[TaskT]):
    """The waiting and the running tasks, on the engine thread."""

    def __init__(self, model: Forwards, max_batch_tokens: int, prefill_chunk_tokens: int) -> None:
        self.waiting: list[TaskT] = []  # in order of arrival
        self.running: list[TaskT] = []  # each has its sequence pinned
        self.ended: list[TaskT] = []  # whose ends are still to be told
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._num_ended = 0

    @property
    def tasks(self) -> list[TaskT]:
        """All of them, running ones first."""
        return [*self.running, *self.waiting]

    def choose_batch(self) -> list[tuple[TaskT, Feed]]:
        """Reserve room for, and return, what goes into the next forward."""
        batch = Batch[TaskT](self._max_batch_tokens, self._prefill_chunk_tokens)
        for task in sorted(self.running, key=lambda task: (len(task.tokens) > DECODING_TOKENS, task.state.number)):
            while task in self.running and not self._reserve(task, batch):
                self._put_back(self._youngest_outside(batch))
        busy = {task.key for task in self.running}
        for task in list(self.waiting):
            if self._is_blocked(task):
                break  # first come, first served: whoever comes later must not take the room
            if task.key not in busy and self._begin(task) and not self._reserve(task, batch):
                break
            busy.add(task.key)
        return batch.feeds

    def _youngest_outside(self, batch: "Batch[TaskT]") -> TaskT:
        """Return the running task that must make way for an older one, or for itself."""
        fed = {id(task) for task, _ in batch.feeds}
        return max((task for task in self.running if id(task) not in fed), key=lambda task: task.state.number)

    def _is_blocked(self, task: TaskT) -> bool:
        """Whether the task lost its room, and nobody has ended since."""
        return bool(self.running) and task.state.num_ended_before == self._num_ended

    def _begin(self, task: TaskT) -> bool:
        """Prepare a waiting task, unless it stands where it stopped; return whether it can go on."""
        state = task.state
        task.sequence = self._model.cache.open(task.key)
        if state.length == task.sequence.length:
            return True
        try:
            task.restart()
            task.prepare()
            if not task.done:
                state.first_length = task.sequence.length
                self.check(task)
        except Exception as error:
            task.fail(error)
        if task.done:
            self.end(task)
        return not task.done

    def check(self, task: TaskT) -> None:
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

    def _reserve(self, task: TaskT, batch: "Batch[TaskT]") -> bool:
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
        if task in self.waiting:
            self.waiting.remove(task)
            self.running.append(task)
            task.sequence.pin()
            task.timings.queue_s = task.timings.queue_s or time.perf_counter() - task.state.arrived_s

    def _put_back(self, task: TaskT) -> None:
        """Let a running task wait for room; what it has cached may be evicted."""
        self.running.remove(task)
        task.sequence.unpin()
        task.state.length = task.sequence.length
        task.state.num_ended_before = self._num_ended
        self.waiting.append(task)
        self.waiting.sort(key=lambda task: task.state.number)

    def end(self, task: TaskT) -> None:
        """Give back what a task that is done holds; if it failed, its sequence goes back to where it began."""
        self._num_ended += 1
        began = task in self.running or task.state.length is not None
        if task in self.running:
            self.running.remove(task)
            task.sequence.unpin()
        else:
            self.waiting.remove(task)
        if began and task.state.error is not None:
            task.sequence.truncate(min(task.sequence.length, task.state.first_length))
        self.ended.append(task)


class Batch(Generic[TaskT]):
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
