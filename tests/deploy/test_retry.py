"""The retry policy: pauses grow, spread, respect wishes, and end with the budget."""

import math

import pytest

from specdec.retry import RetryPolicy

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


def test_the_last_pause_ends_with_the_budget() -> None:
    assert POLICY.pause_s(9, 29.5, 0.0) == pytest.approx(0.5)
    assert POLICY.pause_s(9, 30.0, 0.0) is None


def test_failures_may_be_counted() -> None:
    policy = RetryPolicy(max_failures=3)
    assert [policy.pause_s(number, 0.0, 0.0) is None for number in (1, 2, 3)] == [False, False, True]


def test_the_other_side_may_ask_for_longer() -> None:
    assert POLICY.pause_s(1, 0.0, 0.9, at_least_s=5.0) == 5.0
    assert POLICY.pause_s(1, 28.0, 0.9, at_least_s=5.0) == 2.0


def test_many_failures_do_not_overflow() -> None:
    assert RetryPolicy().pause_s(10**9, 0.0, 0.0) == 5.0
