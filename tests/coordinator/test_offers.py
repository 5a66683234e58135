"""When the target shall offer drafts of its own, how many draft tokens, and what becomes of rests."""

from itertools import pairwise

import numpy as np
import pytest

from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.costs import RESTING as COSTS_OF_REST
from coordinator.choosing.costs import Costs
from coordinator.choosing.exploration import Exploration
from coordinator.choosing.lookups import LOOKUP
from coordinator.choosing.offers import AMONG_MANY, OFFER, ROUNDS_APART
from coordinator.choosing.plans import PLAIN, RESTING, DraftPlan, Found, RoundOutcome
from coordinator.choosing.rest import FIRST_REST, OBSERVED_EVERY, Rest
from coordinator.choosing.shared_statistics import FIRST_SCOUTS, OFFERING_SHARE, SESSIONS_PER_SCOUT, SharedStatistics
from specdec.exact import codec
from specdec.exact.lookup import NO_MATCH, NUM_LENGTHS, Match, NextRound
from specdec.v1 import target_pb2

ROOM = 1000
SLOPE = 0.03  # of a forward, that a draft token costs
SHARED_COSTS = [0, 4, 8, 2] * 20


def known_costs() -> SharedStatistics:
    """Return the costs of a target, and of a drafter that is not worth asking."""
    shared = SharedStatistics()
    chooser = PlanChooser(shared, ["a"], 32)
    for k in SHARED_COSTS:
        plan = DraftPlan("a", k) if k else PLAIN
        chooser.observe(RoundOutcome(plan, k, (), 0.2, 1 + SLOPE * k))
    return shared


class Session:
    """A session whose target offers what it is asked for, and accepts so many of the tokens."""

    def __init__(self, shared: SharedStatistics, num_accepted: int, *, offers: bool = True) -> None:
        self.chooser = PlanChooser(shared, ["a"], 32, is_greedy=True, looks_up=True, takes_offers=True)
        self.num_accepted, self.offers = num_accepted, offers
        self.num_offered = 0
        self.plans: list[DraftPlan] = []
        self.asked: list[int] = []

    def run(self, num_rounds: int) -> "Session":
        """Run rounds; one at rest takes 0.7 of another one."""
        for _ in range(num_rounds):
            plan = self.chooser.choose(ROOM, found=Found(num_offered=self.num_offered))
            next_round = self.chooser.next_round(plan, ROOM)
            self.plans.append(plan)
            self.asked.append(next_round.num_offered if next_round else 0)
            drafted = plan.num_draft_tokens
            path = tuple(range(min(self.num_accepted, drafted))) if plan.drafter == OFFER else ()
            seconds = (1 if plan.observes else 0.7) * (1 + SLOPE * drafted)
            self.chooser.observe(RoundOutcome(plan, drafted, path, 0.2 if plan.drafter == "a" else 0.0, seconds))
            self.num_offered = self.asked[-1] if self.offers else 0
        return self

    def share(self, drafter: str | None) -> float:
        """Return the share of rounds with a drafter."""
        return sum(plan.drafter == drafter for plan in self.plans) / len(self.plans)


def test_offers_that_pay_take_the_place_of_plain_rounds() -> None:
    """All but those in which other drafters are looked at."""
    shared = known_costs()
    Session(shared, 3).run(200)
    for _ in range(1, SESSIONS_PER_SCOUT - 1):  # one has begun
        shared.scouting[True].begin()
    session = Session(shared, 3).run(200)
    assert session.share(OFFER) > 0.85
    assert 3 <= max(set(session.asked), key=session.asked.count) <= 6, "not many more than are accepted"
    assert {plan.num_draft_tokens for plan in session.plans if plan.drafter == OFFER} <= set(session.asked)
    assert any(plan.observes for plan in session.plans[20:]), "rests with offers end, too"


def learned(num_accepted: int) -> SharedStatistics:
    """Return what the first sessions have seen, of offers and of a drafter that is nearly as good; next is no scout."""
    shared = known_costs()
    Session(shared, num_accepted).run(200)
    for _ in range(1000):
        shared.acceptance("a", is_greedy=True).observe(8, 8, range(6))
    for _ in range(1, FIRST_SCOUTS):
        shared.scouting[True].begin()
    return shared


