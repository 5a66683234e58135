"""The acceptance rules' edges, on floats: what may never be accepted, chosen or returned."""

import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from specdec.exact.acceptance import RULES, AcceptanceRule, BlockRule, Remainder, TokenRule, choose, turns
from specdec.exact.tree import path_to
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms, one_hot
from specdec.types import TokenOrigin

LARGEST_UNIFORM = 1 - 2**-53
VOCAB_SIZE = 6
SMALLEST_FLOAT32 = 2.0**-149

Played = tuple[Proposal, Scores, Uniforms]

properties = settings(max_examples=150, deadline=None, derandomize=True, database=None)
both_rules = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: type(rule).__name__)
unit = st.sampled_from([0.0, LARGEST_UNIFORM, 2**-53, 0.5]) | st.integers(0, 2**53 - 1).map(
    lambda bits: bits * 2.0**-53
)


def float32_distribution(weights: list[float]) -> list[float]:
    """Return float32 probabilities, as they come over the wire."""
    probs: list[float] = (np.array(weights, np.float32) / np.float32(sum(weights))).tolist()
    return probs


# whole weights, and weights so unequal that probabilities are the smallest of float32
weight = st.integers(0, 9).map(float) | st.sampled_from([1e-30, 1e-7, 1e-45])
distributions = (
    st.lists(weight, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE).filter(lambda w: max(w) >= 1).map(float32_distribution)
)


@st.composite
def sparse_distributions(draw: st.DrawFn) -> SparseDistribution:
    """Draw a distribution on some of the tokens, each with a positive probability, as the codec demands."""
    ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, unique=True))
    weights = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 7.0, 1e-7, 1e-30]), min_size=len(ids), max_size=len(ids)))
    return SparseDistribution(tuple(ids), float32_distribution(weights))


def nudged(prob: float, direction: float) -> float:
    """Return the next float32 in a direction; 0 is none."""
    return float(np.nextafter(np.float32(prob), np.float32(direction))) if direction else prob


@st.composite
def near(draw: st.DrawFn, distribution: list[float]) -> SparseDistribution:
    """Draw a distribution that equals the target's up to rounding: tiny residuals."""
    probs = {token: prob for token, prob in enumerate(distribution) if prob}
    moved = [nudged(prob, draw(st.sampled_from([0.0, 1.0, -1.0]))) for prob in probs.values()]
    kept = {token: prob for token, prob in zip(probs, moved, strict=True) if prob > 0}
    return SparseDistribution(tuple(kept), tuple(kept.values()))


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw the parents of a tree of up to six tokens, chains with a higher probability."""
    size = draw(st.integers(0, 6))
    if draw(st.booleans()):
        return ()
    return tuple(draw(st.integers(0, index)) for index in range(size))


@st.composite
def rounds(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]] | None = None) -> Played:
    """Draw a round: distributions with zeros, near equals, supports of any size, any tree, any uniforms."""
    parents = draw(trees() if shapes is None else shapes)
    size = len(parents) or draw(st.integers(0, 4))
    tree = parents or tuple(range(size))
    targets = [draw(distributions) for _ in range(size + 1)]
    drafts = tuple(draw(sparse_distributions() | near(targets[parent])) for parent in tree)
    tokens = tuple(draw(st.sampled_from(draft.token_ids)) for draft in drafts)
    proposal = Proposal(tokens, drafts, parents)
    pairs = zip(targets, proposal.unions(), strict=True)
    scores = Scores(tuple(draw(target_answers(target, token_ids)) for target, token_ids in pairs))
    return proposal, scores, Uniforms([draw(unit) for _ in tokens], draw(unit))


@st.composite
def target_answers(draw: st.DrawFn, distribution: list[float], token_ids: tuple[int, ...]) -> TargetDistribution:
    """Draw the target's answer for a distribution: the tail token has probability wherever there is a tail."""
    outside = [token for token, prob in enumerate(distribution) if prob and token not in token_ids]
    tail_token = draw(st.sampled_from(outside)) if outside else 0
    tail_mass = math.fsum(distribution[token] for token in outside)
    return TargetDistribution([distribution[token] for token in token_ids], tail_mass, tail_token)


def target_prob(proposal: Proposal, scores: Scores, position: int, token: int) -> float:
    """Return the target's probability of a token; off the union only the tail token is known."""
    token_ids, answer = proposal.unions()[position], scores.positions[position]
    if token in token_ids:
        return answer.support_probs[token_ids.index(token)]
    return answer.tail_mass if token == answer.tail_token else 0.0


