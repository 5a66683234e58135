"""The choice of drafter and K: what it settles on, and that it is never much slower than plain decoding."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest

from coordinator.choosing.acceptance_history import AcceptanceHistory, SessionAcceptance
from coordinator.choosing.chooser import PROBE_LENGTH, PlanChooser
from coordinator.choosing.comparisons import Comparisons, Unused
from coordinator.choosing.costs import PRIOR_RESTING, Costs
from coordinator.choosing.costs import RESTING as RESTING_ROUNDS
from coordinator.choosing.exploration import Exploration
from coordinator.choosing.plans import PLAIN, RESTING, DraftPlan, Forward, Missed, RoundOutcome
from coordinator.choosing.rest import AWAKE_ROUNDS, OBSERVED_EVERY, Rest
from coordinator.choosing.shared_statistics import SharedStatistics
from specdec.exact.values import Proposal, SparseDistribution, one_hot
from specdec.types import MAX_DRAFT_TOKENS

MAXIMUM = 32
ROOM = 1000
ALWAYS = 10**9  # rounds of one session


@dataclass(frozen=True)
class Drafter:
    """What a drafter's rounds cost and yield; a plain forward costs 1."""

    rate: float  # that a draft token of a chain passes
    draft: float  # cost of a draft token
    overhead: float = 0.0  # cost of a call
    is_compared: bool = False  # it draws nothing, so that what it would have had accepted can be seen in the text
    misses: float = 0.0  # fraction of the rounds in which it finds nothing

    def num_passed(self, k: int, source: random.Random) -> int:
        """Accepted tokens of a round."""
        return next((index for index in range(k) if source.random() >= self.rate), k)

    def tokens(self, k: int) -> float:
        """Mean tokens of a round (Leviathan et al. 2023, equation 1)."""
        return float(sum(self.rate**length for length in range(k + 1)))

    def draft_s(self, k: int) -> float:
        return self.overhead + self.draft * k if k else 0.0

    def speed(self, k: int, slope: float) -> float:
        """Tokens a second at fixed K, by arithmetic."""
        return self.tokens(k) / (1 + slope * k + self.draft_s(k))

    def best(self, slope: float) -> float:
        return max(self.speed(k, slope) for k in range(MAXIMUM + 1))


@dataclass
class Simulated:
    """What a simulation did."""

    speed: float  # tokens a second
    plans: list[DraftPlan]  # as chosen

    def share(self, drafter: str | None) -> float:
        """Fraction of the rounds with a drafter."""
        return sum(plan.drafter == drafter for plan in self.plans) / len(self.plans)


def simulate(
    drafters: Mapping[str, Drafter],
    slope: float = 0.03,  # cost of scoring a draft token
    num_rounds: int = 1000,
    session_rounds: int = ALWAYS,
    shared: SharedStatistics | None = None,
    fixed: int | None = None,
    chooser: PlanChooser | None = None,
) -> Simulated:
    """Run rounds with noisy costs, in sessions of so many rounds, the first one with a chooser that is given."""
    source, shared = random.Random(1), shared or SharedStatistics()
    num_tokens, elapsed_s, plans = 0, 0.0, list[DraftPlan]()
    chooser = chooser or PlanChooser(shared, list(drafters), MAXIMUM, fixed)
    for number in range(num_rounds):
        if number and number % session_rounds == 0:
            chooser = PlanChooser(shared, list(drafters), MAXIMUM, fixed)
        plan, missed = chooser.choose(ROOM), None
        plans.append(plan)
        compare(chooser, drafters, plan, source)
        drafter = drafters.get(plan.drafter or "", Drafter(0, 0))
        finds = source.random() >= drafter.misses
        if not finds and plan.fallback:
            missed, finds = Missed(plan, Proposal(), drafter.draft_s(plan.num_draft_tokens)), True
            chooser.observe_unused(plan, Proposal(), base_length=0)
            plan = plan.fallback
            drafter = drafters[plan.drafter or ""]
        k = plan.num_draft_tokens if finds else 0
        passed = drafter.num_passed(k, source)
        draft_s = drafter.draft_s(plan.num_draft_tokens) * source.uniform(0.9, 1.1)
        score_s = (1 + slope * k) * source.uniform(0.9, 1.1)
        for num_known in (passed + 1, MAXIMUM):
            chooser.settle([RIGHT] * num_known)
        chooser.observe(RoundOutcome(plan, k, range(passed), draft_s, score_s, missed=missed))
        num_tokens += passed + 1
        elapsed_s += draft_s + score_s + (missed.elapsed_s if missed else 0.0)
    return Simulated(num_tokens / elapsed_s, plans)


RIGHT, WRONG = 1, 0  # tokens


def compare(chooser: PlanChooser, drafters: Mapping[str, Drafter], chosen: DraftPlan, source: random.Random) -> None:
    """Answer for the drafter that is asked while the target scores; the text goes on with right tokens only."""
    plan = chooser.choose_compared(chosen, [name for name in drafters if drafters[name].is_compared])
    if plan:
        k = plan.num_draft_tokens
        tokens = (RIGHT,) * drafters[plan.drafter or ""].num_passed(k, source) + (WRONG,) * k
        chooser.observe_unused(plan, chain_of(tokens[:k]), base_length=0)


def chain_of(tokens: Sequence[int]) -> Proposal:
    return Proposal(tuple(tokens), tuple(map(one_hot, tokens)))


