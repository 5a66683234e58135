"""Trees of chosen candidates: one-hot, each sibling once, the most likely first, nothing but the best K."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.context_index import ContextIndex
from draft_service.found import found_before
from specdec.drafting.candidate_tree import (
    MIN_CHANCE,
    RANK_CHANCES,
    TOKENS_PER_MATCHING,
    UNSEEN,
    Continuation,
    candidates,
    grow,
    no_successors,
)
from specdec.exact.tree import children_of, depths_of, is_tree, path_to
from specdec.exact.values import Proposal, one_hot

continuations = st.lists(
    st.builds(Continuation, st.lists(st.integers(0, 4), max_size=8), st.integers(1, 32)), max_size=8
)
tables = st.dictionaries(
    st.integers(0, 4), st.lists(st.integers(0, 4), unique=True, max_size=5), min_size=5, max_size=5
)


def chances_of(proposal: Proposal, found: list[Continuation], last: int, table: dict[int, list[int]]) -> list[float]:
    """Return each token's chance by definition: the product of its shares of the votes on the way from the root."""
    chances = []
    for position in range(1, len(proposal) + 1):
        path = [proposal.tokens[index] for index in path_to(position, proposal.tree)]
        chances.append(prod(share(path[:depth], token, found, last, table) for depth, token in enumerate(path)))
    return chances


def share(path: list[int], token: int, found: list[Continuation], last: int, table: dict[int, list[int]]) -> float:
    """Return a token's share of the votes after a path."""
    depth = len(path)
    voting = [each for each in found if len(each.tokens) > depth and list(each.tokens[:depth]) == path]
    weights = [(each.num_matching + depth) ** 2 for each in voting]
    votes = sum(weight for each, weight in zip(voting, weights, strict=True) if each.tokens[depth] == token)
    ranked = table[[last, *path][-1]]
    return (votes + (UNSEEN * RANK_CHANCES[ranked.index(token)] if token in ranked else 0)) / (sum(weights) + UNSEEN)


@settings(deadline=None)
@given(continuations, st.integers(0, 4), tables, st.integers(1, 12))
def test_trees_hold_the_best_candidates(
    found: list[Continuation], last: int, table: dict[int, list[int]], count: int
) -> None:
    proposal = grow(found, last, table.__getitem__, count)
    assert len(proposal) <= count
    assert is_tree(proposal.tree)
    assert proposal.distributions == tuple(map(one_hot, proposal.tokens))
    for siblings in children_of(proposal.tree):
        assert len({proposal.tokens[child] for child in siblings}) == len(siblings), "duplicates are merged"
    chances = chances_of(proposal, found, last, table)
    assert all(one >= other - 1e-12 for one, other in pairwise(chances)), "best first"
    assert all(chance >= MIN_CHANCE - 1e-12 for chance in chances)
    larger = grow(found, last, table.__getitem__, count + 5)
    assert larger.tokens[:count] == proposal.tokens, "a smaller budget takes the beginning of the same tree"
    assert grow(found, last, table.__getitem__, count) == proposal


def chain_of(text: Sequence[int], count: int) -> Proposal:
    """Return the proposal after a text, without successors."""
    index = ContextIndex()
    for token in text:
        index.append(token)
    return grow(found_before(index, count), text[-1], no_successors, count)


def test_long_matches_give_long_drafts() -> None:
    """A match of m tokens reaches TOKENS_PER_MATCHING * m tokens far."""
    follows = list(range(100, 200))
    for num_matching in (1, 2, 3):
        matching = list(range(10, 10 + num_matching))
        proposal = chain_of([*matching, *follows, 7, *matching], 64)
        assert max(depths_of(proposal.tree), default=0) <= TOKENS_PER_MATCHING * num_matching
        assert list(proposal.tokens[:1]) == [100]
    long = list(range(10, 26))
    assert list(chain_of([*long, *follows, 7, *long], 20).tokens) == follows[:20]


def test_frequent_continuations_come_first() -> None:
    text = [11, 1, 2, 4, 12, 1, 2, 3, 13, 1, 2, 4, 14, 1, 2]
    proposal = chain_of(text, 2)
    assert (proposal.tokens[0], proposal.parents[0]) == (4, 0)
    assert [proposal.tokens[child] for child in children_of(chain_of(text, 16).tree)[0]] == [4, 3]


def test_successors_share_what_the_votes_leave() -> None:
    found = [Continuation([5], 1)]
    shares = {each.token: each.chance for each in candidates(found, 0, [6, 5])}
    assert shares == pytest.approx(
        {5: (1 + UNSEEN * RANK_CHANCES[1]) / (1 + UNSEEN), 6: UNSEEN * RANK_CHANCES[0] / (1 + UNSEEN)}
    )


def test_nothing_known_is_nothing_drafted() -> None:
    assert grow([], 3, no_successors, 8) == Proposal()