def positions_of(path: tuple[int, ...]) -> list[int]:
    """Return the positions at which the tokens of a round were decided, the closing one last."""
    return [0, *(index + 1 for index in path)]


@both_rules
@properties
@given(played=rounds())
def test_nothing_impossible_is_ever_returned(rule: AcceptanceRule, played: Played) -> None:
    """No accepted token and no closing token has target probability 0, whatever the uniforms."""
    proposal, scores, uniforms = played
    verdict = rule.accept(proposal, scores, uniforms)
    returned = [*(proposal.tokens[index] for index in verdict.path), verdict.next_token]
    positions = positions_of(verdict.path)
    assert all(target_prob(proposal, scores, at, token) > 0 for at, token in zip(positions, returned, strict=True))


@both_rules
@properties
@given(played=rounds())
def test_the_accepted_tokens_are_a_path(rule: AcceptanceRule, played: Played) -> None:
    """From the root, each the child of the one before; a bonus comes only where there are no children."""
    proposal, scores, uniforms = played
    verdict = rule.accept(proposal, scores, uniforms)
    last = positions_of(verdict.path)[-1]
    assert list(verdict.path) == path_to(last, proposal.tree)
    assert (verdict.next_origin is TokenOrigin.BONUS) == (not proposal.children()[last])
    if verdict.next_origin is TokenOrigin.BONUS:
        assert verdict.next_token == scores.positions[last].tail_token


@properties
@given(rounds())
def test_only_what_was_tested_matters(played: Played) -> None:
    """What is not on the path or tried on the way has no influence under the token rule."""
    proposal, scores, uniforms = played
    verdict = TokenRule().accept(proposal, scores, uniforms)
    visited = positions_of(verdict.path)
    tree = proposal.tree
    kept = [index for index in range(len(proposal)) if tree[index] in visited]
    new_position = {0: 0, **{index + 1: number + 1 for number, index in enumerate(kept)}}
    pruned = Proposal(
        tuple(proposal.tokens[index] for index in kept),
        tuple(proposal.distributions[index] for index in kept),
        tuple(new_position[tree[index]] for index in kept),
    )
    anything = TargetDistribution((), 1.0, 99)
    answers = [scores.positions[index + 1] if index + 1 in visited else anything for index in kept]
    again = TokenRule().accept(
        pruned,
        Scores((scores.positions[0], *answers)),
        Uniforms([uniforms.accept[index] for index in kept], uniforms.close),
    )
    assert [kept[index] for index in again.path] == list(verdict.path)
    assert (again.next_token, again.next_origin) == (verdict.next_token, verdict.next_origin)


@properties
@given(rounds(st.just(())))
def test_a_recovered_token_has_a_residual(played: Played) -> None:
    """Of a chain: where the residual has weight, p exceeds q at the recovered token."""
    proposal, scores, uniforms = played
    verdict = TokenRule().accept(proposal, scores, uniforms)
    last = positions_of(verdict.path)[-1]
    assume(verdict.next_origin is TokenOrigin.RECOVERED)
    draft, target = proposal.distributions[last], scores.positions[last]
    residual = [p - q for p, q in zip(target.support_probs, draft.probs, strict=True)]
    assume(max(*residual, target.tail_mass) > 0)
    if verdict.next_token in draft.token_ids:
        assert residual[draft.token_ids.index(verdict.next_token)] > 0
    else:
        assert target.tail_mass > 0


@both_rules
@properties
@given(
    tokens=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5),
    bonus=st.integers(0, 3),
    data=st.data(),
)
def test_greedy_accepts_exactly_what_is_equal(
    rule: AcceptanceRule, tokens: list[tuple[int, int]], bonus: int, data: st.DataObject
) -> None:
    """One-hot distributions: accepted up to the first difference, then the target's own token; uniforms do nothing."""
    proposal = Proposal(tuple(drafted for drafted, _ in tokens), tuple(one_hot(drafted) for drafted, _ in tokens))
    answers = [TargetDistribution((float(d == w),), float(d != w), w) for d, w in tokens]
    uniforms = Uniforms([data.draw(unit) for _ in tokens], data.draw(unit))
    verdict = rule.accept(proposal, Scores((*answers, TargetDistribution((), 1.0, bonus))), uniforms)
    same = next((index for index, (d, w) in enumerate(tokens) if d != w), len(tokens))
    assert (verdict.num_accepted, verdict.next_token) == (same, [*(w for _, w in tokens), bonus][same])