DRAFTERS = [
    Drafter(rate, draft, overhead)
    for rate in (0.0, 0.6, 0.8, 1.0)
    for draft in (0.01, 0.1, 1.0)
    for overhead in (0.0, 0.1)
]


@pytest.mark.parametrize("slope", [0.0, 0.2])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_never_much_slower_than_the_best_k(drafter: Drafter, slope: float) -> None:
    """In one long session, and in sessions of 20 rounds."""
    for session_rounds in (ALWAYS, 20):
        speed = simulate({"a": drafter}, slope, session_rounds=session_rounds).speed
        assert speed > 0.97
        assert speed > 0.88 * drafter.best(slope)


def test_cheap_accepted_drafts_are_long() -> None:
    plans = simulate({"a": Drafter(rate=0.98, draft=0.01)}, slope=0.01).plans
    assert np.median([plan.num_draft_tokens for plan in plans[200:]]) >= 16


USELESS = {"wrong": Drafter(0.0, 0.05), "weak": Drafter(0.1, 0.5), "slow": Drafter(0.9, 3.0)}


@pytest.mark.parametrize("session_rounds", [ALWAYS, 30])
def test_useless_drafters_cost_little(session_rounds: int) -> None:
    """Three first measurements of each, then trials; one of them takes as long as 13 forwards a round."""
    assert simulate(USELESS, 0.1, 3000, session_rounds).speed > 0.97


MIXED = {"model": Drafter(0.75, 0.12), "ngram": Drafter(0.4, 0.001), **USELESS}


@pytest.mark.parametrize("session_rounds", [ALWAYS, 30])
def test_the_best_drafter_is_found(session_rounds: int) -> None:
    """Among useless ones, within 7 % of its best K; long sessions leave it for trials alone."""
    simulated = simulate(MIXED, 0.03, 3000, session_rounds)
    assert simulated.speed > 0.93 * MIXED["model"].best(0.03)
    assert simulated.share("model") > 0.7


@pytest.mark.parametrize(("is_compared", "share"), [(False, 0.65), (True, 0.9)])
def test_a_change_of_text_changes_the_drafter(is_compared: bool, share: float) -> None:
    """The text becomes repetitive in mid-session, then stops being so; sooner noticed where drafters are compared."""
    shared = SharedStatistics()
    before, during = (
        {"a": Drafter(0.6, 0.05, 0, is_compared), "b": Drafter(0.1, 0.05, 0, is_compared)},
        {"a": Drafter(0.1, 0.05, 0, is_compared), "b": Drafter(0.9, 0.05, 0, is_compared)},
    )
    simulate(before, shared=shared)
    assert simulate(during, shared=shared).share("b") > share
    assert simulate(before, shared=shared).share("a") > share


# ---- rest


def resting(plans: Sequence[DraftPlan]) -> float:
    """Return the fraction of rounds that rest."""
    return sum(not plan.observes for plan in plans) / len(plans)


def test_a_session_rests_while_nothing_pays() -> None:
    """Longer and longer; one whose drafter pays never does."""
    shared = SharedStatistics()
    simulate(USELESS, num_rounds=200, shared=shared)
    plans = simulate(USELESS, num_rounds=1000, shared=shared).plans
    assert resting(plans) > 0.85
    assert resting(plans[:100]) < resting(plans[-300:])
    assert resting(simulate(MIXED, num_rounds=1000).plans) < 0.05


@pytest.mark.parametrize(("rate", "num_measured"), [(0.0, 0), (0.9, 3)])
def test_joint_drafters_are_measured_where_a_part_of_them_is_the_best(rate: float, num_measured: int) -> None:
    drafters = {"a": Drafter(rate, 0.02), "b": Drafter(0.0, 0.02), "a+b": Drafter(rate, 0.1), "b+b": Drafter(rate, 0.1)}
    measured = [plan.drafter for plan in simulate(drafters, num_rounds=2 * 3 + num_measured + 1).plans]
    assert measured == ["a"] * 3 + ["b"] * 3 + ["a+b"] * num_measured + measured[-1:]
    assert measured[-1] in ("a", None)


def test_a_fallback_counts_as_a_part() -> None:
    drafters = {"find": Drafter(0.95, 0.0, misses=0.5), "a": Drafter(0.8, 0.02), "b+a": Drafter(0.8, 0.1)}
    plans = simulate(drafters, num_rounds=60).plans
    assert any(plan.fallback and plan.fallback.drafter == "a" for plan in plans)
    assert sum(plan.drafter == "b+a" for plan in plans) >= 3


def test_a_repeated_seed_asks_no_joint_drafter() -> None:
    """Whether its costs are known says what the same draws have accepted."""
    shared = SharedStatistics()
    assert shared.for_seed(7) is shared
    repeated = shared.for_seed(7)
    drafters = {"a": Drafter(0.9, 0.02), "a+b": Drafter(0.9, 0.02)}
    plans = simulate(drafters, num_rounds=200, shared=repeated).plans
    assert {plan.drafter for plan in plans} <= {"a", None}
    assert simulate({"a+b": Drafter(0.9, 0.02)}, num_rounds=20, shared=repeated).share("a+b") > 0.5, (
        "if it is all there is"
    )


def test_a_joint_drafter_alone_is_measured_at_once() -> None:
    assert simulate({"a+b": Drafter(0.0, 0.1)}, num_rounds=3).share("a+b") == 1


