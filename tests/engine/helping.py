"""Helpers for a while."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.engine.helpers import count_parts, set_helpers

WAIT_S = 60


@contextmanager
def helpers(count: int) -> Iterator[None]:
    """Let this process have so many helpers."""
    assert set_helpers(count) == count
    try:
        yield
    finally:
        set_helpers(0)


def until_helped(num_times: int) -> Iterator[int]:
    """Count what is done: `num_times` at least, and until helpers have done a part of it."""
    until, (before, _), number = time.monotonic() + WAIT_S, count_parts(), 0
    while number < num_times or count_parts()[0] == before:
        assert time.monotonic() < until, "no helper did anything"
        yield (number := number + 1)
