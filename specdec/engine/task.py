"""A task: one session's claim on the next forwards."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from specdec.engine.errors import CacheMiss, EngineError
from specdec.engine.kv import Sequence

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class Timings:
    """Where a task's time went, in seconds."""

    queue_s: float = 0.0  # from arrival to its first forward
    forward_s: float = 0.0  # in the forwards that it took part in
    total_s: float = 0.0  # from arrival to its end


class Task(Generic[ResultT]):
    """Truncate the sequence `key` to `start` tokens, append `tokens`, get logits at the last `num_rows` of them.

    Subclass it to carry what the processor needs. When the rows are due the processor gets the task and its logits; it
    ends the task (`finish`, `fail`) or sets `tokens` and `num_rows` again for another forward.
    Everything but the constructor runs on the engine thread.
    """

    sequence: Sequence  # set by the loop before `prepare`

    def __init__(self, key: str, start: int, tokens: list[int], num_rows: int) -> None:
        self.key = key
        self.start = start
        self.tokens = list(tokens)  # still to append before the rows are due
        self.num_rows = num_rows
        self.timings = Timings()
        self.done = False
        self._first_claim = (tuple(tokens), num_rows)
        self._state: TaskState[ResultT] | None = None

    @property
    def state(self) -> "TaskState[ResultT]":
        """What the loop remembers of the task."""
        assert self._state is not None
        return self._state

    def take(self, state: "TaskState[ResultT]") -> None:
        """Enter a loop; a task runs once."""
        if self._state is not None:
            raise EngineError(f"task {self.key!r} was already run; make a new one")
        self._state = state

    def prepare(self) -> None:
        """Truncate the sequence to `start`; raise CacheMiss, or end the task here, when it holds less.

        Runs before the task's first forward, perhaps several times: while the task waits for room, and again from the
        start when its sequence was evicted meanwhile. An override must leave the sequence ready for `tokens`.
        """
        if self.sequence.length < self.start:
            raise CacheMiss(self.sequence.length, self.start)
        self.sequence.truncate(self.start)

    def finish(self, result: ResultT) -> None:
        """End the task with `result`, which `EngineLoop.run` returns."""
        self._end(result, None)

    def fail(self, error: BaseException) -> None:
        """End the task with `error`, which `EngineLoop.run` raises; the sequence goes back to where the task began."""
        self._end(None, error)

    def _end(self, result: ResultT | None, error: BaseException | None) -> None:
        if not self.done and self._state is not None:
            self.done = True
            self.timings.total_s = time.perf_counter() - self._state.arrived_s
            self._state.result, self._state.error = result, error

    def restart(self) -> None:
        """Go back to the tokens and rows that the task was made with."""
        tokens, self.num_rows = self._first_claim
        self.tokens = list(tokens)


class TaskState(Generic[ResultT]):
    """What the loop remembers of a task: who awaits it, and where it stands."""

    def __init__(self, number: int) -> None:
        self.number = number  # in order of arrival
        self.arrived_s = time.perf_counter()
        self.event_loop = asyncio.get_running_loop()
        self.future: asyncio.Future[ResultT] = self.event_loop.create_future()
        self.abandoned = False
        self.length: int | None = None  # of the sequence when the task last stood still; None: not begun
        self.first_length = 0  # of the sequence when the task began
        self.num_ended_before: int | None = None  # tasks that had ended when this one lost its room
        self.result: Any = None
        self.error: BaseException | None = None

    def deliver(self) -> None:
        """Wake whoever awaits the task; called on its event loop."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)
