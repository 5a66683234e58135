"""What the coordinator looks up in a session's text, and when it drafts that."""

import random
from collections.abc import Sequence

import pytest

from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.costs import RESTING as COSTS_OF_REST
from coordinator.choosing.lookups import COMPARED_LENGTH, LOOKUP, SHORTEST_OF, Lookups
from coordinator.choosing.offers import OFFER
from coordinator.choosing.plans import PLAIN, RESTING, DraftPlan, Found, RoundOutcome
from coordinator.choosing.shared_statistics import (
    FIRST_SCOUTS,
    SCOUTED_ROUNDS,
    SESSIONS_PER_SCOUT,
    SharedStatistics,
)
from specdec.exact.lookup import (
    FIRST_SLOTS,
    LONGEST,
    MAX_READ,
    NO_MATCH,
    NUM_LENGTHS,
    SHORTEST,
    Match,
    NextRound,
    TextLookup,
    continued,
    num_common,
)

ROOM = 1000


def longest(tokens: Sequence[int]) -> int:
    """Return the length of the longest earlier match of a text's end, found by trying all."""
    return max((num_common(tokens, place, len(tokens)) for place in range(SHORTEST, len(tokens))), default=0)


@pytest.mark.parametrize("num_kinds", [2, 4, 30, 5000])
def test_the_longest_match_is_found_in_a_growing_text(num_kinds: int) -> None:
    """Also after the table has grown, and with many tokens a round. Of frequent pairs only some places are tried."""
    source, tokens, lookup, shorter = random.Random(num_kinds), list[int](), TextLookup(), 0
    while len(tokens) < 2 * FIRST_SLOTS:
        tokens += source.choices(range(num_kinds), k=source.randrange(1, 40))
        match, best = lookup.find(tokens), longest(tokens)
        assert match.num_tokens == num_common(tokens, match.position, len(tokens)) or match == NO_MATCH
        assert match.num_tokens <= best
        shorter += match.num_tokens < (best if best >= SHORTEST else 0)
    assert shorter == 0 or num_kinds < 30


def test_a_loop_goes_on_as_a_loop() -> None:
    lookup, tokens = TextLookup(), [7, 8, 1, 2, 3, 1, 2, 3, 1, 2]
    match = lookup.find(tokens)
    assert (match.position, match.num_tokens) == (7, 5)
    assert continued(tokens, match, 7).tokens == (3, 1, 2, 3, 1, 2, 3)
    assert all(
        distribution.token_ids == (token,)
        for distribution, token in zip(continued(tokens, match, 3).distributions, (3, 1, 2), strict=True)
    )


def test_a_long_prompt_is_read_in_parts() -> None:
    tokens, lookup = [*range(3 * MAX_READ + 1), 5, 6], TextLookup()
    found = [lookup.find(tokens).num_tokens for _ in range(4)]
    assert found == [0, 0, 0, 2]


def test_a_shorter_text_is_read_anew() -> None:
    lookup = TextLookup()
    assert lookup.find([1, 2, 3, 4, 1, 2, 3]).num_tokens == 3
    assert lookup.find([8, 9, 8, 9]) == Match(2, 2)
    assert lookup.find([8, 9, 8, 9, 5, 8, 9]) == Match(4, 2)


@pytest.mark.parametrize(
    ("num_tokens", "length", "expected"),
    [(0, 50, 0), (2, 50, 0), (3, 50, 5), (4, 50, 0), (3, 96, 3), (3, 99, 0), (3, 120, 0)],
)
def test_how_much_a_round_drafts_is_said_by_the_matchs_length(num_tokens: int, length: int, expected: int) -> None:
    """And by what is left of the text."""
    next_round = NextRound(draft_lengths=(0, 5), max_length=100)
    assert next_round.num_draft_tokens(Match(7, num_tokens), length) == expected


@pytest.mark.parametrize("tokens", [[], [3], [3, 3]])
def test_short_texts_have_no_match(tokens: list[int]) -> None:
    assert TextLookup().find(tokens) == NO_MATCH


def chooser_of(shared: SharedStatistics, *, looks_up: bool = True, fixed: int | None = None) -> PlanChooser:
    return PlanChooser(shared, ["a"], 32, fixed, looks_up=looks_up)


