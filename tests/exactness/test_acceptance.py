"""The acceptance rule's edges, on floats: what may never be accepted, chosen or returned."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator.acceptance import accept, accepts, choose, recover
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms
from specdec.types import TokenOrigin

LARGEST_UNIFORM = 1 - 2**-53
VOCAB_SIZE = 6

properties = settings(max_examples=100, deadline=None, derandomize=True, database=None)
unit = st.sampled_from([0.0, LARGEST_UNIFORM, 2**-53, 0.5]) | st.integers(0, 2**53 - 1).map(
    lambda bits: bits * 2.0**-53
)


def float32_distribution(weights: list[int]) -> list[float]:
    """Return float32 probabilities, as they come over the wire."""
    return (np.array(weights, np.float32) / np.float32(sum(weights))).tolist()


distributions = (
    st.lists(st.integers(0, 9), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE).filter(any).map(float32_distribution)
)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Proposal, Scores, Uniforms]:
    """Draw a round: distributions with zeros, supports of any size, tokens from the rows, any uniforms."""
    targets = [draw(distributions) for _ in range(draw(st.integers(1, 5)))]
    rows = tuple(draw(sparse_row()) for _ in targets[1:])
    supports = [row.token_ids for row in rows] + [()]
    tokens = tuple(draw(st.sampled_from(row.token_ids)) for row in rows)
    scored = tuple(
        draw(target_row(distribution, support)) for distribution, support in zip(targets, supports, strict=True)
    )
    return Proposal(tokens, rows), Scores(scored), Uniforms([draw(unit) for _ in rows], draw(unit))


@st.composite
def sparse_row(draw: st.DrawFn) -> SparseDistribution:
    """Draw a row on some of the tokens."""
    ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, unique=True))
    return SparseDistribution(
        tuple(ids), float32_distribution(draw(st.lists(st.integers(1, 9), min_size=len(ids), max_size=len(ids))))
    )


@st.composite
def target_row(draw: st.DrawFn, distribution: list[float], support: tuple[int, ...]) -> TargetDistribution:
    """Draw the target's answer for a distribution: the tail token has probability wherever there is a tail."""
    outside = [token for token, prob in enumerate(distribution) if prob and token not in support]
    tail_token = draw(st.sampled_from(outside)) if outside else 0
    return TargetDistribution(
        [distribution[token] for token in support], math.fsum(distribution[token] for token in outside), tail_token
    )


def target_prob(proposal: Proposal, scores: Scores, index: int, token: int) -> float:
    """Return what the scores say of a token; off the support only the tail token is known."""
    support, row = (*(row.token_ids for row in proposal.rows), ())[index], scores.rows[index]
    if token in support:
        return row.support_probs[support.index(token)]
    return row.tail_mass if token == row.tail_token else 0.0


@properties
@given(rounds())
def test_nothing_impossible_is_ever_returned(played: tuple[Proposal, Scores, Uniforms]) -> None:
    """No accepted token and no closing token has target probability 0, whatever the uniforms."""
    proposal, scores, uniforms = played
    verdict = accept(proposal, scores, uniforms)
    returned = [*proposal.tokens[: verdict.num_accepted], verdict.next_token]
    assert all(target_prob(proposal, scores, index, token) > 0 for index, token in enumerate(returned))


@properties
@given(rounds())
def test_a_round_yields_one_to_k_plus_one_tokens(played: tuple[Proposal, Scores, Uniforms]) -> None:
    """At most K are accepted; a bonus comes if and only if all were, and it is row K's tail token."""
    proposal, scores, uniforms = played
    verdict = accept(proposal, scores, uniforms)
    assert 0 <= verdict.num_accepted <= len(proposal)
    assert (verdict.next_origin is TokenOrigin.BONUS) == (verdict.num_accepted == len(proposal))
    if verdict.next_origin is TokenOrigin.BONUS:
        assert verdict.next_token == scores.rows[-1].tail_token


@properties
@given(rounds())
def test_only_what_was_tested_matters(played: tuple[Proposal, Scores, Uniforms]) -> None:
    """Behind the first rejection, no row, score or uniform has a say."""
    proposal, scores, uniforms = played
    verdict = accept(proposal, scores, uniforms)
    assume(verdict.next_origin is TokenOrigin.RECOVERED)
    end = verdict.num_accepted + 1
    shorter = Proposal(proposal.tokens[:end], proposal.rows[:end])
    rows = (*scores.rows[:end], TargetDistribution((), 1.0, 99))
    assert accept(shorter, Scores(rows), Uniforms(uniforms.accept[:end], uniforms.close)) == verdict


