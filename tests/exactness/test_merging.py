"""Proposals of several drafters merged into one tree have the target's distribution: enumerated in fractions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import merging
from coordinator.joint_names import joint_names, parts_of
from coordinator.merging import merged, shares
from specdec.exact.acceptance import AcceptanceRule, BlockRule, TokenRule
from specdec.exact.tree import is_tree
from specdec.exact.values import Proposal, SparseDistribution
from tests.support.counts import SWEEP
from tests.support.enumeration import (
    ONE,
    ZERO,
    Draws,
    Enumeration,
    History,
    Pair,
    expected_accepted,
    one_hot,
    prob_of,
    target_text_distribution,
    total_variation,
)
from tests.support.pairs import DISTRIBUTIONS, markov_pairs, rotating_pair, sparse_markov_pair
from tests.support.trees import (
    WAYS,
    Candidate,
    GrowingTree,
    Shape,
    TreeEnumeration,
    chain_shape,
    full_shape,
    other_draft,
)

RULES = [TokenRule(), BlockRule()]
LOOKUPS: dict[str, Shape] = {
    "a chain": chain_shape(2),
    "two siblings": full_shape(2, 1),
    "two siblings, each with a child": (chain_shape(1), chain_shape(1)),
    "all tokens": full_shape(3, 1),
}
Merge = Callable[[Sequence[Proposal]], Proposal]


@dataclass(frozen=True)
class Merging(Enumeration):
    """A chain that is drawn, merged with a tree of the most probable tokens of another draft."""

    lookup: Shape = field(default_factory=lambda: chain_shape(2))
    merge: Merge = merged
    is_lookup_first: bool = False

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Merge both."""
        drawn = Enumeration.propose(self, history, num_draft_tokens, draws)
        other = Pair(self.pair.target, lambda text: other_draft(self.pair.draft(text)))
        chosen = TreeEnumeration(other, shape=self.lookup, siblings=WAYS["most probable"])
        proposals = [drawn, chosen.propose(history, 0, draws)]
        return self.merge(proposals[::-1] if self.is_lookup_first else proposals)


def assert_exact(enumeration: Enumeration, num_draft_tokens: int, start: int = 0) -> None:
    """Assert that a round, continued by the target, has the target's joint distribution: equality of fractions."""
    assert bias(enumeration, num_draft_tokens, start) == 0


def bias(enumeration: Enumeration, num_draft_tokens: int, start: int = 0) -> Fraction:
    """Return the total variation of a round's text, continued by the target, from the target's own."""
    outcomes = enumeration.outcomes((start,), num_draft_tokens)
    distribution = enumeration.continued_distribution((start,), outcomes, 4)
    return total_variation(distribution, target_text_distribution(enumeration.pair, (start,), 4))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("distributions", DISTRIBUTIONS)
def test_merged_proposals_have_the_targets_distribution(distributions: str, lookup: str, rule: AcceptanceRule) -> None:
    """One to two drawn tokens, in either order of the drafters."""
    target, draft, size = DISTRIBUTIONS[distributions]
    for num_draft_tokens, is_first in ((1, False), (2, True)):
        pair = rotating_pair(target, draft, size)
        assert_exact(Merging(pair, rule, LOOKUPS[lookup], is_lookup_first=is_first), num_draft_tokens)


@settings(max_examples=20 * SWEEP, deadline=None, derandomize=True, database=None)
@given(markov_pairs(), st.sampled_from(sorted(LOOKUPS)), st.sampled_from(RULES))
def test_any_rational_distributions_merged(pair: Pair, lookup: str, rule: AcceptanceRule) -> None:
    """For random rational distributions."""
    assert_exact(Merging(pair, rule, LOOKUPS[lookup]), 2)


def test_merged_proposals_accept_more() -> None:
    """Than each of them alone."""
    pair = sparse_markov_pair(2)
    both = expected_accepted(Merging(pair).outcomes((0,), 2))
    assert both > expected_accepted(Enumeration(pair).outcomes((0,), 2))
    assert both > expected_accepted(Merging(pair).outcomes((0,), 0))


# ---- what would be biased


def absorbing_drawn_tokens(proposals: Sequence[Proposal]) -> Proposal:
    """Put the chosen tokens first, and leave out a drawn one that is among them."""
    drawn, chosen = proposals
    return merging._joined(chosen, drawn)


def cut_where_unlikely(proposals: Sequence[Proposal]) -> Proposal:
    """Keep the merged tree within a budget by leaving out what came out unlikely."""
    drawn, chosen = proposals
    is_unlikely = [
        prob_of(each, token) < Fraction(1, 2) for token, each in zip(drawn.tokens, drawn.distributions, strict=True)
    ]
    size = (*is_unlikely, True).index(True)
    return merged([Proposal(drawn.tokens[:size], drawn.distributions[:size]), chosen])


@pytest.mark.parametrize("merge", [absorbing_drawn_tokens, cut_where_unlikely])
def test_merging_by_what_was_drawn_is_biased(merge: Merge) -> None:
    enumeration = Merging(sparse_markov_pair(3), merge=merge, lookup=LOOKUPS["a chain"])
    found = max(bias(enumeration, 2, start) for start in range(3))
    print(f"{merge.__name__}: total variation {float(found):.4f}")
    assert found > Fraction(1, 100)