def known_costs() -> SharedStatistics:
    """Return the costs of a target whose draft tokens cost 0.03 of a forward each, and of a worthless drafter."""
    shared = SharedStatistics()
    chooser = PlanChooser(shared, ["a"], 32)
    for k in [0, 4, 8, 2] * 20:
        plan = DraftPlan("a", k) if k else PLAIN
        chooser.observe(RoundOutcome(plan, k, (), 0.2, 1 + 0.03 * k))
    return shared


def teach(shared: SharedStatistics, num_tokens: int, num_accepted: int, count: int = 60) -> None:
    lookups = Lookups(shared, 32, is_greedy=False)
    for _ in range(count):
        lookups.observe(Match(5, num_tokens), COMPARED_LENGTH, num_accepted)


def test_each_round_decides_by_its_own_match() -> None:
    shared = known_costs()
    teach(shared, 2, 0)
    teach(shared, 9, 12)
    chooser = chooser_of(shared)
    assert chooser.choose(ROOM, found=Found(Match(5, 2))).drafter != LOOKUP
    plan = chooser.choose(ROOM, found=Found(Match(5, 9)))
    assert plan.drafter == LOOKUP
    assert plan.num_draft_tokens >= 8
    assert chooser.choose(4, found=Found(Match(5, 9))).num_draft_tokens <= 3, "the last token closes the round"
    said = chooser.next_round(plan, ROOM)
    assert said is not None
    assert [said.num_draft_tokens(Match(5, length), 20) > 0 for length in (2, 9, 12)] == [False, True, True]
    assert not said.plain
    for _ in range(60):
        assert chooser.choose(ROOM, found=Found(Match(5, 9))) == plan, "what was said to the target is kept to"
        chooser.observe(RoundOutcome(plan, plan.num_draft_tokens, (), 0.0, 1.4))
    said = chooser.next_round(plan, ROOM)
    assert said is None or not said.num_draft_tokens(Match(5, 9), 20)
    assert chooser.choose(ROOM, found=Found(Match(5, 9))).drafter != LOOKUP


def test_the_first_round_decides_whether_a_session_rests() -> None:
    """A lookup would have the target observe the prompt, which costs more than it gains."""
    shared = known_costs()
    teach(shared, 9, 12)
    for _ in range(FIRST_SCOUTS):
        chooser_of(shared)
    chooser = chooser_of(shared)
    assert chooser.choose(ROOM, found=Found(Match(5, 9))) == RESTING
    assert chooser.choose(ROOM, found=Found(Match(5, 9))).drafter == LOOKUP


def test_a_match_is_drafted_in_the_middle_of_a_rest() -> None:
    shared = known_costs()
    teach(shared, 9, 12)
    chooser = chooser_of(shared)
    for _ in range(20):
        if (plan := chooser.choose(ROOM)) == RESTING:
            break
        chooser.observe(RoundOutcome(plan, 0, (), 0.0, 1.0))
    plan = chooser.choose(ROOM, found=Found(Match(5, 9)))
    assert (plan.drafter, plan.observes) == (LOOKUP, False)
    said = chooser.next_round(plan, ROOM)
    assert said
    assert said.plain, "the rest goes on"
    chooser.observe(RoundOutcome(plan, plan.num_draft_tokens, (0,), 0.0, 1.2))
    assert chooser.choose(ROOM) == RESTING


@pytest.mark.parametrize("is_redrawn", [True, False])
@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_match_is_drafted_among_answers_and_after_their_loss(is_greedy: bool, is_redrawn: bool) -> None:
    """As the target was told; drawn again later, it is the same text. So is that of an offer, or of a plain round."""
    shared = known_costs()
    for length in (3, 16):
        teach(shared, length, 8)
    chooser = PlanChooser(shared, ["a"], 32, is_greedy=is_greedy, looks_up=True, takes_offers=True)
    chooser._draft_lengths = (8,) * NUM_LENGTHS
    kinds = (not is_redrawn, is_redrawn)
    founds = Found(Match(1, 16), 3, *kinds), Found(NO_MATCH, 3, *kinds), Found(NO_MATCH, 0, *kinds)
    assert [chooser.choose(100, found=found).drafter for found in founds] == [LOOKUP, OFFER, None]
    assert chooser.choose(100).drafter == "a", "which draws"


