"""A drafter that another one falls back on leaves the target's distribution: enumerated in fractions.

What is given up was chosen without a draw, so whether that happens depends on the text alone. The control gives up
drawn tokens, too.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import rounds
from coordinator.choosing.plans import MIN_FOUND, DraftPlan
from coordinator.rounds import Drafted, draft
from specdec.exact.acceptance import AcceptanceRule, BlockRule, TokenRule
from specdec.exact.values import Observations, Proposal, SparseDistribution
from tests.support.counts import SWEEP
from tests.support.enumeration import (
    Draws,
    Enumeration,
    History,
    Pair,
    one_hot,
    target_text_distribution,
    total_variation,
)
from tests.support.pairs import DISTRIBUTIONS, markov_pairs, rotating_pair, sparse_markov_pair

RULES = [TokenRule(), BlockRule()]
NUM_DRAFT_TOKENS = 3
PLAN = DraftPlan("first", NUM_DRAFT_TOKENS, fallback=DraftPlan("second", 2))


@dataclass
class Answering:
    """A drafter of one round, which draws only when it is asked."""

    answer: Callable[[], Proposal]
    available: bool = True

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return its proposal."""
        return Drafted(self.answer())

    def observe(self, observations: Observations) -> None:
        """Learn nothing."""


@dataclass(frozen=True)
class FallingBack(Enumeration):
    """Looks the text's end up, and finds nothing, a token or two; asks a drafter that draws where it found less."""

    def first(self, history: History, draws: Draws) -> Proposal:
        """Return as many tokens as the last one says, chosen without a draw."""
        tokens = tuple(range(history[-1]))[:NUM_DRAFT_TOKENS]
        return Proposal(tokens, tuple(map(one_hot, tokens)))

    def second(self, history: History, draws: Draws) -> Proposal:
        """Return a chain of two drawn tokens."""
        return drawn_chain(self.pair, history, 2, draws)

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Follow the plan as a round does."""
        drafters = {
            "first": Answering(lambda: self.first(history, draws)),
            "second": Answering(lambda: self.second(history, draws)),
        }
        return asyncio.run(draft(drafters, list(history), PLAN))[1].proposal


@dataclass(frozen=True)
class FallingBackOnDrawn(FallingBack):
    """The first drafter draws a token, and another one where the first came out as 0."""

    def first(self, history: History, draws: Draws) -> Proposal:
        """Return one drawn token or two."""
        alone = drawn_chain(self.pair, history, 1, draws)
        if alone.tokens != (0,):
            return alone
        after = drawn_chain(self.pair, (*history, 0), 1, draws)
        return Proposal((*alone.tokens, *after.tokens), (*alone.distributions, *after.distributions))


def drawn_chain(pair: Pair, history: History, length: int, draws: Draws) -> Proposal:
    """Return a chain of drawn tokens."""
    tokens: History = ()
    distributions: tuple[SparseDistribution, ...] = ()
    while len(tokens) < length:
        distributions += (pair.draft((*history, *tokens)),)
        tokens += (draws.token(distributions[-1]),)
    return Proposal(tokens, distributions)


def bias(drafter: Enumeration, start: int) -> Fraction:
    """Return the total variation of a round's text, continued by the target, from the target's own."""
    size = NUM_DRAFT_TOKENS + 1
    distribution = drafter.continued_distribution((start,), drafter.outcomes((start,), NUM_DRAFT_TOKENS), size)
    return total_variation(distribution, target_text_distribution(drafter.pair, (start,), size))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("distributions", DISTRIBUTIONS)
def test_falling_back_is_exact(distributions: str, rule: AcceptanceRule) -> None:
    """After nothing, one token or two were found."""
    target, draft_probs, size = DISTRIBUTIONS[distributions]
    pair = rotating_pair(target, draft_probs, size)
    for start in range(size):
        assert bias(FallingBack(pair, rule), start) == 0
        assert bias(FallingBackOnDrawn(pair, rule), start) == 0


@settings(max_examples=20 * SWEEP, deadline=None, derandomize=True, database=None)
@given(markov_pairs(), st.sampled_from(RULES))
def test_any_rational_distributions_fall_back(pair: Pair, rule: AcceptanceRule) -> None:
    """For random rational distributions."""
    assert bias(FallingBack(pair, rule), 0) == bias(FallingBack(pair, rule), 1) == 0


def test_both_drafters_are_asked() -> None:
    """Otherwise the enumeration would prove less: one draws, and what the other one finds is certain."""
    drafter = FallingBack(sparse_markov_pair(3))
    proposals = [{outcome.proposal.tokens for outcome in drafter.outcomes((start,), 3)} for start in range(3)]
    assert len(proposals[0]) > 1
    assert len(proposals[1]) > 1
    assert proposals[2] == {(0, 1)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_giving_up_a_drawn_token_is_biased(rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a short proposal is given up although its length depends on what was drawn."""
    monkeypatch.setattr(rounds, "is_missed", lambda proposal: len(proposal) < MIN_FOUND)
    found = max(bias(FallingBackOnDrawn(sparse_markov_pair(3), rule), start) for start in range(3))
    print(f"{type(rule).__name__}: total variation {float(found):.4f}")
    assert found > Fraction(1, 100)
