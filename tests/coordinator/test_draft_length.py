"""The choice of K: what it converges to, and that it is never much slower than plain decoding."""

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from coordinator.draft_length import PROBE_EVERY, PROBE_LENGTH, Costs, DraftLength, expected_tokens

MAXIMUM = 8
ROOM = 1000


@dataclass(frozen=True)
class Machine:
    """What rounds cost and yield; a plain forward costs 1."""

    rate: float  # that a draft token passes
    draft: float  # a draft token
    slope: float = 0.03  # a scored draft token
    overhead: float = 0.0  # a call to the draft worker

    def speed(self, k: int) -> float:
        """Tokens a second at fixed K, by arithmetic."""
        cost = 1 + self.slope * k + (self.overhead if k else 0) + self.draft * k
        return expected_tokens(self.rate, k) / cost

    @property
    def best(self) -> float:
        return max(map(self.speed, range(MAXIMUM + 1)))


def simulate(machine: Machine, length: DraftLength, num_rounds: int = 1500, seed: int = 1) -> tuple[float, list[int]]:
    """Run rounds with noisy costs; return tokens a second and the K of each round."""
    source = random.Random(seed)
    num_tokens, elapsed, chosen = 0, 0.0, []
    for _ in range(num_rounds):
        k = length.choose(ROOM)
        passed = next((index for index in range(k) if source.random() >= machine.rate), k)
        draft_s = (machine.overhead + machine.draft * k if k else 0) * source.uniform(0.9, 1.1)
        score_s = (1 + machine.slope * k) * source.uniform(0.9, 1.1)
        length.costs.observe(k, draft_s, score_s)
        length.observe(k, passed)
        num_tokens, elapsed = num_tokens + passed + 1, elapsed + draft_s + score_s
        chosen.append(k)
    return num_tokens / elapsed, chosen


def automatic() -> DraftLength:
    return DraftLength(Costs(), MAXIMUM)


MACHINES = [
    Machine(rate, draft, slope, overhead)
    for rate in (0.0, 0.3, 0.6, 0.8, 0.95, 1.0)
    for draft in (0.01, 0.1, 0.4, 1.0)
    for slope in (0.0, 0.2)
    for overhead in (0.0, 0.1)
]


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_never_much_slower_than_the_best_k(machine: Machine) -> None:
    """5 % below plain is what the probes cost where a draft token costs as much as a forward."""
    speed, _ = simulate(machine, automatic())
    assert speed > 0.95 * machine.speed(0)
    assert speed > 0.85 * machine.best


def test_cheap_accepted_drafts_are_long() -> None:
    _, chosen = simulate(Machine(rate=0.98, draft=0.01), automatic())
    assert min(chosen[100:]) == MAXIMUM


@pytest.mark.parametrize("machine", [Machine(rate=0.0, draft=0.01), Machine(rate=0.7, draft=2.0)], ids=str)
def test_useless_drafts_leave_only_probes(machine: Machine) -> None:
    _, chosen = simulate(machine, automatic())
    probes = [index for index, k in enumerate(chosen) if k and index > 200]
    assert {chosen[index] for index in probes} == {PROBE_LENGTH}
    assert {after - before for before, after in pairwise(probes)} == {PROBE_EVERY + 1}


def test_drafting_resumes_when_text_becomes_easy() -> None:
    length = automatic()
    simulate(Machine(rate=0.0, draft=0.01), length)
    _, chosen = simulate(Machine(rate=0.95, draft=0.01), length)
    assert min(chosen[-200:]) >= 6


def test_drafting_stops_when_text_becomes_hard() -> None:
    length = automatic()
    simulate(Machine(rate=0.95, draft=0.1), length)
    _, chosen = simulate(Machine(rate=0.0, draft=0.1), length)
    assert sum(k > 0 for k in chosen[80:]) <= len(chosen) / PROBE_EVERY


def test_the_choice_does_not_alternate_with_plain() -> None:
    """Where drafting gains nothing, alternating would only cost."""
    for rate in (0.25, 0.35, 0.45, 0.55):
        _, chosen = simulate(Machine(rate, draft=rate / (1 + rate)), automatic(), seed=3)
        changes = sum((before == 0) != (after == 0) for before, after in pairwise(chosen))
        assert changes < len(chosen) / 10


def score_s(costs: Costs, k: int) -> float:
    """Return the expected seconds of scoring."""
    return costs.round_s(k) - (costs.draft.predict(k) if k else 0.0)


@pytest.mark.parametrize(("gain", "expected"), [(0.9, 0), (1.03, 0), (1.1, 1)])
def test_a_small_gain_is_not_worth_a_change(gain: float, expected: int) -> None:
    length = DraftLength(Costs(), maximum=1)
    for k in [0, 1] * 50:
        length.costs.observe(k, 1.0, 1.0)
    plain, drafted = score_s(length.costs, 0), score_s(length.costs, 1)
    length.costs.draft = Costs().draft
    length.costs.draft.observe(1, expected_tokens(length.acceptance_rate, 1) / gain * plain - drafted)
    assert length.choose(ROOM) == expected