@properties
@given(rounds())
def test_a_recovered_token_is_owed(played: tuple[Proposal, Scores, Uniforms]) -> None:
    """Where the residual has weight, the recovered token's target probability exceeds its draft probability."""
    proposal, scores, uniforms = played
    verdict = accept(proposal, scores, uniforms)
    assume(verdict.next_origin is TokenOrigin.RECOVERED)
    row, target = proposal.rows[verdict.num_accepted], scores.rows[verdict.num_accepted]
    owed = [p - q for p, q in zip(target.support_probs, row.probs, strict=True)]
    assume(max(*owed, target.tail_mass) > 0)
    if verdict.next_token in row.token_ids:
        assert owed[row.token_ids.index(verdict.next_token)] > 0
    else:
        assert target.tail_mass > 0


@properties
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5), st.integers(0, 3), st.data())
def test_greedy_accepts_exactly_what_is_equal(tokens: list[tuple[int, int]], bonus: int, data: st.DataObject) -> None:
    """One-hot rows: accepted up to the first difference, then the target's own token; uniforms have no say."""
    drafted, wanted = [draft for draft, _ in tokens], [target for _, target in tokens]
    proposal = Proposal(tuple(drafted), tuple(SparseDistribution((token,), (1.0,)) for token in drafted))
    rows = [TargetDistribution((float(d == w),), float(d != w), w) for d, w in tokens] + [
        TargetDistribution((), 1.0, bonus)
    ]
    uniforms = Uniforms([data.draw(unit) for _ in tokens], data.draw(unit))
    verdict = accept(proposal, Scores(tuple(rows)), uniforms)
    same = next((index for index, (d, w) in enumerate(tokens) if d != w), len(tokens))
    assert (verdict.num_accepted, verdict.next_token) == (same, [*wanted, bonus][same])


@pytest.mark.parametrize("uniform", [0.0, LARGEST_UNIFORM])
@pytest.mark.parametrize(
    "weights", [[0, 1, 0], [0, 0, 3, 1, 0, 0], [0.1, 0.2, 0.7, 0.0], [1e-300, 0], [0, 1e300, 1e-300]]
)
def test_choose_never_takes_what_has_no_weight(weights: list[float], uniform: float) -> None:
    """Also at the ends of the interval, with zeros at either end of the weights."""
    assert weights[choose(weights, uniform)] > 0


def test_choose_turns_where_the_cumulative_sum_is_reached() -> None:
    """A uniform equal to a cumulative sum belongs to the next token: intervals are half open."""
    weights = [1, 0, 2, 1]
    assert [choose(weights, uniform) for uniform in (0.0, 0.25 - 2**-54, 0.25, 0.75 - 2**-53, 0.75)] == [0, 0, 2, 2, 3]
    assert choose(weights, LARGEST_UNIFORM) == 3


@properties
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40).filter(any), unit)
def test_choose_survives_rounding(weights: list[float], uniform: float) -> None:
    """Sums that round never lead past the last weight or onto a zero."""
    assert weights[choose(weights, uniform)] > 0


def test_acceptance_is_strict() -> None:
    """The uniform 0 accepts nothing that the target rules out; u q = p rejects."""
    row = SparseDistribution((3, 4), (0.5, 0.5))
    assert not accepts(3, row, TargetDistribution((0.0, 1.0), 0.0, 0), 0.0)
    assert not accepts(3, row, TargetDistribution((0.25, 0.75), 0.0, 0), 0.5)
    assert accepts(3, row, TargetDistribution((0.25, 0.75), 0.0, 0), 0.5 - 2**-54)
    assert accepts(4, row, TargetDistribution((0.25, 0.75), 0.0, 0), LARGEST_UNIFORM)


def test_a_token_off_its_rows_support_is_refused() -> None:
    """It cannot have been drawn from that row."""
    with pytest.raises(ValueError, match="not in"):
        accepts(9, SparseDistribution((3, 4), (0.5, 0.5)), TargetDistribution((0.5, 0.5), 0.0, 0), 0.0)


def test_the_tail_is_one_of_the_weights() -> None:
    """The residual on the support first, in the row's order, then the tail."""
    row, target = SparseDistribution((3, 4), (0.75, 0.25)), TargetDistribution((0.25, 0.5), 0.25, 7)
    assert [recover(row, target, uniform) for uniform in (0.0, 0.5 - 2**-53, 0.5, LARGEST_UNIFORM)] == [4, 4, 7, 7]