@dataclass(frozen=True)
class TwoDrawing(Enumeration):
    """Two drafters that draw one token each, as siblings; with one key for both, or with keys of their own."""

    shares_key: bool = False

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Draw both."""
        one = self.pair.draft(history)
        other = other_draft(one)
        tokens = draws.choose(coupled(one, other)) if self.shares_key else (draws.token(one), draws.token(other))
        tree = GrowingTree()
        for token, distribution in zip(tokens, (one, other), strict=True):
            tree.add(Candidate(token, distribution), 0)
        return tree.proposal()


def coupled(one: SparseDistribution, other: SparseDistribution) -> list[tuple[tuple[int, int], Fraction]]:
    """Return the pairs of tokens that one uniform draws from two distributions, with their probabilities."""
    ends = sorted({ZERO, ONE, *cumulative(one), *cumulative(other)})
    return [((drawn_at(one, low), drawn_at(other, low)), high - low) for low, high in pairwise(ends)]


def cumulative(distribution: SparseDistribution) -> list[Fraction]:
    probs = [Fraction(prob) for prob in distribution.probs]
    return [sum(probs[: size + 1], ZERO) for size in range(len(probs))]


def drawn_at(distribution: SparseDistribution, uniform: Fraction) -> int:
    return next(
        token for token, end in zip(distribution.token_ids, cumulative(distribution), strict=True) if end > uniform
    )


def test_two_drafters_that_share_keys_are_biased() -> None:
    """Independent draws of two drafters are exact; the same uniform for both is not."""
    assert_exact(TwoDrawing(sparse_markov_pair(3)), 1)
    found = bias(TwoDrawing(sparse_markov_pair(3), shares_key=True), 1)
    print(f"one key for two drafters: total variation {float(found):.4f}")
    assert found > Fraction(1, 100)


@dataclass(frozen=True)
class TwoDrawingMerged(TwoDrawing):
    """The same two drafters, merged by the production code."""

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Merge two chains of one token."""
        both = TwoDrawing.propose(self, history, num_draft_tokens, draws)
        return merged(
            [Proposal(both.tokens[place : place + 1], both.distributions[place : place + 1]) for place in (0, 1)]
        )


@pytest.mark.parametrize("distributions", DISTRIBUTIONS)
def test_a_second_drawn_proposal_is_left_out(distributions: str) -> None:
    """So that a shared key does no harm."""
    target, draft, size = DISTRIBUTIONS[distributions]
    assert_exact(TwoDrawingMerged(rotating_pair(target, draft, size), shares_key=True), 1)


# ---- the tree


def chosen(*tokens: int, parents: tuple[int, ...] = ()) -> Proposal:
    return Proposal(tokens, tuple(map(one_hot, tokens)), parents)


def test_common_prefixes_are_joined() -> None:
    joint = merged([chosen(1, 2, 3), chosen(1, 2, 4), chosen(5, 1, parents=(0, 0))])
    assert (joint.tokens, joint.parents) == ((1, 2, 3, 4, 5), (0, 1, 2, 2, 0))


def test_drawn_tokens_come_first() -> None:
    """A chosen token that was drawn is left out, and what follows it continues the drawn one."""
    drawn = Proposal((2,), (SparseDistribution((2, 3), (0.5, 0.5)),))
    joint = merged([chosen(2, 7), chosen(3), drawn])
    assert (joint.tokens, joint.parents, joint.distributions[0]) == ((2, 7, 3), (0, 1, 0), drawn.distributions[0])


def test_empty_proposals_add_nothing() -> None:
    assert merged([Proposal(), chosen(1), Proposal()]).tokens == (1,)
    assert merged([Proposal(), Proposal()]) == Proposal()


proposals = st.lists(st.integers(0, 3), max_size=6).flatmap(
    lambda tokens: st.tuples(*(st.integers(0, index) for index in range(len(tokens)))).map(
        lambda parents: chosen(*tokens, parents=tuple(parents))
    )
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(proposals, min_size=1, max_size=3))
def test_merged_trees_hold_each_prefix_once(parts: list[Proposal]) -> None:
    """Whatever the trees: every path of each is a path of the joint one, which is no larger than all together."""
    joint = merged(parts)
    assert is_tree(joint.tree)
    assert len(joint) <= sum(map(len, parts))
    assert paths(joint) == set().union(*map(paths, parts))


def paths(proposal: Proposal) -> set[History]:
    """Return the texts that lead to each position."""
    texts: list[History] = [()]
    for token, parent in zip(proposal.tokens, proposal.tree, strict=True):
        texts.append((*texts[parent], token))
    return set(texts)


@pytest.mark.parametrize(
    ("total", "parts", "expected"), [(8, 2, [4, 4]), (7, 2, [4, 3]), (1, 2, [1, 0]), (7, 3, [3, 2, 2])]
)
def test_budgets_are_cut_before_asking(total: int, parts: int, expected: list[int]) -> None:
    assert shares(total, parts) == expected


def test_names_of_joint_drafters() -> None:
    assert joint_names({"model": True, "eagle3": True, "recycle": False, "ngram": False}) == [
        "model+recycle",
        "eagle3+recycle",
    ]
    assert joint_names({"recycle": False, "ngram": False}) == joint_names({"model": True}) == []
    assert parts_of("model+recycle+model") == ["model", "recycle"]
