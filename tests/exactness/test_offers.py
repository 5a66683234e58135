"""What the target drafts itself leaves the distribution as it is; drafts that know of draws to come do not.

The production offers, rules and loop, with a toy for the model; all generations share what they learn.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from struct import pack

import pytest
import torch

from benchmarks.judging import Agreement, Floats, History, agreement, joint_distribution, reference_distribution
from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.offers import OFFER
from coordinator.choosing.plans import NOTHING, RESTING, DraftPlan, Found
from coordinator.choosing.shared_statistics import SharedStatistics
from coordinator.rounds import DEFAULT_OPTIONS, Scored, ScoreOptions
from specdec.drafting.successors import SharedTable
from specdec.exact.acceptance import AcceptanceRule, BlockRule, TokenRule, matched
from specdec.exact.lookup import NextRound, TextLookup
from specdec.exact.randomness import own_draws
from specdec.exact.values import Proposal, one_hot
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from target_service import offering
from target_service.offering import SessionOffers, SharedSuccessors
from tests.support.counts import TEXTS
from tests.support.toys import (
    NUM_TOKENS,
    PROMPT,
    TOY,
    GenerationResult,
    ToyDrafter,
    ToyModel,
    ToyScorer,
    generate_with,
    markov_logits,
)

torch.set_num_threads(1)

NUM_GENERATIONS = 3_000 * TEXTS
NUM_REPEATED = 300  # seeds
NUM_OFFERED = 5
NUM_GENERATED = 6  # so that later rounds draft from what earlier ones showed; the first NUM_TOKENS are judged
REJECT_BELOW = 1e-6
SEED_OF_TARGET = 12
TARGET = ToyModel(markov_logits(SEED_OF_TARGET))


@dataclass(slots=True)
class OfferingScorer(ToyScorer):
    """Offers drafts of the next round, as the target worker does."""

    offers: SessionOffers
    lookup: TextLookup = field(default_factory=TextLookup)

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        """Return the answers, and what is offered after them."""
        scored = await ToyScorer.score(self, committed, proposal, options)
        ranked = self.distributions(tuple(committed), proposal).argsort(dim=-1, descending=True).tolist()
        reports = [pack(f"<{len(tokens)}I", *tokens) for tokens in ranked]
        self.offers.report(len(committed), [committed[-1], *proposal.tokens], reports)
        if not proposal.is_chosen:
            return scored
        verdict = matched(proposal.tokens, proposal.tree, scored.scores)
        text = [*committed, *(proposal.tokens[token] for token in verdict.path), verdict.next_token]
        if options.next_round is None or len(text) >= options.next_round.max_length:
            return scored
        return replace(scored, offer=self.draft(text, options.next_round))

    def draft(self, text: list[int], next_round: NextRound) -> Proposal:
        """Return what is offered after a text."""
        return self.offers.draft(text, self.lookup, next_round)


@dataclass(slots=True)
class PeekingScorer(OfferingScorer):
    """Offers a draft where the coming draw is low: else the next round draws with other keys."""

    def draft(self, text: list[int], next_round: NextRound) -> Proposal:
        """Return a draft of one token, or nothing, which depends on the draw that will decide."""
        is_low = own_draws(self.seed, len(text), 1)[0].uniform < 0.5
        return Proposal((0,), (one_hot(0),)) if is_low else Proposal()


class TakesOffers(PlanChooser):
    """Drafts what is offered; where nothing is, a token that is drawn, after which nothing can be offered."""

    def __init__(self, num_offered: int = NUM_OFFERED) -> None:
        super().__init__(SharedStatistics(), [TOY], num_offered, takes_offers=True)
        self._asked = num_offered
        self._was_drawn = True  # the last round's draft, so that the first round is plain

    def choose(
        self, remaining_tokens: int, available: Iterable[str] | None = None, found: Found = NOTHING
    ) -> DraftPlan:
        if 0 < found.num_offered < remaining_tokens:
            self._was_drawn = False
            return DraftPlan(OFFER, self._asked, observes=False)
        self._was_drawn = not self._was_drawn and remaining_tokens > 1
        return DraftPlan(TOY, 1, observes=False) if self._was_drawn else RESTING

    def next_round(self, plan: DraftPlan, max_length: int) -> NextRound:
        return NextRound((), True, max_length, self._asked, learns=True)


async def generated(
    shared: SharedSuccessors, seed: int, rule: AcceptanceRule, scorer: type[OfferingScorer] = OfferingScorer
) -> GenerationResult:
    session = WorkerSession(f"session {seed}", 1, SamplingParams(seed=seed), len(PROMPT))
    scoring = scorer(TARGET, seed, SessionOffers(session, shared.of(session)))
    return await generate_with({TOY: ToyDrafter(TARGET, seed)}, scoring, TakesOffers(), NUM_GENERATED, rule)


def judged(results: list[GenerationResult]) -> Agreement:
    """Return how texts agree with the target's distribution, which the toys have no part in."""
    logits = markov_logits(SEED_OF_TARGET).numpy()

    def distribution_after(text: History) -> Floats:
        return reference_distribution(logits[(*PROMPT, *text)[-1]], SamplingParams(), PROMPT, text)

    return agreement(
        [result.tokens[:NUM_TOKENS] for result in results], joint_distribution(distribution_after, NUM_TOKENS)
    )


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "alone"])
@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=["token rule", "block rule"])
@pytest.mark.long(but=("block rule-shared",))
async def test_generated_text_has_the_targets_distribution(rule: AcceptanceRule, shares: bool) -> None:
    """Joint chi-square over the first four tokens, each generation with a seed of its own."""
    shared = SharedSuccessors(shares)
    plays = [await generated(shared, seed, rule) for seed in range(NUM_GENERATIONS)]
    result = judged(plays)
    print(result)
    assert result.p_value > REJECT_BELOW
    assert sum(play.total_accepted for play in plays) > 0.5 * len(plays)