@both_rules
@properties
@given(order=st.permutations(range(4)), wanted=st.integers(0, 5), data=st.data())
def test_greedy_finds_the_sibling(rule: AcceptanceRule, order: list[int], wanted: int, data: st.DataObject) -> None:
    """A one-hot target accepts the sibling with its token, at any index, or closes with its token."""
    proposal = Proposal(tuple(order), tuple(map(one_hot, order)), (0, 0, 0, 0))
    root = TargetDistribution([float(token == wanted) for token in order], float(wanted not in order), wanted)
    scores = Scores((root, *(TargetDistribution((), 1.0, 10 + token) for token in order)))
    verdict = rule.accept(proposal, scores, Uniforms([data.draw(unit) for _ in order], data.draw(unit)))
    is_proposed = wanted in order
    assert [proposal.tokens[index] for index in verdict.path] == [wanted] * is_proposed
    assert verdict.next_token == (10 + wanted if is_proposed else wanted)


# ---- remainders


@properties
@given(distributions, st.lists(sparse_distributions(), min_size=1, max_size=12), st.data())
def test_remainders_stay_distributions(
    distribution: list[float], drafts: list[SparseDistribution], data: st.DataObject
) -> None:
    """After any number of rejections: no negative weight, a positive total, 0 where the target has 0."""
    token_ids = tuple(dict.fromkeys(token for draft in drafts for token in draft.token_ids))
    remainder = Remainder.at(token_ids, data.draw(target_answers(distribution, token_ids)))
    for draft in drafts:
        remainder = remainder.after_rejecting(draft)
        assert all(weight >= 0 for weight in remainder.weights)
        assert remainder.total > 0
        assert remainder.total == pytest.approx(sum(remainder.weights) + remainder.tail_mass, abs=1e-6)
        possible = {token for token, prob in enumerate(distribution) if prob}
        assert {t for t, weight in zip(token_ids, remainder.weights, strict=True) if weight} <= possible
        assert remainder.draw(data.draw(unit)) in possible


def test_a_residual_of_almost_nothing_is_kept() -> None:
    """The smallest float32 decides where nothing else is left."""
    draft = SparseDistribution((0, 1), (0.5, 0.5))
    remainder = Remainder.at((0, 1), TargetDistribution((0.5, 0.5), SMALLEST_FLOAT32, 7))
    for _ in range(32):
        remainder = remainder.after_rejecting(draft)
    assert {remainder.draw(uniform) for uniform in (0.0, 0.5, LARGEST_UNIFORM)} == {7}


@properties
@given(st.permutations(range(4)), unit)
def test_the_order_of_the_union_changes_no_acceptance(order: list[int], uniform: float) -> None:
    """Which siblings are accepted, and with what probability, is independent of the order of token ids."""
    probs, draft = {0: 0.125, 1: 0.25, 2: 0.5, 3: 0.125}, SparseDistribution((2, 0), (0.75, 0.25))
    plain = Remainder.at((0, 1, 2, 3), TargetDistribution(tuple(probs.values()), 0.0, 9))
    moved = Remainder.at(tuple(order), TargetDistribution([probs[token] for token in order], 0.0, 9))
    for token in draft.token_ids:
        assert plain.accepts(token, draft, uniform) == moved.accepts(token, draft, uniform)
    after, moved_after = plain.after_rejecting(draft), moved.after_rejecting(draft)
    assert dict(zip(order, moved_after.weights, strict=True)) == dict(zip(range(4), after.weights, strict=True))


@both_rules
@properties
@given(played=rounds())
def test_thresholds_have_one_entry_a_token(rule: AcceptanceRule, played: Played) -> None:
    """Accepting ones are not negative; closing ones ascend to 1, and there are none where nothing is recovered."""
    proposal, scores, _ = played
    thresholds = rule.thresholds(proposal, scores)
    assert len(thresholds.accept) == len(proposal)
    assert all(value >= 0 for value in thresholds.accept)
    for changes, children in zip(thresholds.close, proposal.children(), strict=True):
        assert list(changes) == sorted(changes)
        assert bool(changes) == bool(children)


# ---- strictness


def remainder_of(*probs: float) -> Remainder:
    """Return the target's distribution on tokens 3 and 4."""
    return Remainder.at((3, 4), TargetDistribution(probs, 0.0, 0))


