"""Retries: which errors are retried, the pauses between attempts, and when retrying ends."""

import math

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
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def attempts(policy: RetryPolicy, timeout_s: float, clock: Clock, connect_timeout_s: float = math.inf) -> Attempts:
    return Attempts(policy, timeout_s, connect_timeout_s=connect_timeout_s, clock=clock, uniform=lambda: 0.0)


POLICY = RetryPolicy(first_s=0.1, maximum_s=2.0, budget_s=30.0)


def test_pauses_double_up_to_the_maximum() -> None:
    pauses = [POLICY.pause_s(number, 0.0, 0.0) for number in range(1, 8)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


def test_jitter_shortens_by_at_most_its_fraction() -> None:
    for number in range(1, 8):
        longest = POLICY.pause_s(number, 0.0, 0.0)
        shortest = POLICY.pause_s(number, 0.0, math.nextafter(1, 0))
        assert longest
        assert shortest
        assert shortest == pytest.approx(longest / 2)


def test_last_pause_ends_with_the_budget() -> None:
    assert POLICY.pause_s(9, 29.5, 0.0) == pytest.approx(0.5)
    assert POLICY.pause_s(9, 30.0, 0.0) is None


def test_max_failures_ends_retries() -> None:
    policy = RetryPolicy(max_failures=3)
    assert [policy.pause_s(number, 0.0, 0.0) is None for number in (1, 2, 3)] == [False, False, True]


def test_pause_of_the_server_is_added() -> None:
    assert POLICY.pause_s(1, 0.0, 0.0, retry_after_s=5.0) == pytest.approx(5.1)
    assert POLICY.pause_s(1, 28.0, 0.0, retry_after_s=5.0) == 2.0


def test_many_failures_do_not_overflow() -> None:
    assert RetryPolicy().pause_s(10**9, 0.0, 0.0) == 5.0


def test_deadline_limits_retries() -> None:
    """A service may be unavailable for minutes; only the deadline ends the attempts."""
    clock = Clock()
    call = attempts(RetryPolicy(), 600.0, clock)
    num_attempts = 1
    while (pause_s := call.pause_s(GONE, is_connected=True)) is not None:
        clock.now_s += pause_s
        num_attempts += 1
    assert 594 < clock.now_s < 600
    assert num_attempts < 130


def test_connect_timeout_limits_retries() -> None:
    clock = Clock()
    call = attempts(RetryPolicy(), 600.0, clock, connect_timeout_s=20.0)
    while (pause_s := call.pause_s(GONE, is_connected=False)) is not None:
        clock.now_s += pause_s
    assert 10 < clock.now_s < 20


def test_max_retries_counts_consecutive_failures() -> None:
    call = attempts(RetryPolicy(max_failures=3), 600.0, Clock())
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
def test_only_transient_errors_are_retried(failure: SpecdecError, is_retried: bool) -> None:
    call = attempts(RetryPolicy(), 600.0, Clock())
    assert (call.pause_s(failure, is_connected=True) is not None) == is_retried


def test_the_last_pause_lets_the_clock_move() -> None:
    """What is left of a budget may be less than the clock can add: attempts would follow each other for ever."""
    policy = RetryPolicy(budget_s=30.0)
    assert policy.pause_s(9, 29.999999999999996, 0.0) == pytest.approx(0.001)
    assert policy.pause_s(9, 30.0, 0.0) is None
