"""How long rounds are waited for."""

import pytest

from coordinator.round_times import FEW_TOKENS, MIN_ROUNDS, NUM_REMEMBERED, TOKENS_PER_CEILING, RoundTimes


def times(*decode_s: float) -> RoundTimes:
    made = RoundTimes(floor_s=1.0, ceiling_s=60.0, factor=4.0)
    for elapsed_s in decode_s:
        made.observe(elapsed_s, 1)
    return made


def test_without_rounds_the_ceiling_holds() -> None:
    assert times().limit_s(1) == 60.0
    assert times(*[0.01] * (MIN_ROUNDS - 1)).limit_s(1) == 60.0


def test_quick_rounds_are_waited_for_shortly() -> None:
    assert times(*[0.01] * MIN_ROUNDS).limit_s(1) == 1.0


def test_slow_rounds_are_waited_for_longer() -> None:
    assert times(*[2.0] * MIN_ROUNDS).limit_s(1) == 8.0
    assert times(*[200.0] * MIN_ROUNDS).limit_s(1) == 60.0


def test_one_slow_round_in_a_hundred_changes_nothing() -> None:
    assert times(*[0.01] * 99, 50.0).limit_s(1) == 1.0


def test_old_rounds_are_forgotten() -> None:
    assert times(*[5.0] * NUM_REMEMBERED, *[0.01] * NUM_REMEMBERED).limit_s(1) == 1.0


def test_prompts_are_measured_by_the_token() -> None:
    made = times(*[0.01] * MIN_ROUNDS)
    for _ in range(MIN_ROUNDS):
        made.observe(2.0, 1000)
    assert made.limit_s(1) == 1.0, "prompts do not count for rounds that read few tokens"
    assert made.limit_s(FEW_TOKENS + 1) < 1.5
    assert made.limit_s(4000) == pytest.approx(4 * (4 * 2.0 + 0.01))


def test_ceiling_grows_with_the_prompt() -> None:
    assert times().limit_s(4 * TOKENS_PER_CEILING) == 5 * 60.0


def test_rounds_given_up_make_the_next_ones_patient() -> None:
    """Where all rounds are slow, giving up each of them would never let one end."""
    made = times(*[0.01] * NUM_REMEMBERED)
    limits = []
    for _ in range(100):
        limits.append(made.limit_s(1))
        made.observe(limits[-1], 1)
    assert limits[0] == 1.0
    assert limits[-1] == 60.0