@pytest.mark.long
async def test_offers_that_know_of_draws_to_come_are_noticed() -> None:
    plays = [await generated(SharedSuccessors(), seed, TokenRule(), PeekingScorer) for seed in range(NUM_GENERATIONS)]
    assert judged(plays).p_value < REJECT_BELOW


# ---- what others have shown


def chain_of(rows: dict[int, dict[int, float]]) -> ToyModel:
    """Return a Markov chain over ten tokens; a token without a row follows itself."""
    probs = torch.full((10, 10), 1e-13)
    for token in range(10):
        for after, prob in rows.get(token, {token: 1.0}).items():
            probs[token, after] = prob
    return ToyModel(probs.log())


# 1 is followed by 2 or 3, each with a half, 2 by 1, and 3 by 5
ASKED_TWICE = replace(chain_of({0: {1: 1.0}, 1: {2: 0.5, 3: 0.5}, 2: {1: 1.0}, 3: {5: 1.0}}), prompt=(8, 0))
# after 9 and 2 it may draft the 1 that the other one has shown to follow 2: then it shows what follows 1
BETWEEN = replace(chain_of({9: {2: 1.0}, 2: {6: 1.0}, 1: {2: 1.0}}), prompt=(8, 9))


class OthersTable(SharedTable):
    """Gives a session what sessions of other seeds have reported last."""

    def __init__(self, reports: dict[int, dict[int, bytes]], seed: int) -> None:
        super().__init__()
        self._by_seed, self._seed = reports, seed

    def report(self, token: int, successors: bytes) -> None:
        """Note a report as this session's."""
        self._by_seed.setdefault(token, {})[self._seed] = successors

    def of(self, token: int) -> bytes | None:
        """Return the latest report of another session."""
        others = [report for seed, report in self._by_seed.get(token, {}).items() if seed != self._seed]
        return others[-1] if others else None


async def second_token(
    reports: dict[int, dict[int, bytes]], model: ToyModel, seed: int, temperature: float = 1.0
) -> int:
    """Generate; return the second token."""
    session = WorkerSession("session", 1, SamplingParams(seed=seed, temperature=temperature), 2)
    scorer = OfferingScorer(model, seed, SessionOffers(session, OthersTable(reports, seed)))
    return (await generate_with({TOY: ToyDrafter(model, seed)}, scorer, TakesOffers(1), 4, TokenRule())).tokens[1]


async def share_of_twos(temperature_between: float) -> float:
    """Generate with each seed twice, and another text between; return how often 2 followed 1 the second time."""
    num_twos = 0
    for seed in range(NUM_REPEATED):
        reports: dict[int, dict[int, bytes]] = {}
        await second_token(reports, ASKED_TWICE, seed)
        await second_token(reports, BETWEEN, NUM_REPEATED + seed, temperature_between)
        num_twos += await second_token(reports, ASKED_TWICE, seed) == 2
    return num_twos / NUM_REPEATED