@pytest.mark.parametrize("looks_up", [False, True])
def test_a_prompt_is_not_observed_where_offers_promise_most(looks_up: bool) -> None:
    """For two rests; a longer text looks at other drafters, too."""
    session = Session(learned(3), 3)
    if looks_up:
        session.chooser._draft_lengths = (4,) * NUM_LENGTHS
        assert session.chooser._plan_lookup(8) is None
        session.chooser._match = Match(5, 9)
        looked_up = session.chooser._plan_lookup(8)
        assert looked_up == DraftPlan(LOOKUP, 4, observes=False), "nothing was observed that it would go on with"
        session.chooser._match = NO_MATCH
    session.run(FIRST_REST)
    assert session.plans[0] == RESTING
    assert session.share(OFFER) > 0.8
    session.run(2 * FIRST_REST)
    assert not any(plan.observes for plan in session.plans)
    session.run(FIRST_REST)
    assert any(plan.observes for plan in session.plans), "a long text looks at drafters"


def test_a_session_whose_own_offers_fail_looks_at_drafters() -> None:
    session = Session(learned(3), 0).run(4 * FIRST_REST)
    assert session.plans[0] == RESTING
    assert any(plan.observes for plan in session.plans[: 2 * FIRST_REST])


def test_a_rest_with_offers_tells_nothing_of_plain_rounds_by_its_first_one() -> None:
    """Which was not scored ahead, as they are."""
    rest = Rest()
    rest.begin_with_offers()
    observed = [rest.is_observed, *(rest.goes_on(1) and rest.is_observed for _ in range(FIRST_REST))]
    assert observed == [False, *[place % OBSERVED_EVERY == 0 for place in range(1, FIRST_REST + 1)]]


def test_without_offers_the_first_round_observes() -> None:
    shared = learned(3)
    for _ in range(200):
        shared.acceptance("a", is_greedy=True).observe(8, 8, range(2))
    chooser = PlanChooser(shared, ["a"], 32, is_greedy=True, looks_up=True)
    assert chooser.choose(ROOM).observes


def test_offers_that_lose_are_tried_for_a_small_share_of_the_time() -> None:
    shared = known_costs()
    Session(shared, 0).run(600)
    session = Session(shared, 0).run(600)
    assert any(session.asked)
    lost = sum(SLOPE * plan.num_draft_tokens for plan in session.plans if plan.drafter == OFFER)
    assert lost <= 2 * OFFERING_SHARE * len(session.plans)


def test_a_target_that_offers_nothing_is_left_to_decode_plainly() -> None:
    """As with a grammar, or as it is told to score nothing ahead."""
    session = Session(known_costs(), 0, offers=False).run(600)
    assert session.share(OFFER) == 0
    assert session.plans.count(RESTING) > 0.8 * len(session.plans)


def test_trials_that_nothing_comes_of_lose_time_as_well() -> None:
    """The round that follows was not answered together with others: here it takes twice as long."""
    shared = known_costs()
    Session(shared, 0, offers=False).run(600)
    chooser, num_trials = Session(shared, 0).chooser, 0
    assert chooser._offers
    for number in range(600):
        plan = chooser.choose(ROOM)
        is_after_trial = chooser._offers.is_trial
        chooser.next_round(plan, ROOM)
        if plan == RESTING:
            assert (chooser.num_foreseen(plan) == 1) == (chooser._offers.is_trial or not chooser._rest.num_left)
        num_trials += chooser._offers.is_trial
        chooser.observe(RoundOutcome(plan, 0, (), 0.0, 0.7 * (1 + is_after_trial), has_prefill=not number))
    assert 0 < num_trials < 2 * OFFERING_SHARE * 600


def test_trials_are_some_rounds_apart_where_they_are_expected_to_lose_nothing() -> None:
    shared, trials = known_costs(), list[int]()
    shared.offering = Exploration(share=1.0)  # affords any
    session = Session(shared, 0)
    offers = session.chooser._offers
    assert offers
    for number in range(300):
        session.run(1)
        trials += [number] * offers.is_trial
    assert len(trials) > 5
    assert min(later - earlier for earlier, later in pairwise(trials)) > ROUNDS_APART


def test_a_session_at_rest_weighs_now_and_then_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(known_costs(), 0).run(600)
    weigh, weighed, num_plans = PlanChooser._next_round, [], len(session.plans)

    def counted(chooser: PlanChooser, plan: DraftPlan, room: int) -> NextRound | None:
        weighed.append(plan)
        return weigh(chooser, plan, room)

    monkeypatch.setattr(PlanChooser, "_next_round", counted)
    num_rests = session.run(400).plans[num_plans:].count(RESTING)
    assert num_rests > 300
    assert weighed.count(RESTING) < num_rests / 3