def test_rounds_that_draft_nothing_tell_what_a_match_is_worth() -> None:
    shared = known_costs()
    chooser = chooser_of(shared)
    before = shared.acceptance(f"{LOOKUP} 3", is_greedy=False).accept_probs[0]
    text = [1, 2, 3, 4, 1, 2, 3]
    for _ in range(12):
        chooser.choose(ROOM, found=Found(Match(3, 3)))
        chooser.compare_lookup(len(text))
        chooser.settle([*text, 9])
    assert shared.acceptance(f"{LOOKUP} 3", is_greedy=False).accept_probs[0] < 0.5 * before


def test_a_comparison_waits_for_the_text() -> None:
    shared = SharedStatistics()
    lookups, text = Lookups(shared, 32, is_greedy=True), [1, 2, 3, 4, 1, 2, 3]
    history = shared.acceptance(f"{LOOKUP} 3", is_greedy=True)
    before = history.accept_probs.copy()
    lookups.compare(Match(3, 3), len(text))
    lookups.settle(text)
    lookups.settle([*text, 4, 1])
    assert (history.accept_probs == before).all()
    lookups.settle([*text, 4, 1, 7])
    assert (history.accept_probs != before).any()


def test_without_lookups_a_match_changes_nothing() -> None:
    shared = known_costs()
    teach(shared, 9, 12)
    for chooser in (chooser_of(shared, looks_up=False), chooser_of(shared, looks_up=False, fixed=4)):
        assert chooser.choose(ROOM, found=Found(Match(5, 9))).drafter != LOOKUP
        assert chooser.next_round(DraftPlan("a", 4), ROOM) is None


def test_every_length_has_a_class() -> None:
    assert SHORTEST_OF[0] == SHORTEST
    assert SHORTEST_OF[-1] <= LONGEST


def test_some_sessions_are_scouts() -> None:
    shared = SharedStatistics()
    numbers = range(1, 10 * SESSIONS_PER_SCOUT + 1)
    scouts = [number for number in numbers if shared.scouting[False].begin()]
    assert scouts == [*numbers[:FIRST_SCOUTS], *numbers[SESSIONS_PER_SCOUT - 1 :: SESSIONS_PER_SCOUT]]


@pytest.mark.parametrize(("has_drafters", "is_over"), [(True, True), (False, False)])
def test_scouts_that_have_seen_enough_need_no_others(has_drafters: bool, is_over: bool) -> None:
    shared = SharedStatistics()
    scout = PlanChooser(shared, ["a"], 32)
    for _ in range(SCOUTED_ROUNDS):
        plan = scout.choose(ROOM, available=["a"] if has_drafters else [])
        scout.observe(RoundOutcome(plan, plan.num_draft_tokens, (), 0.1, 1.0))
    assert shared.scouting[False].begin() != is_over
    assert shared.scouting[True].begin(), "sampled texts tell greedy ones nothing"


@pytest.mark.parametrize(("num_sessions", "drafts"), [(1, True), (16, False)])
def test_a_busy_target_drafts_only_what_clearly_promises_more(num_sessions: int, drafts: bool) -> None:
    """What it looks up and draws between two forwards, all its sessions wait for."""
    shared = SharedStatistics()
    for _ in range(20):
        for num_drafted, drafter in ((0, None), (32, LOOKUP), (0, COSTS_OF_REST)):
            shared.costs.observe_score(num_drafted, 1.0, num_sessions, drafter)
    for number in range(2000):
        for shortest in SHORTEST_OF:
            path = (0,) if number % 16 == 0 else ()
            shared.acceptance(f"{LOOKUP} {shortest}", is_greedy=True).observe(32, 32, path, 1.0)
    chooser = PlanChooser(shared, ["a"], 32, is_greedy=True, looks_up=True)
    lengths = chooser._lookup_lengths()
    assert len(lengths) == NUM_LENGTHS
    assert any(lengths) == drafts