@pytest.mark.parametrize("is_compared", [False, True])
def test_a_rest_ends_when_a_drafter_begins_to_pay(is_compared: bool) -> None:
    """Found in the rounds between two rests: at once where it can be compared, else by trials."""
    shared = SharedStatistics()
    chooser = PlanChooser(shared, ["a"], MAXIMUM)
    bad, good = {"a": Drafter(0.0, 0.05, 0, is_compared)}, {"a": Drafter(0.95, 0.05, 0, is_compared)}
    assert resting(simulate(bad, shared=shared, chooser=chooser).plans[-100:]) > 0.7
    plans = simulate(good, num_rounds=600, shared=shared, chooser=chooser).plans
    first = next(number for number, plan in enumerate(plans) if plan.num_draft_tokens > PROBE_LENGTH)
    assert first < (150 if is_compared else 600)
    assert resting(plans[first + 100 :]) < 0.2


LOOKUP = Drafter(rate=0.9, draft=0.0, overhead=0.05, misses=0.75)
GUESSING = Drafter(rate=0.75, draft=0.02, overhead=0.2)


@pytest.mark.parametrize("is_compared", [False, True])
def test_what_often_finds_nothing_gets_a_fallback(is_compared: bool) -> None:
    """It is faster than either drafter can be alone, by arithmetic."""
    drafters = {
        "lookup": replace(LOOKUP, is_compared=is_compared),
        "model": replace(GUESSING, is_compared=is_compared),
    }
    simulated = simulate(drafters, num_rounds=2000, session_rounds=100)
    found = LOOKUP.tokens(16), 1 + 0.03 * 16
    missing = [(1 - LOOKUP.misses) * hit + LOOKUP.misses for hit in found]
    alone = missing[0] / (missing[1] + LOOKUP.overhead)
    assert simulated.speed > 1.1 * max(alone, GUESSING.best(0.03))
    late = simulated.plans[500:]
    fallbacks = Counter(plan.fallback.drafter for plan in late if plan.fallback)
    assert set(fallbacks) == {"model"}
    assert fallbacks.total() > 0.7 * len(late)


def test_no_fallback_where_it_costs_too_much() -> None:
    """A drafter that takes as long as it saves."""
    plans = simulate({"lookup": LOOKUP, "model": Drafter(rate=0.3, draft=0.3, overhead=0.5)}, num_rounds=1000).plans
    assert sum(plan.fallback is not None for plan in plans[300:]) < 0.05 * len(plans)


def test_drafters_that_always_find_something_have_no_fallback() -> None:
    plans = simulate({"a": Drafter(0.8, 0.02), "b": Drafter(0.7, 0.02)}, num_rounds=500).plans
    assert not any(plan.fallback for plan in plans)


def test_a_change_of_load_ends_a_rest() -> None:
    shared, drafters = SharedStatistics(), {"a": Drafter(0.5, 1.0)}
    chooser = PlanChooser(shared, ["a"], MAXIMUM)
    simulate(drafters, num_rounds=300, shared=shared, chooser=chooser)
    for _ in range(3):
        shared.costs.observe_score(0, 1.0, num_sessions=8)
    while chooser.choose(ROOM).observes:
        chooser.observe(RoundOutcome(PLAIN, 0, (), 0.0, 1.0, num_sessions=8))
    assert not chooser.choose(ROOM).observes
    shared.costs.observe_score(0, 1.0, num_sessions=1)
    assert chooser.choose(ROOM).observes


def test_a_prompt_at_a_new_load_leaves_the_load_at_which_costs_are_known() -> None:
    """Of such a round no cost is learned, and others plan meanwhile."""
    shared, drafters = SharedStatistics(), {"a": Drafter(0.9, 0.01), "b": Drafter(0.9, 0.01, 0, is_compared=True)}
    simulate(drafters, num_rounds=100, shared=shared)
    PlanChooser(shared, list(drafters), MAXIMUM).observe(
        RoundOutcome(PLAIN, 0, (), 0.0, 1.0, num_sessions=8, has_prefill=True)
    )
    assert shared.costs.num_sessions == 1
    chooser = PlanChooser(shared, list(drafters), MAXIMUM)
    assert chooser.choose_compared(chooser.choose(ROOM), ["a", "b"]) is not None


def test_of_a_rest_some_rounds_are_taken_note_of_and_all_at_a_new_load() -> None:
    shared = SharedStatistics()
    chooser = PlanChooser(shared, ["a"], MAXIMUM)
    simulate({"a": Drafter(0.1, 1.0)}, num_rounds=400, shared=shared, chooser=chooser)
    while not chooser.expects_plain_after(chooser.choose(ROOM)):
        chooser.observe(RoundOutcome(PLAIN, 0, (), 0.0, 1.0))

    def num_observed(count: int) -> int:
        with mock.patch.object(Costs, "observe_other") as observed:
            for _ in range(count):
                assert chooser.choose(ROOM) == RESTING
                chooser.observe(RoundOutcome(RESTING, 0, (), 0.0, 1.0))
        return int(observed.call_count)

    assert num_observed(2 * OBSERVED_EVERY) == 2
    chooser.choose(ROOM)
    chooser.observe(RoundOutcome(RESTING, 0, (), 0.0, 1.0, num_sessions=2))
    assert shared.costs.num_sessions == 2
    assert shared.costs.knows_scoring


