"""Chains under the token rule have the target's distribution: enumerated in fractions, equality, not tolerance."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.exact.acceptance import BlockRule, Thresholds, TokenRule
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms
from tests.support.counts import SWEEP
from tests.support.enumeration import (
    Distribution,
    Enumeration,
    History,
    Pair,
    dense,
    markov_pair,
    target_text_distribution,
    total_variation,
    truncated,
)
from tests.support.mutants import SPARSE, WHOLE, AcceptsInclusively


def constant_pair(target: tuple[Fraction, ...], draft: SparseDistribution) -> Pair:
    """Return distributions that do not depend on the text."""
    return Pair(lambda _: target, lambda _: draft, memory=1)


def assert_exact(pair: Pair, num_tokens: int, num_draft_tokens: Callable[[History], int]) -> None:
    """Assert that the text's distribution is the target's: equality of fractions."""
    distribution = Enumeration(pair).text_distribution((0,), num_tokens, lambda text, note: num_draft_tokens(text))
    assert distribution == target_text_distribution(pair, (0,), num_tokens)


SHAPES = {
    "ties": (dense(1, 1, 1), dense(1, 1, 1)),
    "identical": (dense(1, 2, 3), dense(1, 2, 3)),
    "disjoint": (dense(1, 3, 0, 0), dense(0, 0, 2, 1)),
    "zero in the target": (dense(0, 3, 1), dense(2, 1, 1)),
    "zero in the draft": (dense(2, 1, 1), dense(0, 3, 1)),
    "one-hot target": (dense(0, 1, 0), dense(2, 1, 1)),
    "one-hot draft": (dense(2, 1, 1), dense(0, 1, 0)),
    "one-hot draft, impossible": (dense(2, 0, 1), dense(0, 1, 0)),
    "both one-hot, equal": (dense(0, 1, 0), dense(0, 1, 0)),
    "both one-hot, unequal": (dense(0, 0, 1), dense(0, 1, 0)),
    "draft below the target but once": (dense(4, 1, 1, 1), dense(1, 2, 2, 2)),
    "two tokens": (dense(1, 4), dense(4, 1)),
}


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_round_has_the_targets_distribution(shape: str, num_draft_tokens: int) -> None:
    """A round's first token and all others up to K + 1 from further rounds, for distributions of every shape."""
    target, draft = SHAPES[shape]
    assert_exact(constant_pair(target, truncated(draft)), min(num_draft_tokens + 1, 3), lambda _: num_draft_tokens)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_truncated_drafts_keep_the_distribution(shape: str, size: int) -> None:
    """Where the support is smaller than the vocabulary, the tail token fills in."""
    target, draft = SHAPES[shape]
    assert_exact(constant_pair(target, truncated(draft, size)), 3, lambda _: 2)


def small_distributions() -> list[tuple[Fraction, ...]]:
    """Return every distribution over three tokens in quarters."""
    return [dense(a, b, 4 - a - b) for a in range(5) for b in range(5 - a)]


@pytest.mark.parametrize("target", small_distributions(), ids=str)
def test_every_distribution_in_quarters(target: tuple[Fraction, ...]) -> None:
    """All 225 pairs, the draft's support whole and cut to two tokens and to one."""
    for draft in small_distributions():
        for size in (None, 2, 1):
            assert_exact(constant_pair(target, truncated(draft, size)), 2, lambda _: 1)


MARKOV_TARGETS = [dense(3, 1, 2), dense(0, 1, 1), dense(1, 5, 1)]
MARKOV_DRAFTS = [dense(1, 2, 3), dense(1, 2, 2), dense(4, 1, 0)]


@pytest.mark.parametrize("size", [None, 2, 1])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
def test_texts_of_several_rounds(num_draft_tokens: int, size: int | None) -> None:
    """Rounds of any length: the joint distribution of four tokens of a Markov chain."""
    pair = markov_pair(MARKOV_TARGETS, [truncated(draft, size) for draft in MARKOV_DRAFTS])
    assert_exact(pair, 4, lambda _: num_draft_tokens)


def test_draft_length_may_follow_the_text() -> None:
    """K is chosen for each round, by what came before."""
    pair = markov_pair(MARKOV_TARGETS, [truncated(draft) for draft in MARKOV_DRAFTS])
    assert_exact(pair, 4, lambda history: (history[-1] + len(history)) % 4)


@st.composite
def pairs(draw_from: st.DrawFn) -> Pair:
    """Draw a Markov pair over two to four tokens with rational distributions and supports of any size."""
    size = draw_from(st.integers(2, 4))
    weights = st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any)
    targets = [dense(*draw_from(weights)) for _ in range(size)]
    drafts = [truncated(draw_from(weights), draw_from(st.integers(1, size))) for _ in range(size)]
    return markov_pair(targets, drafts)


@settings(max_examples=60 * SWEEP, deadline=None, derandomize=True, database=None)
@given(pairs(), st.integers(0, 2))
def test_any_rational_distributions(pair: Pair, num_draft_tokens: int) -> None:
    """For random rational distributions."""
    assert_exact(pair, 3, lambda _: num_draft_tokens)


def test_target_remains_where_rounding_left_no_residual() -> None:
    """A rejection where p nowhere exceeds q and no tail is left cannot be in exact arithmetic; it draws from p."""
    draft = SparseDistribution((0, 1), (0.5 + 2**-30, 0.5 + 2**-30))
    scores = Scores((TargetDistribution((0.5, 0.5), 0.0, 7), TargetDistribution((), 1.0, 8)))
    for rule in (TokenRule(), BlockRule()):
        verdicts = [
            rule.accept(Proposal((0,), (draft,)), scores, Uniforms((1 - 2**-53,), close)) for close in (0.0, 0.4, 0.6)
        ]
        assert [verdict.next_token for verdict in verdicts] == [0, 0, 1]


# ---- the enumeration itself


def test_probabilities_of_outcomes_sum_to_one() -> None:
    """Of the production rules on every pair above."""
    for rule in (TokenRule(), BlockRule()):
        assert sum(outcome.probability for outcome in Enumeration(SPARSE, rule).outcomes((0,), 2)) == 1


def test_only_uniforms_that_are_read_are_branched_on() -> None:
    """After the first rejection nothing is tested: far fewer outcomes than combinations of uniforms."""
    proposals = 4**3
    assert len(list(Enumeration(WHOLE).outcomes((0,), 3))) < 4 * proposals


@dataclass(frozen=True)
class WrongThresholds(TokenRule):
    """The token rule, with thresholds that are a little off."""

    factor: Fraction = Fraction(99, 100)

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return thresholds that are too low."""
        right = TokenRule.thresholds(self, proposal, scores)
        return Thresholds([value * float(self.factor) for value in map(float, right.accept)], right.close)


def test_wrong_thresholds_are_detected() -> None:
    """Decisions must be constant between the thresholds, at the ends too."""
    with pytest.raises(AssertionError, match="between the thresholds"):
        list(Enumeration(WHOLE, WrongThresholds()).outcomes((0,), 1))


def test_inclusive_acceptance_is_detected() -> None:
    """A test u q <= p differs at a single uniform only: the beginning of an interval."""
    with pytest.raises(AssertionError, match="between the thresholds"):
        list(AcceptsInclusively(WHOLE).outcomes((0,), 1))


def test_total_variation_is_half_the_differences() -> None:
    """Of distributions that do not share all texts."""
    one: Distribution = {(0,): Fraction(1, 2), (1,): Fraction(1, 2)}
    other: Distribution = {(0,): Fraction(3, 4), (2,): Fraction(1, 4)}
    assert total_variation(one, other) == Fraction(1, 2)
