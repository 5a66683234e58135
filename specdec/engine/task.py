"""A task: one session's claim on the next forwards.

WAITING ──▶ RUNNING ──▶ ENDED        a task that fails or is cancelled ends from any state
             │   ▲
             ▼   │
           SUSPENDED                 made room for an older task; goes on where it stopped, unless it was evicted
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, TypeVar

import torch

from specdec.engine.errors import EngineError
from specdec.engine.feed import Feed
from specdec.engine.sequence import Sequence
from specdec.outside import REAL

ResultT = TypeVar("ResultT")


class TaskState(Enum):
    """The state of a task."""

    NEW = auto()  # known to no loop
    WAITING = auto()  # for its first forward
    RUNNING = auto()  # takes part in forwards; its sequence is pinned
    SUSPENDED = auto()  # lost its room; what it has cached may be evicted
    ENDED = auto()  # has a result or an error


@dataclass(slots=True)
class TaskTimes:
    """The times of a task, in seconds."""

    queue_s: float = 0.0  # from arrival to its first forward
    forward_s: float = 0.0  # in the forwards that it took part in
    total_s: float = 0.0  # from arrival to its end
    num_forward_tokens: int = 0  # of all tasks in the last of these forwards; 0: prompts were read in it


class Task(Generic[ResultT]):
    """Truncate the sequence `key` to `start` tokens, append `tokens`, get logits at the last `num_rows` of them.

    The last len(parents) tokens form a tree (see `exact/tree.py`); all tokens up to length `num_committed` are
    committed, the others are a round's draft: by default all are committed, but for the tree. `match` keeps any cached
    tokens after `start` that are the same; with `on_draft`, `start` may lie within a draft that is cached, where an
    error costs only speed. `prefix_digest` is what the cached tokens before `start` must have (exact/prefix.py). With
    `hidden_layers`, `hidden_states` holds the states of the last `num_observed` tokens when the rows are due, fewer
    where fewer were fed. Groups share prefill fairly; a session that `has_text` already is admitted to a full cache
    before new ones.

    Subclass it to add what the processor needs. When the rows are due the processor gets the task and its logits; it
    ends the task (`finish`, `fail`) or lets it go on (`proceed`). Everything but the constructor runs on the engine
    thread.
    """

    sequence: Sequence  # set by the loop before `prepare`

    def __init__(
        self,
        key: str,
        start: int,
        tokens: list[int],
        num_rows: int,
        *,
        parents: tuple[int, ...] = (),
        num_committed: int | None = None,
        match: bool = False,
        on_draft: bool = False,
        prefix_digest: bytes | None = None,
        hidden_layers: tuple[int, ...] = (),
        num_observed: int = 0,
        group: str = "",
        has_text: bool = False,
    ) -> None:
        self.key = key
        self.start = start
        self.tokens = list(tokens)  # still to append before the rows are due
        self.num_rows = num_rows
        self.parents = parents
        self.num_committed = start + len(tokens) - len(parents) if num_committed is None else num_committed
        self.match = match
        self.on_draft = on_draft
        self.prefix_digest = prefix_digest
        self.hidden_layers = hidden_layers
        self.num_observed = num_observed
        self.group = group
        self.has_text = has_text
        self.hidden_states: torch.Tensor | None = None  # [num_observed, len(hidden_layers), hidden_size]
        self.timings = TaskTimes()
        self.num_batched = 0  # tasks in the last forward that it took part in
        self.state = TaskState.NEW
        self.has_proceeded = False  # all that it began with was fed
        self.follows = False  # another one; it runs when that one has ended well
        self.following: Task[Any] | None = None
        self._observed: list[torch.Tensor] = []
        self._first_claim = (tuple(tokens), num_rows, parents)
        self._submission: Submission[ResultT] | None = None

    @property
    def done(self) -> bool:
        """Whether the task has a result or an error."""
        return self._submission is not None and self._submission.has_outcome

    @property
    def submission(self) -> "Submission[ResultT]":
        """What the loop remembers of the task."""
        assert self._submission is not None
        return self._submission

    @property
    def num_together(self) -> int:
        """How many of the last tokens must be in one forward."""
        return max(self.num_rows, len(self.parents))

    @property
    def total_length(self) -> int:
        """Tokens of the sequence once those that the task has now are appended."""
        if self.state is TaskState.SUSPENDED:
            return max(self.start + len(self._first_claim[0]), self.sequence.length + len(self.tokens))
        return self.start + len(self._first_claim[0])

    def is_missed_by(self, sequence: Sequence) -> bool:
        """Whether `sequence` lacks tokens before `start`, so that preparing raises CacheMiss."""
        return self.state is TaskState.WAITING and self.start > sequence.length

    def submit(self, submission: "Submission[ResultT]") -> None:
        """Enter a loop; a task runs once."""
        if self._submission is not None:
            raise EngineError(f"task {self.key!r} was already run; make a new one")
        self._submission = submission
        self.state = TaskState.WAITING

    def prepare(self) -> None:
        """Truncate the sequence to `start` and set `tokens` to what is left to feed: see `Sequence.resume`.

        Runs before the task's first forward, perhaps several times: while the task waits for room, and again from the
        start when its sequence was evicted meanwhile. An override must leave the sequence ready for `tokens`; it may
        end the task. Raises CacheMiss where fewer than `start` tokens are committed and cached.
        """
        self.tokens = self.sequence.resume(
            self.start,
            self.tokens,
            num_committed=self.num_committed,
            min_fed=self.num_together,
            match=self.match,
            on_draft=self.on_draft,
            prefix_digest=self.prefix_digest,
        )

    def begin_after(self, previous: "Task[Any]") -> bool:
        """Take from a task that has ended well, in the same loop, what this one follows: see `EngineLoop.follow`.

        Return whether it shall run at all, now that the outcome of that one is known.
        """
        return True

    def append_instead(self, start: int, tokens: list[int], num_rows: int = 1, parents: tuple[int, ...] = ()) -> None:
        """Append other tokens than it was made with; before it runs."""
        self.start, self.tokens, self.num_rows, self.parents = start, list(tokens), num_rows, parents
        self._first_claim = (tuple(tokens), num_rows, parents)

    def proceed(self, tokens: list[int], num_rows: int = 1, parents: tuple[int, ...] = ()) -> None:
        """Append `tokens` next, instead of ending."""
        self.has_proceeded = True
        self.tokens, self.num_rows, self.parents = tokens, num_rows, parents

    def finish(self, result: ResultT) -> None:
        """End the task with `result`, which `EngineLoop.run` returns."""
        self._end(result, None)

    def fail(self, error: BaseException) -> None:
        """End the task with `error`, which `EngineLoop.run` raises; the sequence goes back to where the task began.

        After Abandoned it keeps what was appended of the committed text.
        """
        self._end(None, error)

    def _end(self, result: ResultT | None, error: BaseException | None) -> None:
        if self._submission is not None and not self._submission.has_outcome:
            self.timings.total_s = self._submission.age_s
            self._submission.decide(result, error)

    # --- what the loop calls

    def restart(self) -> None:
        """Go back to the tokens that the task was made with."""
        tokens, self.num_rows, self.parents = self._first_claim
        self.tokens = list(tokens)
        self.has_proceeded = False
        self._observed = []

    def next_feed(self, num_tokens: int) -> Feed:
        """Return the feed of the next `num_tokens` of its tokens."""
        is_last = num_tokens == len(self.tokens)
        num_not_observed = max(0, len(self.tokens) - self.num_observed)
        num_observed = max(0, num_tokens - num_not_observed) if self.hidden_layers else 0
        return Feed(
            self.sequence,
            self.tokens[:num_tokens],
            self.num_rows if is_last else 0,
            self.parents if is_last else (),
            self.hidden_layers if num_observed else (),
            num_observed,
        )

    def note_fed(self, feed: Feed, hidden_states: torch.Tensor | None) -> None:
        """Take note of a forward that `feed` was part of."""
        self.tokens = self.tokens[len(feed.tokens) :]
        if hidden_states is not None:
            self._observed.append(hidden_states)
        if not self.tokens:
            self.parents = ()
            self.hidden_states = _joined(self._observed) if self._observed else None
            self._observed = []


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class Submission(Generic[ResultT]):
    """What the loop remembers of a task: who awaits it, and its outcome."""

    def __init__(self, number: int, now_s: Callable[[], float] = REAL.now_s) -> None:
        self.arrive(number, now_s())
        self._now_s = now_s
        self.event_loop = asyncio.get_running_loop()
        self.future: asyncio.Future[ResultT] = self.event_loop.create_future()
        self.abandoned = False  # no coroutine awaits it any more
        self.has_outcome = False
        self.result: Any = None
        self.error: BaseException | None = None

    def arrive(self, number: int, now_s: float) -> None:
        """Count as arrived now."""
        self.number = number  # in order of arrival
        self.arrived_s = now_s

    @property
    def age_s(self) -> float:
        """Seconds since it arrived."""
        return self._now_s() - self.arrived_s

    def decide(self, result: ResultT | None, error: BaseException | None) -> None:
        """Set the outcome."""
        self.has_outcome, self.result, self.error = True, result, error

    def deliver(self) -> None:
        """Wake the coroutine that awaits the task; called on its event loop."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
            self.future.exception()  # looked at: nobody may await a task that follows another one
        else:
            self.future.set_result(self.result)