def busy(drafters: Mapping[str, Drafter]) -> SharedStatistics:
    """What is known after some rounds at a busy target, at which nobody's drafts pay."""
    shared = SharedStatistics()
    shared.exploration = NeverExplores()
    for name in drafters:
        for _ in range(5):
            shared.costs.observe_draft(name, 4, drafters[name].overhead)
    for k in (0, 4) * 20:
        shared.costs.observe_score(k, 1 + 1.0 * k, num_sessions=8)
    return shared


@pytest.mark.parametrize("is_quick", [False, True])
def test_at_a_busy_target_a_rest_goes_on_without_a_round_awake(is_quick: bool) -> None:
    """After the first round, which observes the prompt; one in which a quick drafter is compared is awake, too."""
    drafters = {"a": Drafter(0.5, 0.0, 0.1 if is_quick else 0.9)}
    chooser = PlanChooser(busy(drafters), list(drafters), MAXIMUM)
    num_compared, plans = 0, list[DraftPlan]()
    for _ in range(1000):
        plans.append(chooser.choose(ROOM))
        compared = chooser.choose_compared(plans[-1], list(drafters))
        num_compared += compared is not None
        assert chooser.expects_plain_after(plans[-1])
        chooser.observe(RoundOutcome(plans[-1], 0, (), 0.0, 1.0, num_sessions=8))
    assert [plan.observes for plan in plans[:10]] == [True] + [False] * 9
    assert sum(plan.observes for plan in plans) == 1 + num_compared
    assert (num_compared > 0) == is_quick
    assert num_compared <= 2


def test_a_busy_target_that_becomes_idle_is_weighed_anew() -> None:
    drafters = {"a": Drafter(0.5, 0.0, 0.1)}
    shared = busy(drafters)
    chooser = PlanChooser(shared, list(drafters), MAXIMUM)
    for _ in range(100):
        chooser.observe(RoundOutcome(chooser.choose(ROOM), 0, (), 0.0, 1.0, num_sessions=8))
    chooser.observe(RoundOutcome(RESTING, 0, (), 0.0, 1.0, num_sessions=1))
    assert chooser.choose(ROOM).drafter == "a"


@pytest.mark.parametrize(("num_sessions", "goes_on"), [(8, True), (14, True), (15, False), (4, True), (3, False)])
def test_only_a_great_change_of_load_ends_a_rest(num_sessions: int, goes_on: bool) -> None:
    """What a worker reports is 7 once and 8 the next time, though nobody came."""
    rest = Rest()
    while not rest.follows:
        rest.observe(is_plain=True)
    assert rest.goes_on(7)
    assert rest.goes_on(num_sessions) == goes_on


def test_a_rest_compares_with_the_load_at_which_it_began() -> None:
    """Not with the last round's, which would miss a slow change; and each rest with its own."""
    rest = Rest()
    for num_sessions in (4, 16):
        while not rest.follows:
            rest.observe(is_plain=True)
        assert rest.goes_on(num_sessions)
        while rest.follows:
            assert rest.goes_on(2 * num_sessions)
    while not rest.follows:
        rest.observe(is_plain=True)
    assert [rest.goes_on(count) for count in (4, 6, 8, 9)] == [True, True, True, False]


def test_after_the_first_rest_one_round_awake_is_enough() -> None:
    """Unless something has paid in it: then a rest begins as the first one did."""
    rest = Rest()

    def num_awake() -> int:
        count = 0
        while not rest.follows:
            rest.observe(is_plain=True)
            count += 1
        while rest.goes_on(1):
            pass
        return count

    assert [num_awake() for _ in range(4)] == [AWAKE_ROUNDS, 1, 1, 1]
    rest.observe(is_plain=False)
    assert [num_awake() for _ in range(2)] == [AWAKE_ROUNDS, 1]


def test_the_round_after_is_plain_while_a_rest_goes_on() -> None:
    """At an idle worker a promise that is not kept costs a forward of its own, so it is only made where it is sure."""
    chooser = PlanChooser(SharedStatistics(), ["a"], MAXIMUM)
    promised, plans = list[bool](), list[DraftPlan]()
    for _ in range(300):
        plans.append(chooser.choose(ROOM))
        promised.append(chooser.expects_plain_after(plans[-1]))
        k = plans[-1].num_draft_tokens
        chooser.observe(RoundOutcome(plans[-1], k, (), 1.0 * k, 1 + 0.1 * k))
    followed = [not plan.observes for plan in plans[1:]]
    assert promised[:-1] == followed
    assert 0.5 < sum(followed) / len(followed) < 1


@pytest.mark.parametrize(("num_sessions", "expected"), [(2, False), (3, True)])
def test_a_busy_target_goes_on_with_any_plain_round(num_sessions: int, expected: bool) -> None:
    """Its forwards run for others anyway."""
    shared = SharedStatistics()
    load(shared, num_sessions, 4.0)
    shared.exploration = NeverExplores()
    chooser = PlanChooser(shared, ["a"], MAXIMUM)
    assert chooser.choose(ROOM) == PLAIN
    assert chooser.expects_plain_after(PLAIN) == expected
    assert not chooser.expects_plain_after(DraftPlan("a", 4))