def test_acceptance_is_strict() -> None:
    """The uniform 0 accepts nothing that the target rules out; u q = p rejects."""
    draft = SparseDistribution((3, 4), (0.5, 0.5))
    assert not remainder_of(0.0, 1.0).accepts(3, draft, 0.0)
    assert not remainder_of(0.25, 0.75).accepts(3, draft, 0.5)
    assert remainder_of(0.25, 0.75).accepts(3, draft, 0.5 - 2**-54)
    assert remainder_of(0.25, 0.75).accepts(4, draft, LARGEST_UNIFORM)


def test_the_block_rule_is_strict() -> None:
    """A prefix of weight 0 is not accepted at the uniform 0; one of weight 1 is, at the largest uniform."""
    proposal = Proposal((3, 4), (SparseDistribution((3, 4), (0.5, 0.5)),) * 2)
    bonus = TargetDistribution((), 1.0, 9)
    impossible = Scores((TargetDistribution((0.0, 1.0), 0.0, 0), TargetDistribution((0.0, 1.0), 0.0, 0), bonus))
    assert BlockRule().accept(proposal, impossible, Uniforms((0.0, 0.0), 0.0)).path == ()
    certain = Scores((TargetDistribution((1.0, 0.0), 0.0, 0), TargetDistribution((0.0, 1.0), 0.0, 0), bonus))
    assert BlockRule().accept(proposal, certain, Uniforms((LARGEST_UNIFORM,) * 2, 0.0)).path == (0, 1)


def test_a_token_with_draft_probability_0_is_rejected() -> None:
    """It cannot have been drawn."""
    draft = SparseDistribution((3, 4), (0.0, 1.0))
    assert not remainder_of(0.5, 0.5).accepts(3, draft, 0.0)
    proposal, bonus = Proposal((3,), (draft,)), TargetDistribution((), 1.0, 9)
    for rule in (TokenRule(), BlockRule()):
        verdict = rule.accept(proposal, Scores((TargetDistribution((0.5, 0.5), 0.0, 0), bonus)), Uniforms((0.0,), 0.0))
        assert verdict.path == ()


def test_a_token_off_its_support_is_refused() -> None:
    """It cannot have been drawn from that distribution."""
    with pytest.raises(ValueError, match="not in"):
        remainder_of(0.5, 0.5).accepts(9, SparseDistribution((3, 4), (0.5, 0.5)), 0.0)


def test_the_tail_is_one_of_the_weights() -> None:
    """The residual on the support first, in the support's order, then the tail."""
    remainder = Remainder.at((3, 4), TargetDistribution((0.25, 0.5), 0.25, 7))
    left = remainder.after_rejecting(SparseDistribution((3, 4), (0.75, 0.25)))
    assert [left.draw(uniform) for uniform in (0.0, 0.5 - 2**-53, 0.5, LARGEST_UNIFORM)] == [4, 4, 7, 7]


# ---- choosing


@pytest.mark.parametrize("uniform", [0.0, LARGEST_UNIFORM])
@pytest.mark.parametrize(
    "weights", [[0, 1, 0], [0, 0, 3, 1, 0, 0], [0.1, 0.2, 0.7, 0.0], [1e-300, 0], [0, 1e300, 1e-300], [5e-324, 0]]
)
def test_choose_never_takes_what_has_no_weight(weights: list[float], uniform: float) -> None:
    """Also at the ends of the interval, with zeros at either end of the weights."""
    assert weights[choose(weights, uniform)] > 0


def test_choose_changes_where_the_sum_is_reached() -> None:
    """A uniform equal to a cumulative sum belongs to the next token: intervals are half open."""
    weights = [1, 0, 2, 1]
    assert [choose(weights, uniform) for uniform in (0.0, 0.25 - 2**-54, 0.25, 0.75 - 2**-53, 0.75)] == [0, 0, 2, 2, 3]
    assert choose(weights, LARGEST_UNIFORM) == 3
    assert turns(weights) == [0.25, 0.25, 0.75, 1.0]


@properties
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40).filter(any), unit)
@example([1.0, 2.0**-53], LARGEST_UNIFORM)
def test_choose_survives_rounding(weights: list[float], uniform: float) -> None:
    """Sums that round never lead past the last weight or onto a zero."""
    assert weights[choose(weights, uniform)] > 0
