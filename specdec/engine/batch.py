"""One forward while it is being put together: whose tokens, and how many."""

from typing import Any, Generic, TypeVar

from specdec.engine.feed import Feed
from specdec.engine.task import Task

DECODING_TOKENS = 64  # a task with at most so many tokens left is decoding: a round's draft, not a prompt

TaskT = TypeVar("TaskT", bound=Task[Any])


class Batch(Generic[TaskT]):
    """The next forward while it is being put together."""

    def __init__(self, max_tokens: int, max_prefill_tokens: int) -> None:
        self.feeds: list[tuple[TaskT, Feed]] = []
        self._num_free = max_tokens
        self._num_free_prefill = max_prefill_tokens

    def has(self, task: TaskT) -> bool:
        """Whether a piece of the task is part of the forward."""
        return any(task is other for other, _ in self.feeds)

    def num_tokens_for(self, task: TaskT) -> int:
        """Return how many of its tokens the task may append now; 0 when it must wait for a later forward.

        All rows of a task, and its tree, come from one forward, so the last piece is never shorter than they are.
        """
        num_left = len(task.tokens)
        if _is_short(task):
            return num_left if num_left <= self._num_free else 0
        num_free = min(self._num_free, self._num_free_prefill)
        return num_left if num_left <= num_free else max(0, min(num_free, num_left - task.num_together))

    def add(self, task: TaskT, num_tokens: int) -> None:
        """Put the task's next `num_tokens` tokens into the forward."""
        self.feeds.append((task, task.next_feed(num_tokens)))
        self._num_free -= num_tokens
        if not _is_short(task):
            self._num_free_prefill -= num_tokens


def _is_short(task: Task[Any]) -> bool:
    """Whether the task's remaining tokens come in one piece and do not count as prefill."""
    return len(task.tokens) <= max(DECODING_TOKENS, task.num_together)