def test_what_follows_a_trial_of_plain_decoding_is_not_plain() -> None:
    shared = SharedStatistics()
    load(shared, 3, 0.0)
    shared.exploration.observe(1000.0)
    choosers = [PlanChooser(shared, ["a"], MAXIMUM) for _ in range(6)]
    tried = [chooser for chooser in choosers if chooser.choose(ROOM) == PLAIN]
    assert 1 <= len(tried) < len(choosers), "drafting is best"
    assert not any(chooser.expects_plain_after(PLAIN) for chooser in tried)


def test_plain_decoding_is_priced_as_faster_than_it_is_awake_until_somebody_has_rested() -> None:
    costs = Costs()
    for _ in range(30):
        costs.observe_score(0, 1.0, num_sessions=4)
        costs.observe_other(is_resting=False, seconds=0.5)
    assert costs.plain_s() == pytest.approx(PRIOR_RESTING * 1.5)
    for _ in range(30):
        costs.observe_score(0, 0.9, 4, RESTING_ROUNDS)
        costs.observe_other(is_resting=True, seconds=0.1)
    assert costs.plain_s() == pytest.approx(1.0, rel=0.05)


def test_resting_rounds_ask_no_drafter() -> None:
    chooser = PlanChooser(SharedStatistics(), ["a", "b"], MAXIMUM)
    assert chooser.choose_compared(RESTING, ["a", "b"]) is None


# ---- proposals that no round uses

COMPARED = DraftPlan("a", 3)
TREE = Proposal((5, 7, 6), tuple(map(one_hot, (5, 7, 6))), (0, 0, 2))  # 5, or 7 and then 6


@pytest.mark.parametrize(
    ("following", "expected"),
    [((), None), ((5,), None), ((5, 9), [0]), ((7,), None), ((7, 9), [1]), ((7, 6, 1), [1, 2]), ((8,), [])],
)
def test_unused_proposals_are_judged_by_the_text(following: Sequence[int], expected: list[int] | None) -> None:
    """As soon as the text says how far it went along a path of the tree."""
    compared = Unused(COMPARED, TREE, base_length=2).compared([1, 2, *following])
    assert (list(compared.path) if compared else None) == expected


@pytest.mark.parametrize(
    ("num_committed", "proposal", "weight"),
    [(3, chain_of([RIGHT] * 2), 1.0), (2, chain_of([RIGHT] * 3), 0.5), (9, chain_of([WRONG]), 2.0)],
)
def test_comparisons_count_for_the_rounds_they_stand_for(num_committed: int, proposal: Proposal, weight: float) -> None:
    """The rounds that the compared drafter would have needed for what was committed; between a half and two."""
    comparisons = Comparisons()
    comparisons.add(Unused(COMPARED, proposal, 0))
    text = [RIGHT] * 12
    settled = [*comparisons.settled(text[:num_committed]), *comparisons.settled(text)]
    assert [compared.weight for compared in settled] == [weight]


def test_each_unused_proposal_counts_once() -> None:
    comparisons = Comparisons()
    comparisons.add(Unused(COMPARED, chain_of([5]), 0))
    comparisons.add(Unused(COMPARED, chain_of([5]), 1))
    assert [len(list(comparisons.settled(text))) for text in ([], [5], [5], [5, 9])] == [0, 1, 0, 1]


def test_drawn_proposals_are_not_compared() -> None:
    """A drawn token is accepted more often than the text goes on with it; its drafter is not asked again."""
    shared = SharedStatistics()
    simulate({"a": Drafter(0.6, 0.01), "b": Drafter(0.6, 0.01)}, shared=shared)
    chooser = PlanChooser(shared, ["a", "b"], MAXIMUM)
    chooser.choose(ROOM)
    plan = chooser.choose_compared(DraftPlan("b", 4), ["a", "b"])
    assert plan
    assert plan.drafter == "a"
    before = chooser._acceptance["a"].expected_tokens().tolist()
    chooser.observe_unused(plan, Proposal((RIGHT,), (SparseDistribution((RIGHT, WRONG), (0.5, 0.5)),)), 0)
    chooser.settle([RIGHT] * MAXIMUM)
    assert chooser._acceptance["a"].expected_tokens().tolist() == before
    assert chooser.choose_compared(DraftPlan("b", 4), ["a", "b"]) is None


def test_slow_drafters_are_not_asked_for_comparison() -> None:
    """One that takes as long as the target would keep it from the next round."""
    shared, drafters = SharedStatistics(), {"slow": Drafter(0.5, 0.0, 0.9), "quick": Drafter(0.5, 0.0, 0.1)}
    for name in drafters:
        for _ in range(5):
            shared.costs.observe_draft(name, 4, drafters[name].overhead)
            shared.costs.observe_score(4, 1.0)
    chooser = PlanChooser(shared, list(drafters), MAXIMUM)
    asked = []
    for _ in range(2):
        chooser.choose(ROOM)
        asked.append(chooser.choose_compared(PLAIN, list(drafters)))
    assert {plan.drafter for plan in asked if plan} == {"quick"}


@pytest.mark.parametrize("drafters", [USELESS, MIXED])
def test_trials_lose_no_more_than_their_share(drafters: Mapping[str, Drafter]) -> None:
    """Apart from the first measurements: all time that trials lost, against the time of all rounds."""
    lost = SharedStatistics()
    simulate(drafters, num_rounds=3000, shared=lost)
    assert lost.exploration.affords(-0.005 * 3000)  # one trial may overshoot


