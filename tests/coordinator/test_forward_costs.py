"""What forwards cost by their tokens: steps are learned, drifts are followed, nothing is believed for ever."""

import random

import numpy as np
import pytest

from coordinator.choosing.forward_costs import NUM_TRUSTED, ForwardCosts
from coordinator.choosing.plans import Forward


def steps(num_tokens: float) -> float:
    """Return the seconds of a forward whose second tile of 16 tokens costs much, the rest little."""
    return 8.0 + 0.1 * num_tokens + (4.0 if num_tokens > 14 else 0.0)


def learned(counts: list[int], num_rounds: int = 400, factor: float = 1.0) -> ForwardCosts:
    costs, chooser = ForwardCosts(), random.Random(1)
    for _ in range(num_rounds):
        count = chooser.choice(counts)
        costs.observe(Forward(count, factor * steps(count) * chooser.uniform(0.95, 1.05)), 1.0)
    return costs


def test_a_step_is_learned_where_it_is() -> None:
    costs = learned([1, 5, 7, 9, 12, 13, 17, 18, 25, 33])
    for count in (1, 5, 9, 13, 17, 25, 33):
        assert costs.predict(count) == pytest.approx(steps(count), rel=0.05)
    assert costs.predict(13) - costs.predict(7) < 1.2
    assert costs.predict(17) - costs.predict(13) > 3.0


def test_many_are_predicted_as_each() -> None:
    costs = learned([3, 7, 12, 17, 40])
    counts = np.array([0.5, 1.0, 3.0, 5.5, 16.0, 40.0, 64.0])
    assert costs.predict_each(counts).tolist() == pytest.approx([costs.predict(count) for count in counts.tolist()])
    assert (np.diff(costs.predict_each(np.arange(1.0, 80.0))) >= 0).all(), "more tokens never cost less"


def test_one_size_tells_little_of_others() -> None:
    costs = learned([1])
    assert costs.predict(1) == pytest.approx(steps(1), rel=0.05)
    assert 0 < costs.predict(9) - costs.predict(1) < 0.5 * steps(1)


def test_larger_forwards_than_any_so_far_are_not_free() -> None:
    costs = learned([16, 20, 24, 28])
    for _ in range(60):
        costs.observe(Forward(32, steps(28)), 1.0)  # as luck has it
    assert costs.predict(272) > costs.predict(32) + 0.8 * (272 - 32) * 0.1


def test_one_slow_forward_makes_larger_ones_no_cheaper() -> None:
    costs = learned([1, 7, 13])
    costs.observe(Forward(3, 3 * steps(3)), 1.0)
    assert costs.predict(13) - costs.predict(7) == pytest.approx(0.6, abs=0.4)
    assert costs.predict(4) < costs.predict(7) < costs.predict(13)


def test_a_machine_that_gets_slower_is_slower_for_all_sizes() -> None:
    costs = learned([1, 7, 17])
    for _ in range(100):
        costs.observe(Forward(1, 2 * steps(1)), 1.0)
    assert costs.predict(1) == pytest.approx(2 * steps(1), rel=0.05)
    assert costs.predict(17) == pytest.approx(2 * steps(17), rel=0.15)


def test_an_outlier_and_the_first_forwards_count_little() -> None:
    costs = ForwardCosts()
    assert not costs.is_known
    for seconds in (500.0, 400.0, 8.0):
        costs.observe(Forward(1, seconds), 1.0)
    assert costs.is_known
    assert costs.predict(1) == 8.0
    for _ in range(30):
        costs.observe(Forward(1, 8.0), 1.0)
    costs.observe(Forward(1, 1000.0), 1.0)
    assert costs.predict(1) < 8.5


@pytest.mark.parametrize("num_sessions", [1, 4, 16])
def test_a_forward_counts_once_however_many_sessions_tell_of_it(num_sessions: int) -> None:
    costs = learned([16, 32, 48])
    slow = Forward(96, 10 * steps(96))
    for _ in range(num_sessions):
        costs.observe(slow, 1 / num_sessions)
    assert costs.predict(96) < 2.1 * steps(96)
    for _ in range(12):
        costs.observe(Forward(96, steps(96)), 1.0)
    assert costs.predict(96) < 1.2 * steps(96)


@pytest.mark.parametrize("num_sessions", [1, 4, 16])
def test_the_first_forwards_may_be_slow(num_sessions: int) -> None:
    costs = ForwardCosts()
    for seconds in (100 * steps(16), steps(16), steps(16), steps(16)):
        for _ in range(num_sessions):
            costs.observe(Forward(16, seconds), 1 / num_sessions)
    assert costs.is_known
    assert costs.predict(16) == pytest.approx(steps(16), rel=0.05)


def test_a_size_that_is_not_tried_any_more_is_forgotten() -> None:
    costs = learned([1, 7])
    costs.observe(Forward(17, 2 * steps(17)), 1.0)
    dear = costs.predict(17)
    for _ in range(1500):
        costs.observe(Forward(7, steps(7)), 1.0)
    assert costs.predict(17) < 0.75 * dear


def test_what_nobody_tells_any_more_is_forgotten() -> None:
    costs = learned([1, 7], num_rounds=NUM_TRUSTED + 2)
    for _ in range(1000):
        costs.age(0.99)
    assert not costs.is_known
    costs.observe(Forward(7, 100.0), 1.0)
    assert costs.predict(7) == 100.0