def test_a_rest_weighs_again_once_the_load_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(known_costs(), 0).run(600)
    chooser = session.chooser
    while not (session.run(1).plans[-1] == RESTING and chooser._rest.num_left > chooser._said.least_left):
        pass
    weighed: list[int] = []
    monkeypatch.setattr(PlanChooser, "_next_round", lambda *_: weighed.append(1))
    for num_sessions in (1, 2):  # of 16 sessions more or fewer are between two answers
        chooser._costs.num_sessions = num_sessions
        chooser.next_round(RESTING, ROOM)
        assert not weighed
    chooser._costs.num_sessions = 16
    chooser.next_round(RESTING, ROOM)
    assert weighed


@pytest.mark.parametrize(("num_sessions", "believes"), [(1, True), (16, False)])
def test_a_busy_targets_rounds_say_nothing_of_their_own_drafts(num_sessions: int, believes: bool) -> None:
    """A round that is asked for late is answered soon: its forward was running for others."""
    costs = Costs()
    for _ in range(20):
        costs.observe_score(0, 1.0, num_sessions, COSTS_OF_REST)
        for drafter in (OFFER, LOOKUP):
            costs.observe_score(4, 0.2, num_sessions, drafter)
    asked = np.array([4.0])
    for seconds in (costs.offered_each_s(asked, OFFER), costs.looked_up_each_s(asked, LOOKUP)):
        assert (seconds.item() < costs.plain_s()) == believes


def test_a_longer_offer_is_tried() -> None:
    """What few tokens gained so far says little of more of them, once the target has seen more."""
    shared = known_costs()
    Session(shared, 1).run(150)
    assert max(Session(shared, 1).run(60).asked[-20:]) <= 4
    assert max(Session(shared, 12).run(600).asked[-20:]) > 8


def test_an_offer_beyond_the_texts_end_is_not_drafted() -> None:
    session = Session(known_costs(), 3).run(50)
    assert session.chooser.choose(4, found=Found(num_offered=4)).drafter != OFFER
    assert session.chooser.choose(5, found=Found(num_offered=4)).drafter == OFFER


def test_a_session_of_given_drafts_takes_no_offers() -> None:
    choosers = [
        PlanChooser(known_costs(), ["a"], 32, 4),
        PlanChooser(known_costs(), ["a"], 32),
        PlanChooser(known_costs(), ["a"], 32, looks_up=True),  # with a grammar
    ]
    for chooser in choosers:
        for plan in (PLAIN, RESTING, DraftPlan("a", 4)):
            next_round = chooser.next_round(plan, ROOM)
            assert next_round is None or (next_round.num_offered, next_round.learns) == (0, False)


@pytest.mark.parametrize(
    ("tokens", "parents", "problem"),
    [
        ([1, 2, 3, 4], [], "4 tokens are offered where 3 were asked for"),
        ([1, 10], [], "past the target's vocabulary of 10"),
        ([1, 2], [0], "not a tree"),
        ([1, 2], [0, 2], "not a tree"),
        ([], [0], "not a tree"),
    ],
)
def test_an_offer_that_is_none_is_refused(tokens: list[int], parents: list[int], problem: str) -> None:
    with pytest.raises(codec.MalformedReply, match=problem):
        codec.offer_from_proto(target_pb2.Offer(draft_tokens=tokens, parents=parents), 3, 10)


def test_an_offer_is_a_draft_of_chosen_tokens() -> None:
    offer = codec.offer_from_proto(target_pb2.Offer(draft_tokens=[1, 2, 9], parents=[0, 0, 2]), 3, 10)
    assert (offer.tokens, offer.parents) == ((1, 2, 9), (0, 0, 2))
    assert [each.token_ids for each in offer.distributions] == [(1,), (2,), (9,)]
    assert not codec.offer_from_proto(target_pb2.Offer(), 0, 10)


@pytest.mark.parametrize(("num_sessions", "learns"), [(1, True), (16, False)])
def test_a_busy_target_learns_only_where_offers_promise_something(num_sessions: int, learns: bool) -> None:
    """What one session learns of each forward, all others wait for; scouts look all the same."""
    shared = SharedStatistics()
    for k in SHARED_COSTS:
        shared.costs.observe_score(k, 1 + SLOPE * num_sessions * k, num_sessions)
    for _ in range(500):
        for name in (OFFER, AMONG_MANY):
            shared.acceptance(name, is_greedy=True).observe(4, 4, (), 1.0)
    for _ in range(FIRST_SCOUTS):
        shared.scouting[True].begin()
    choosers = [
        PlanChooser(shared, ["a"], 32, is_greedy=True, looks_up=True, takes_offers=True)
        for _ in range(SESSIONS_PER_SCOUT)
    ]
    offered = [chooser.next_round(RESTING, ROOM) for chooser in choosers]
    learning = [each is not None and each.learns for each in offered]
    assert learning == [learns or chooser._is_scout for chooser in choosers]
    assert any(chooser._is_scout for chooser in choosers)