def test_a_fixed_k_is_never_changed() -> None:
    plans = simulate({"a": Drafter(0.0, 2.0)}, num_rounds=100, fixed=12).plans
    assert set(plans) == {DraftPlan("a", 12)}
    assert set(simulate(MIXED, num_rounds=100, fixed=0).plans) == {PLAIN}


def test_a_fixed_k_still_chooses_the_drafter() -> None:
    simulated = simulate(MIXED, fixed=3, num_rounds=2000)
    assert {plan.num_draft_tokens for plan in simulated.plans} == {3}
    assert simulated.share("model") > 0.9


@pytest.mark.parametrize(("remaining_tokens", "expected"), [(1, 0), (2, 1), (5, 4), (100, 6)])
def test_a_fixed_k_fits_the_remaining_tokens(remaining_tokens: int, expected: int) -> None:
    chooser = PlanChooser(SharedStatistics(), ["a"], MAXIMUM, 6)
    assert chooser.choose(remaining_tokens).num_draft_tokens == expected


@pytest.mark.parametrize("remaining_tokens", [0, 1, 2, 3])
def test_automatic_k_leaves_room_for_a_closing_token(remaining_tokens: int) -> None:
    warm = SharedStatistics()
    simulate({"a": Drafter(1.0, 0.01)}, shared=warm)
    warm.exploration = NeverExplores()
    for shared in (SharedStatistics(), warm):
        plan = PlanChooser(shared, ["a"], MAXIMUM).choose(remaining_tokens)
        assert plan.num_draft_tokens == min(PROBE_LENGTH, max(remaining_tokens - 1, 0))


def test_without_drafters_decoding_is_plain() -> None:
    chooser = PlanChooser(SharedStatistics(), [], MAXIMUM)
    assert chooser.choose(ROOM) == PLAIN
    chooser = PlanChooser(SharedStatistics(), ["a"], MAXIMUM)
    assert chooser.choose(ROOM, available=[]) == PLAIN
    assert PlanChooser(SharedStatistics(), ["a"], 0).choose(ROOM) == PLAIN


def test_unavailable_drafters_are_not_asked() -> None:
    shared = SharedStatistics()
    simulate(MIXED, shared=shared)
    chooser = PlanChooser(shared, list(MIXED), MAXIMUM)
    asked = {chooser.choose(ROOM, available=["ngram"]).drafter for _ in range(100)}
    assert asked <= {"ngram", None}


def test_a_slow_round_does_not_disable_drafting() -> None:
    """Some drafts cost as much as 400 forwards; sessions last 20 rounds."""
    shared, drafters = SharedStatistics(), {"a": Drafter(0.9, 0.1)}
    simulate(drafters, num_rounds=50, shared=shared)
    for _ in range(20):
        shared.costs.observe_draft("a", PROBE_LENGTH, 400.0)
    plans = simulate(drafters, num_rounds=1500, session_rounds=20, shared=shared).plans
    assert plans[5].drafter is None, "the round was not slow enough"
    assert Counter(plan.drafter for plan in plans[-100:])["a"] > 70


def tries_a_bad_drafter() -> tuple[SharedStatistics, PlanChooser, DraftPlan]:
    """Return what all sessions know, a session that may try as much as it likes, and its trial."""
    shared = SharedStatistics()
    simulate({"a": Drafter(0.9, 0.1), "b": Drafter(0.1, 0.1)}, shared=shared)
    shared.exploration.observe(elapsed_s=1e6)
    chooser = PlanChooser(shared, ["a", "b"], MAXIMUM)
    return shared, chooser, next_plan_of("b", chooser)


def test_a_trial_is_repeated_after_a_prefill() -> None:
    """The first round at a worker that lacks the text measures no cost."""
    _, chooser, trial = tries_a_bad_drafter()
    chooser.observe(RoundOutcome(trial, 1, (), 9.0, 1.0, has_prefill=True))
    assert chooser.choose(ROOM) == trial
    chooser.observe(RoundOutcome(trial, 1, (), 9.0, 1.0, has_prefill=True))
    assert chooser.choose(ROOM) != trial


def test_what_a_trial_loses_counts_once() -> None:
    """Also where it is repeated: what was expected counts until it is known, and no longer."""
    shared, chooser, trial = tries_a_bad_drafter()
    assert chooser._trial is not None
    expected_s, lost_s = chooser._trial.expected_loss_s, 10.0 - 1 / chooser._trial.best.speed
    before_s = shared.exploration._lost_s - expected_s
    assert expected_s > 0
    for num_trials in (1, 2):
        chooser.observe(RoundOutcome(trial, 1, (), 9.0, 1.0, has_prefill=num_trials == 1))
        assert shared.exploration._lost_s == pytest.approx(before_s + num_trials * lost_s, rel=1e-3)
        chooser.choose(ROOM)


def next_plan_of(drafter: str, chooser: PlanChooser) -> DraftPlan:
    """Run rounds until one uses the drafter; return its plan."""
    for _ in range(20):
        plan = chooser.choose(ROOM)
        if plan.drafter == drafter:
            return plan
        chooser.observe(RoundOutcome(plan, plan.num_draft_tokens, range(plan.num_draft_tokens), 0.5, 1.0))
    raise AssertionError(f"{drafter} was never tried")


