"""A drafter that stops early by its own confidence leaves the target's distribution: enumerated in fractions.

The decision falls before a token is drawn, by the distributions after the tokens drawn so far. The control decides by
the token itself.
"""

from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.exact.acceptance import AcceptanceRule, BlockRule, TokenRule
from specdec.exact.values import Proposal, SparseDistribution
from tests.support.counts import SWEEP
from tests.support.enumeration import (
    ONE,
    Draws,
    Enumeration,
    History,
    Pair,
    prob_of,
    target_text_distribution,
    total_variation,
)
from tests.support.pairs import DISTRIBUTIONS, markov_pairs, rotating_pair, sparse_markov_pair

RULES = [TokenRule(), BlockRule()]
CHANCES = [Fraction(1, 5), Fraction(2, 5), Fraction(3, 5)]
NUM_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class ConfidentDrafter(Enumeration):
    """Drafts while the product of its distributions' largest probabilities is not below `stop_below`."""

    stop_below: Fraction = Fraction(2, 5)
    judges_drawn: bool = False  # the mistake: by the probability of the token that was drawn

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Draft until it is unsure."""
        tokens: History = ()
        distributions: tuple[SparseDistribution, ...] = ()
        chance = ONE
        while len(tokens) < num_draft_tokens:
            draft = self.pair.draft((*history, *tokens))
            if not self.judges_drawn and chance * max(map(Fraction, draft.probs)) < self.stop_below:
                break
            token = draws.token(draft)
            chance *= prob_of(draft, token) if self.judges_drawn else max(map(Fraction, draft.probs))
            if chance < self.stop_below:
                break
            tokens, distributions = (*tokens, token), (*distributions, draft)
        return Proposal(tokens, distributions)


def bias(drafter: Enumeration, start: int = 0) -> Fraction:
    """Return the total variation of a round's text, continued by the target, from the target's own."""
    size = NUM_DRAFT_TOKENS + 1
    distribution = drafter.continued_distribution((start,), drafter.outcomes((start,), NUM_DRAFT_TOKENS), size)
    return total_variation(distribution, target_text_distribution(drafter.pair, (start,), size))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("distributions", DISTRIBUTIONS)
def test_stopping_before_the_draw_is_exact(distributions: str, rule: AcceptanceRule) -> None:
    """For several chances to stop below, and supports of three tokens and of two."""
    target, draft, size = DISTRIBUTIONS[distributions]
    for stop_below in CHANCES:
        for support in {size, min(size, 2)}:
            assert bias(ConfidentDrafter(rotating_pair(target, draft, support), rule, stop_below)) == 0


@settings(max_examples=20 * SWEEP, deadline=None, derandomize=True, database=None)
@given(markov_pairs(), st.sampled_from(CHANCES), st.sampled_from(RULES))
def test_any_rational_distributions_stopped_early(pair: Pair, stop_below: Fraction, rule: AcceptanceRule) -> None:
    """For random rational distributions."""
    assert bias(ConfidentDrafter(pair, rule, stop_below)) == 0


def test_stopping_depends_on_drawn_tokens() -> None:
    """Otherwise the enumeration would prove less: proposals of several lengths."""
    outcomes = ConfidentDrafter(sparse_markov_pair(3), stop_below=Fraction(1, 5)).outcomes((0,), NUM_DRAFT_TOKENS)
    assert len({len(outcome.proposal) for outcome in outcomes}) > 1


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_discarding_an_unlikely_token_is_biased(rule: AcceptanceRule) -> None:
    """The control: the token is drawn, and left out because it came out unlikely."""
    found = max(
        bias(ConfidentDrafter(sparse_markov_pair(3), rule, Fraction(1, 5), judges_drawn=True), start)
        for start in range(3)
    )
    print(f"{type(rule).__name__}: total variation {float(found):.4f}")
    assert found > Fraction(1, 100)
