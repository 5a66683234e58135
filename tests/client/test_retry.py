"""When a call is repeated: the deadline bounds patience, the pauses bound the rate."""

import pytest

from specdec import (
    DataLossError,
    DeadlineExceededError,
    FencedError,
    InternalError,
    OverloadedError,
    SpecdecError,
    UnavailableError,
)
from specdec.retry import Attempts, RetryPolicy

GONE = UnavailableError("gone", retry_after_s=None)


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def attempts(policy: RetryPolicy, timeout_s: float, clock: Clock) -> Attempts:
    return Attempts(policy, timeout_s, clock=clock, jitter=lambda: 1.0)


def test_pauses_double_up_to_the_cap() -> None:
    policy = RetryPolicy()
    assert [policy.pause_s(count, 0.0, 1.0) for count in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert policy.pause_s(10_000, 0.0, 1.0) == 5.0


def test_jitter_halves_the_pause_at_most() -> None:
    assert RetryPolicy().pause_s(0, 0.0, 0.0) == 0.05


def test_server_pause_comes_first() -> None:
    assert RetryPolicy().pause_s(0, 2.0, 1.0) == 2.1


def test_deadline_bounds_patience() -> None:
    """The service may be away for minutes: nothing but the deadline ends the attempts."""
    clock = Clock()
    call = attempts(RetryPolicy(), 600.0, clock)
    num_attempts = 1
    while (pause_s := call.pause_s(GONE, is_connected=True)) is not None:
        clock.now_s += pause_s
        num_attempts += 1
    assert 594 < clock.now_s < 600
    assert num_attempts < 130


def test_unknown_address_is_given_up_early() -> None:
    clock = Clock()
    call = attempts(RetryPolicy(connect_timeout_s=20.0), 600.0, clock)
    while (pause_s := call.pause_s(GONE, is_connected=False)) is not None:
        clock.now_s += pause_s
    assert 10 < clock.now_s < 20


def test_max_retries_counts_in_a_row() -> None:
    call = attempts(RetryPolicy(max_retries=2), 600.0, Clock())
    assert call.pause_s(GONE, is_connected=True) == 0.1
    assert call.pause_s(GONE, is_connected=True) == 0.2
    assert call.pause_s(GONE, is_connected=True) is None
    call.progress()
    assert call.pause_s(GONE, is_connected=True) == 0.1


@pytest.mark.parametrize(
    ("failure", "is_retried"),
    [
        (GONE, True),
        (UnavailableError("loading", 1.0), True),
        (DeadlineExceededError("a proxy's limit"), True),
        (OverloadedError("queue full", 1.0), True),
        (OverloadedError("message too large", None), False),
        (FencedError("taken over"), True),
        (DataLossError("rolled back"), False),
        (InternalError(), False),
    ],
)
def test_only_passing_errors_are_retried(failure: SpecdecError, is_retried: bool) -> None:
    call = attempts(RetryPolicy(), 600.0, Clock())
    assert (call.pause_s(failure, is_connected=True) is not None) == is_retried