async def test_draws_do_not_come_back_through_what_a_third_session_drafted() -> None:
    """Which tokens the target reported on for another session may depend on the draws of this one."""
    for temperature in (1.0, 0.0):
        assert await share_of_twos(temperature) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("temperature", [1.0, 0.0], ids=["sampled", "greedy"])
async def test_sampled_sessions_that_read_what_others_have_shown_are_noticed(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though never what sessions of their own seed have shown."""
    monkeypatch.setattr(offering, "may_read_reports", lambda session: True)
    assert await share_of_twos(temperature) < 0.35


def session_of(seed: int, temperature: float = 1.0) -> WorkerSession:
    return WorkerSession("session", 1, SamplingParams(seed=seed, temperature=temperature), 2)


@pytest.mark.parametrize(("temperature", "is_offered"), [(1.0, False), (0.0, True)])
def test_greedy_sessions_alone_read_what_others_have_shown(temperature: float, is_offered: bool) -> None:
    shared = SharedSuccessors()
    SessionOffers(session_of(1), shared.of(session_of(1))).report(2, [7], [pack("<2I", 8, 9)])
    offers = SessionOffers(session_of(2, temperature), shared.of(session_of(2)))
    assert (offers.draft([5, 7], TextLookup(), NextRound(num_offered=2)).tokens == (8, 9)) == is_offered


def test_a_session_that_goes_back_forgets_what_its_later_rounds_have_shown() -> None:
    """It will make their draws again."""
    offers, lookup, asked = SessionOffers(session_of(1), None), TextLookup(), NextRound(num_offered=1)
    offers.report(2, [7], [pack("<2I", 8, 9)])
    offers.report(5, [7, 4], [pack("<2I", 6, 9), pack("<2I", 3, 2)])
    assert offers.draft([5, 7], lookup, asked).tokens == (6,)
    offers.report(3, [2], [pack("<2I", 1, 9)])
    assert offers.draft([5, 7], lookup, asked).tokens == (8,)
    assert offers.draft([5, 4], lookup, asked).tokens == ()


def test_what_can_no_longer_be_taken_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering, "MAX_LOG", 2)
    offers, lookup, asked = SessionOffers(session_of(1), None), TextLookup(), NextRound(num_offered=1)
    for length, token in ((2, 7), (3, 4), (5, 6), (6, 3)):
        offers.report(length, [token], [pack("<2I", 8, 9)])
    assert offers.draft([5, 7], lookup, asked).tokens == (8,)
    offers.report(2, [2], [pack("<2I", 1, 9)])
    assert [offers.draft([5, token], lookup, asked).tokens for token in (7, 4, 2)] == [(), (), (1,)]


def test_a_session_keeps_reports_of_some_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones go first."""
    monkeypatch.setattr(offering, "MAX_OWN_TOKENS", 2)
    offers, lookup, asked = SessionOffers(session_of(1), None), TextLookup(), NextRound(num_offered=1)
    for length, token in enumerate((7, 4, 7, 6), start=2):
        offers.report(length, [token], [pack("<2I", 8, 9)])
    assert [offers.draft([5, token], lookup, asked).tokens for token in (7, 4, 6)] == [(), (8,), (8,)]


def test_tenants_share_nothing() -> None:
    shared = SharedSuccessors()
    sessions = [replace(session_of(seed, 0.0), session_id=f"{tenant}.name") for seed, tenant in enumerate("aab")]
    SessionOffers(sessions[0], shared.of(sessions[0])).report(2, [7], [pack("<2I", 8, 9)])
    drafts = [
        SessionOffers(each, shared.of(each)).draft([5, 7], TextLookup(), NextRound(num_offered=1)).tokens
        for each in sessions[1:]
    ]
    assert drafts == [(8,), ()]


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used tenant's is dropped."""
    monkeypatch.setattr(offering, "MAX_TENANTS", 2)
    shared = SharedSuccessors()
    tables = [shared.of(replace(session_of(1), session_id=f"{tenant}.name")) for tenant in "abacab"]
    assert [tables.index(table) for table in tables] == [0, 1, 0, 3, 0, 5]
