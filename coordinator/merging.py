"""Merges the proposals of several drafters into one tree, which the target scores in one forward.

Miao et al. 2024, "SpecInfer", section 3: proposals are joined by their common prefixes. Here at most one of them is
drawn. Its tokens come first, each with its own distribution; all others were chosen without a draw, and such a token is
left out where its position has it already, as after a rejection nothing of it remains. What is offered after a prefix
is then one token drawn from the shipped distribution, and tokens that depend on that prefix alone: each is tested
against what the rejections before it left, which is exact (tests/exactness/test_merging.py).

Two drawn proposals would be exact too if their draws were independent. But all drafters of a session draw with the
session's keys, and equal keys make equal draws. So a second drawn one is left out: whether it is one does not depend
on what it drew, as its first distribution with several tokens decides.
"""

from collections.abc import Sequence

from specdec.exact.values import Proposal


def merged(proposals: Sequence[Proposal]) -> Proposal:
    """Return one tree of the first drawn proposal and of all that were chosen without a draw, in this order."""
    drawn = [proposal for proposal in proposals if not proposal.is_chosen][:1]
    chosen = [proposal for proposal in proposals if proposal.is_chosen]
    first, *others = [*drawn, *chosen]
    for other in others:
        first = _joined(first, other)
    return first


def _joined(first: Proposal, other: Proposal) -> Proposal:
    """Return a tree with another one's chosen tokens, where it does not have them."""
    tokens, distributions, parents = list(first.tokens), list(first.distributions), list(first.tree)
    known = dict[tuple[int, int], int]()  # by parent and token: the position after it
    for index, place in enumerate(zip(parents, tokens, strict=True)):
        known.setdefault(place, index + 1)
    positions = [0]  # of the other tree's positions, in the joint one
    for token, distribution, parent in zip(other.tokens, other.distributions, other.tree, strict=True):
        place = positions[parent], token
        if place not in known:
            tokens.append(token)
            distributions.append(distribution)
            parents.append(place[0])
            known[place] = len(tokens)
        positions.append(known[place])
    return Proposal(tuple(tokens), tuple(distributions), tuple(parents))


def shares(num_draft_tokens: int, num_drafters: int) -> list[int]:
    """Return how many tokens each drafter may propose: fixed before any of them draws."""
    return [(num_draft_tokens + index) // num_drafters for index in reversed(range(num_drafters))]