def test_a_slow_first_call_is_not_believed() -> None:
    """The first call of a drafter took as long as 50 forwards: it compiled something."""
    shared = SharedStatistics()
    shared.costs.observe_draft("a", PROBE_LENGTH, 50.0)
    assert simulate({"a": Drafter(0.9, 0.05)}, num_rounds=100, shared=shared).share("a") > 0.9


# ---- seeds


def test_equal_seeds_share_only_costs() -> None:
    """A seed's second session neither reads nor adds to what others accepted; greedy ones always share."""
    shared = SharedStatistics()
    assert [shared.for_seed(seed) is shared for seed in (1, 2, 1, None, None, 3)] == [
        True,
        True,
        False,
        True,
        True,
        True,
    ]
    second = shared.for_seed(2)
    assert second.costs is shared.costs
    assert second.exploration is not shared.exploration
    assert second.acceptance("a", False) is not shared.acceptance("a", False)


# ---- acceptance


def test_nodes_of_a_chain_follow_the_paper() -> None:
    """h_i = a^(i+1) where nodes were tested, and beyond."""
    source, history = random.Random(2), AcceptanceHistory()
    for _ in range(4000):
        history.observe(6, 6, range(next((i for i in range(6) if source.random() >= 0.7), 6)))
    expected = [0.7 ** (node + 1) for node in range(10)]
    assert history.accept_probs[:10] == pytest.approx(expected, abs=0.12)


def test_nodes_of_a_tree_are_counted_one_by_one() -> None:
    """A first child that is never accepted, a second that always is, and a child of that one."""
    history = AcceptanceHistory()
    for _ in range(400):
        history.observe(3, 3, (1, 2))
    assert history.accept_probs[:3] == pytest.approx([0, 1, 1], abs=0.1)


def test_drafters_that_find_nothing_draft_little() -> None:
    """Nodes that are asked for and not drafted cost no scoring, and yield nothing."""
    session = SessionAcceptance(AcceptanceHistory())
    for number in range(400):
        session.observe(8, 8 if number % 2 else 0, range(8) if number % 2 else ())
    assert session.expected_drafted()[8] == pytest.approx(4, abs=0.3)
    assert session.expected_tokens()[8] == pytest.approx(5, abs=0.4)


def test_sessions_differ_from_the_prior() -> None:
    """A session that accepts everything, where all others accept nothing, is soon believed."""
    shared = AcceptanceHistory()
    for _ in range(400):
        SessionAcceptance(shared).observe(4, 4, ())
    session = SessionAcceptance(shared)
    assert session.expected_tokens()[4] < 1.2
    for _ in range(20):
        session.observe(4, 4, range(4))
    assert session.expected_tokens()[4] > 3


# ---- costs


def learned(observe: Callable[[Costs, int], None]) -> Costs:
    costs = Costs()
    for k in [0, 8, 4, 2] * 50:
        observe(costs, k)
    return costs


def test_costs_are_learned_as_a_line() -> None:
    def observe(costs: Costs, k: int) -> None:
        if k:
            costs.observe_draft("a", k, 0.2 * k)
        costs.observe_score(k, 1 + 0.1 * k)

    costs = learned(observe)
    assert costs.draft_each_s("a", np.array([2, 4, 8])) == pytest.approx([0.4, 0.8, 1.6], rel=0.1)
    assert costs.score_each_s(np.array([0.0, 4.0, 8.0])) == pytest.approx([1.0, 1.4, 1.8], rel=0.05)


@pytest.mark.parametrize("is_told", [True, False])
def test_what_a_token_costs_is_learned_from_forwards(is_told: bool) -> None:
    """A round with a draft has waited for others, too. Only the worker knows what of that was its forward."""
    costs, random = Costs(), np.random.default_rng(3)
    slopes = []
    for number in range(4000):
        k = int(random.integers(0, 9)) if random.random() < 0.3 else 0
        num_tokens = 16 + k + int(random.integers(0, 20))  # others draft, too
        forward = Forward(num_tokens, 1 + 0.05 * num_tokens)
        waited_s = random.exponential(2.0) if k else 0.0
        costs.observe_score(k, forward.seconds + waited_s, 16, "a", forward if is_told else None)
        if number >= 2000:
            slopes.append(costs.slope_s("a", 4) / 16)
    assert (max(slopes) < 0.055 and min(slopes) > 0.045) == is_told


def test_what_prompts_take_is_no_cost_of_a_round() -> None:
    """They must be read however others draft: a round beside them must not make drafts look cheap."""
    costs = Costs()
    for number in range(400):
        told = Forward(16, 1.0) if number % 2 else None
        costs.observe_score(0, 1.0 if told else 3.0, 16, None, told)
    assert costs.score_s(0) == pytest.approx(1.0, rel=0.05)


def test_workers_that_tell_of_no_forwards_any_more_are_learned_from() -> None:
    """Older ones took their place, or prompts are read in each forward: what was known must not stay for ever."""
    costs = Costs()
    for number in range(4000):
        costs.observe_score(0, 1.0 if number < 1000 else 3.0, 2, None, Forward(2, 1.0) if number < 1000 else None)
    assert costs.score_s(0) == pytest.approx(3.0, rel=0.05)


def test_a_rest_forgets_no_slope() -> None:
    """While nobody drafts, all forwards are alike, and say nothing of what a draft token would cost."""
    costs = Costs()
    for num_tokens in [16, 48, 24, 32] * 50 + [16] * 2000:
        costs.observe_score(0, 1 + 0.05 * num_tokens, 16, forward=Forward(num_tokens, 1 + 0.05 * num_tokens))
    assert costs.score_s(2.0) == pytest.approx(1 + 0.05 * 48, rel=0.1)