@pytest.mark.parametrize(("remaining_tokens", "expected"), [(1, 0), (2, 1), (5, 4), (100, 6)])
def test_a_fixed_k_fits_the_remaining_tokens(remaining_tokens: int, expected: int) -> None:
    assert DraftLength(Costs(), MAXIMUM, fixed=6).choose(remaining_tokens) == expected


def test_a_fixed_k_is_never_changed() -> None:
    _, chosen = simulate(Machine(rate=0.0, draft=2.0), DraftLength(Costs(), MAXIMUM, fixed=12), num_rounds=100)
    assert set(chosen) == {12}
    assert DraftLength(Costs(), MAXIMUM, fixed=0).choose(ROOM) == 0


@pytest.mark.parametrize("remaining_tokens", [0, 1, 2, 3])
def test_automatic_k_leaves_room_for_a_closing_token(remaining_tokens: int) -> None:
    fresh, warm = automatic(), automatic()
    simulate(Machine(rate=1.0, draft=0.01), warm)
    assert fresh.choose(remaining_tokens) == min(PROBE_LENGTH, max(remaining_tokens - 1, 0))
    assert warm.choose(remaining_tokens) == max(remaining_tokens - 1, 0)


def test_a_maximum_of_none_is_plain() -> None:
    length = DraftLength(Costs(), 0)
    _, chosen = simulate(Machine(rate=1.0, draft=0.01), length, num_rounds=200)
    assert set(chosen) == {0}


def test_only_what_was_tested_counts() -> None:
    """After a rejection nothing was tested: 1 of 8 accepted is 1 of 2, not 1 of 8."""
    length = automatic()
    for _ in range(400):
        length.observe(8, 1)
    assert length.acceptance_rate == pytest.approx(0.5, abs=0.02)


def test_expected_tokens_follow_the_paper() -> None:
    assert expected_tokens(0.5, 3) == pytest.approx((1 - 0.5**4) / (1 - 0.5))
    assert (expected_tokens(1.0, 4), expected_tokens(0.0, 4), expected_tokens(0.7, 0)) == (5.0, 1.0, 1.0)


def test_costs_are_learned_as_a_line() -> None:
    costs = Costs()
    for k in [0, 8, 4, 2] * 50:
        costs.observe(k, 0.2 * k, 1 + 0.1 * k)
    assert [costs.draft.predict(k) for k in (2, 4, 8)] == pytest.approx([0.4, 0.8, 1.6], rel=0.05)
    assert [score_s(costs, k) for k in (0, 4, 8)] == pytest.approx([1.0, 1.4, 1.8], rel=0.05)


def loaded(num_sessions: int, slope: float, costs: Costs) -> None:
    """Let a target worker with so many sessions score, which costs `slope` a draft token."""
    for k in [0, 8, 4, 2] * 20:
        costs.observe(k, 0.01 * k, 1 + slope * k, num_sessions)


def test_a_load_change_changes_k_at_once() -> None:
    """Draft tokens are nearly free at an idle worker, and cost as much as plain ones at a busy one."""
    length = automatic()
    loaded(1, 0.01, length.costs)
    idle = length.choose(ROOM)
    loaded(32, 1.0, length.costs)
    busy = length.choose(ROOM)
    length.costs.observe(4, 0.04, 1.04, 1)
    assert (idle, busy, length.choose(ROOM)) == (idle, 0, idle)
    assert idle >= 4


def test_similar_loads_share_what_was_learned() -> None:
    """Load levels are powers of two of the worker's sessions."""
    costs = Costs()
    loaded(16, 0.5, costs)
    before = costs.round_s(8)
    costs.observe(4, 0.04, 3.0, 31)
    assert costs.round_s(8) == pytest.approx(before, rel=0.01)
    costs.observe(4, 0.04, 9.0, 32)
    assert costs.round_s(8) > 1.5 * before


def test_one_slow_round_does_not_end_drafting() -> None:
    """One draft cost as much as 40 forwards, and no later session lasts long enough to probe."""
    costs, machine = Costs(), Machine(rate=0.9, draft=0.1)
    simulate(machine, DraftLength(costs, MAXIMUM), num_rounds=50)
    costs.observe(PROBE_LENGTH, 40.0, 1.0)
    chosen = [simulate(machine, DraftLength(costs, MAXIMUM), num_rounds=20, seed=seed)[1] for seed in range(12)]
    assert set(chosen[0]) == {0}, "the round was not slow enough"
    assert min(chosen[-1]) > 0
