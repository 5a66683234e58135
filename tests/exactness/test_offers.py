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
from specdec.exact.acceptance import AcceptanceRule, BlockRule, TokenRule
from specdec.exact.lookup import NextRound, TextLookup
from specdec.exact.randomness import acceptance_uniforms
from specdec.exact.values import Proposal, one_hot
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from target_service import offering
from target_service.offering import SessionOffers, SharedSuccessors
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

NUM_GENERATIONS = 3_000
NUM_REPEATED = 600  # seeds
NUM_OFFERED = 5
NUM_GENERATED = 6  # so that later rounds draft from what earlier ones showed; the first NUM_TOKENS are judged
REJECT_BELOW = 1e-6
SEED_OF_TARGET = 12
TARGET = ToyModel(markov_logits(SEED_OF_TARGET))


@dataclass(slots=True)
class OfferingScorer(ToyScorer):
    """Offers drafts of the next round, as the target worker does."""

    rule: AcceptanceRule
    offers: SessionOffers
    lookup: TextLookup = field(default_factory=TextLookup)

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        """Return the answers, and what is offered after them."""
        scored = await ToyScorer.score(self, committed, proposal, options)
        ranked = self.distributions(tuple(committed), proposal).argsort(dim=-1, descending=True).tolist()
        reports = [pack(f"<{len(tokens)}I", *tokens) for tokens in ranked]
        self.offers.report(len(committed), [committed[-1], *proposal.tokens], reports)
        verdict = self.rule.accept(
            proposal, scored.scores, acceptance_uniforms(self.seed, len(committed), len(proposal))
        )
        text = [*committed, *(proposal.tokens[token] for token in verdict.path), verdict.next_token]
        if options.next_round is None or len(text) >= options.next_round.max_length:
            return scored
        return replace(scored, offer=self.draft(text, options.next_round))

    def draft(self, text: list[int], next_round: NextRound) -> Proposal:
        """Return what is offered after a text."""
        return self.offers.draft(text, self.lookup, next_round)


@dataclass(slots=True)
class PeekingScorer(OfferingScorer):
    """Offers what the coming draw would choose from the target's distribution, in front."""

    def draft(self, text: list[int], next_round: NextRound) -> Proposal:
        """Return a draft of one token, which depends on the draw that will judge it."""
        will_pass = acceptance_uniforms(self.seed, len(text), 1).accept[0] < 0.5
        token = self.model.distribution(tuple(text)).argsort(descending=True).tolist()[0 if will_pass else 1]
        return Proposal((token,), (one_hot(token),))


class TakesOffers(PlanChooser):
    """Drafts what is offered, and nothing else."""

    def __init__(self) -> None:
        super().__init__(SharedStatistics(), [TOY], NUM_OFFERED, looks_up=True)

    def choose(
        self, remaining_tokens: int, available: Iterable[str] | None = None, found: Found = NOTHING
    ) -> DraftPlan:
        return DraftPlan(OFFER, NUM_OFFERED, observes=False) if 0 < found.num_offered < remaining_tokens else RESTING

    def next_round(self, plan: DraftPlan, max_length: int) -> NextRound:
        return NextRound((), True, max_length, NUM_OFFERED, learns=True)


async def generated(
    shared: SharedSuccessors, seed: int, rule: AcceptanceRule, scorer: type[OfferingScorer] = OfferingScorer
) -> GenerationResult:
    session = WorkerSession(f"session {seed}", 1, SamplingParams(seed=seed), len(PROMPT))
    scoring = scorer(TARGET, seed, rule, SessionOffers(session, shared.of(session)))
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
async def test_generated_text_has_the_targets_distribution(rule: AcceptanceRule, shares: bool) -> None:
    """Joint chi-square over the first four tokens, each generation with a seed of its own."""
    shared = SharedSuccessors(shares)
    plays = [await generated(shared, seed, rule) for seed in range(NUM_GENERATIONS)]
    result = judged(plays)
    print(result)
    assert result.p_value > REJECT_BELOW
    assert sum(play.total_accepted for play in plays) > 0.5 * len(plays)


async def test_offers_that_know_of_draws_to_come_are_noticed() -> None:
    plays = [await generated(SharedSuccessors(), seed, TokenRule(), PeekingScorer) for seed in range(NUM_GENERATIONS)]
    assert judged(plays).p_value < REJECT_BELOW


# ---- equal draws


async def repeated() -> list[GenerationResult]:
    """Generate with each seed twice, the second time from what the first one left; return the second ones."""
    plays = []
    for seed in range(NUM_REPEATED):
        shared = SharedSuccessors()
        await generated(shared, seed, TokenRule())
        plays.append(await generated(shared, seed, TokenRule()))
    return plays


async def test_repeated_seeds_have_the_targets_distribution() -> None:
    """A session drafts from nothing that its own draws led to."""
    assert judged(await repeated()).p_value > REJECT_BELOW


def session_of(seed: int) -> WorkerSession:
    return WorkerSession("session", 1, SamplingParams(seed=seed), 2)


@pytest.mark.parametrize(("seed", "is_offered"), [(1, False), (2, True)])
def test_what_equal_draws_have_shown_is_not_offered(seed: int, is_offered: bool) -> None:
    shared = SharedSuccessors()
    SessionOffers(session_of(1), shared.of(session_of(1))).report(2, [7], [pack("<2I", 8, 9)])
    offers = SessionOffers(session_of(seed), shared.of(session_of(seed)))
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


def test_tenants_share_nothing() -> None:
    shared = SharedSuccessors()
    sessions = [replace(session_of(seed), session_id=f"{tenant}.name") for seed, tenant in enumerate("aab")]
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