def test_drafters_wait_differently_for_the_same_forward() -> None:
    """A round that is scored ahead waits for nobody; another one misses the forward that is running."""
    costs = Costs()
    for number in range(400):
        forward = Forward(8 + number % 5, 1 + 0.1 * (8 + number % 5))
        costs.observe_score(0, forward.seconds, 8, RESTING_ROUNDS, forward)
        costs.observe_score(0, 2 * forward.seconds, 8, None, forward)
    assert costs.score_s(0, RESTING_ROUNDS) == pytest.approx(1.8, rel=0.05)
    assert costs.score_s(0) == pytest.approx(2 * 2.0 - 2 * 0.1, rel=0.1)


def test_sessions_that_begin_together_do_not_all_try() -> None:
    """What a trial is expected to lose counts at once, and what it has lost instead when that is known."""
    exploration, plan = Exploration(share=0.01), DraftPlan("a", 4)
    exploration.observe(1000.0)
    began = 0
    while exploration.affords(3.0):
        exploration.begin(plan, 3.0)
        began += 1
    assert began == 3
    exploration.observe(1.0, 0.0 - 3.0)
    assert exploration.affords(3.0)
    exploration.observe(1.0, 5.0)
    assert not exploration.affords(3.0)


class NeverExplores(Exploration):
    """Affords no trial."""

    def affords(self, loss_s: float) -> bool:
        return False


def load(shared: SharedStatistics, num_sessions: int, slope: float) -> None:
    """Let a target worker with so many sessions score, which all draft the same K: `slope` is the cost of each K."""
    chooser = PlanChooser(shared, ["a"], MAXIMUM)
    for k in np.repeat([1, 8, 4, 2, 0, 5] * 3, 2 * num_sessions).tolist():
        plan = DraftPlan("a", k) if k else PLAIN
        chooser.observe(RoundOutcome(plan, k, range(k - k // 3), 0.01 * k, 1 + slope * k, num_sessions))


def test_a_load_change_changes_k_at_once() -> None:
    """Draft tokens are nearly free at an idle worker, and cost as much as plain ones at a busy one."""
    shared = SharedStatistics()
    load(shared, 1, 0.01)
    shared.exploration = NeverExplores()
    chooser = PlanChooser(shared, ["a"], MAXIMUM)
    idle = chooser.choose(ROOM)
    load(shared, 32, 4.0)
    busy = [chooser.choose(ROOM) for _ in range(2)]
    shared.costs.observe_score(4, 1.04, 1)
    assert idle.num_draft_tokens >= 4
    assert busy == [PLAIN, RESTING]
    assert chooser.choose(ROOM).num_draft_tokens >= 4


def test_drafters_have_scoring_costs_of_their_own() -> None:
    """A drafter that keeps the target's cores busy makes no other one look expensive."""
    costs = Costs()
    for _ in range(60):
        costs.observe_score(4, 1.0, drafter="quiet")
    for _ in range(60):
        costs.observe_score(4, 2.0, drafter="busy")
    assert costs.score_s(4, "busy") > 1.5 * costs.score_s(4, "quiet")


def test_a_slower_machine_prefers_no_unused_plan() -> None:
    """All rounds become three times as slow; a plan that was not used since is expected to be slower, too."""
    costs = Costs()
    for _ in range(60):
        costs.observe_score(4, 1.0, drafter="unused")
    for seconds in [1.0] * 60 + [3.0] * 60:
        costs.observe_score(4, seconds, drafter="used")
    assert costs.score_s(4, "unused") > 2.5
    assert costs.score_s(4, "used") == pytest.approx(3.0, rel=0.1)


def test_similar_loads_share_what_was_learned() -> None:
    """Load levels are factors of two of the worker's sessions; powers of two lie amid them."""
    shared = SharedStatistics()
    load(shared, 16, 0.5)
    before = shared.costs.score_s(0)
    shared.costs.observe_score(0, 1.0, 21)
    assert shared.costs.score_s(0) == pytest.approx(before, rel=0.1)
    for _ in range(100):
        shared.costs.observe_score(0, 9.0, 22)
    assert shared.costs.score_s(0) > 1.5 * before


def test_a_plan_is_charged_for_all_sessions() -> None:
    """What a session drafts makes the others wait: K costs what it costs if all sessions draft as many."""
    shared = SharedStatistics()
    load(shared, 16, 0.5)
    rise = shared.costs.score_s(4, "a") - shared.costs.score_s(0, "a")
    assert float(rise) == pytest.approx(4 * 0.5, rel=0.3)


def test_a_new_session_expects_what_all_sessions_saw() -> None:
    shared = AcceptanceHistory()
    for path in ((0, 1), (), (0,)):
        session = SessionAcceptance(shared)
        expected = 1 + np.cumsum(shared.accept_probs), np.cumsum(shared.draft_probs)
        assert session.expected_tokens() == pytest.approx([1.0, *expected[0]])
        assert session.expected_drafted() == pytest.approx([0.0, *expected[1]])
        session.observe(4, 3, path)
        assert session.expected_tokens() != pytest.approx([1.0, *expected[0]])
        assert len(session.expected_drafted()) == len(session.expected_tokens()) == MAX_DRAFT_TOKENS + 1
