"""One forward while it is being put together: whose tokens, and how many."""

from typing import Any, Generic, TypeVar

from specdec.engine.feed import Feed
from specdec.engine.pace import UNMEASURED_TOKENS, Pace, Piece
from specdec.engine.task import Task

DECODING_TOKENS = 64  # a round's draft is not longer, and a prompt that is not longer is read at once too

TaskT = TypeVar("TaskT", bound=Task[Any])


class Batch(Generic[TaskT]):
    """The next forward while it is being put together: first rounds, whole, then pieces of prompts."""

    def __init__(self, max_tokens: int) -> None:
        self.feeds: list[tuple[TaskT, Feed]] = []
        self._num_free = max_tokens

    def has(self, task: TaskT) -> bool:
        """Whether a piece of the task is part of the forward."""
        return any(task is other for other, _ in self.feeds)

    @property
    def num_free(self) -> int:
        """How many more tokens fit."""
        return self._num_free

    def add(self, task: TaskT, num_tokens: int) -> None:
        """Put the task's next `num_tokens` tokens into the forward."""
        self.feeds.append((task, task.next_feed(num_tokens)))
        self._num_free -= num_tokens


class ReadingBudget:
    """What prompts may take of one forward: tokens, and by what they cost, seconds."""

    def __init__(self, pace: Pace, allowance_s: float | None, max_tokens: int, *, beside: bool) -> None:
        self._pace, self._left_s, self._beside = pace, allowance_s, beside
        self._num_left = max_tokens if allowance_s is not None else min(max_tokens, UNMEASURED_TOKENS)
        self._is_new = True

    def num_tokens_for(self, task: Task[Any], num_free: int) -> int:
        """Return how many of its tokens the task may append where `num_free` fit; 0 when it must wait.

        All rows of a task, and its tree, come from one forward: that last piece is not cut, and may exceed the budget
        if nothing else is read in the forward.
        """
        num_left, together = len(task.tokens), task.num_together
        num_tokens = min(num_left, num_free, self._num_left)
        if self._left_s is not None:
            past = task.sequence.length
            num_tokens = self._pace.num_tokens_within(self._left_s, past, num_tokens, beside=self._beside)
            if not self._is_new and self._takes_s(num_tokens, past) > self._left_s:
                return 0
        if num_tokens == num_left:
            return num_left
        if num_left > together:
            return min(num_tokens, num_left - together)
        return num_left if self._is_new and num_tokens > 0 and num_left <= num_free else 0

    def spend(self, num_tokens: int, past: int) -> None:
        """Take note of a piece."""
        self._is_new = False
        self._num_left -= num_tokens
        if self._left_s is not None:
            self._left_s -= self._takes_s(num_tokens, past)

    def _takes_s(self, num_tokens: int, past: int) -> float:
        return self._pace.reading_s(Piece(num_tokens, past), beside=self._beside)
