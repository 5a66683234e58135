"""Trees of draft tokens for the enumeration: shapes, and ways to choose the children of a position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.exact.values import Proposal, SparseDistribution
from tests.support.enumeration import Draws, Enumeration, History, one_hot, prob_of, sparse, without

Shape = tuple["Shape", ...]  # the children of a position, each with the shape below it
LEAF: Shape = ()
VOCAB_SIZE = 3  # of the pairs that trees are drafted for


def chain_shape(depth: int) -> Shape:
    """Return the shape of a chain."""
    return (chain_shape(depth - 1),) if depth else LEAF


def full_shape(width: int, depth: int) -> Shape:
    """Return the shape in which every position has `width` children, down to a depth."""
    return (full_shape(width, depth - 1),) * width if depth else LEAF


def spine_shape(widths: Sequence[int], spine: int = 0) -> Shape:
    """Return the shape in which only child number `spine` of a position has children; `widths` are theirs by depth."""
    if not widths:
        return LEAF
    return tuple(spine_shape(widths[1:], spine) if child == spine else LEAF for child in range(widths[0]))


def depth_of(shape: Shape) -> int:
    """Return the maximum number of tokens that can be accepted."""
    return max((1 + depth_of(child) for child in shape), default=0)


# ---- how the children of a position are chosen


class Candidate(NamedTuple):
    """A draft token, and the distribution that is shipped with it."""

    token: int
    distribution: SparseDistribution


# takes a position's draft distribution and the earlier siblings; returns None where there is no further candidate
Siblings = Callable[[SparseDistribution, Sequence[Candidate], Draws], Candidate | None]


def independent(draft: SparseDistribution, elder: Sequence[Candidate], draws: Draws) -> Candidate | None:
    """Draw every sibling from the same distribution; two may be the same token."""
    return Candidate(draws.token(draft), draft)


def without_replacement(draft: SparseDistribution, elder: Sequence[Candidate], draws: Draws) -> Candidate | None:
    """Draw without the tokens of the earlier siblings, renormalised."""
    left = without(elder[-1].distribution, elder[-1].token) if elder else draft
    return Candidate(draws.token(left), left) if left else None


def most_probable(draft: SparseDistribution, elder: Sequence[Candidate], draws: Draws) -> Candidate | None:
    """Take the most probable tokens, without a draw."""
    rank = len(elder)
    ordered = sorted(draft.token_ids, key=lambda token: -prob_of(draft, token))
    return Candidate(ordered[rank], one_hot(ordered[rank])) if rank < len(ordered) else None


def drawn_then_certain(draft: SparseDistribution, elder: Sequence[Candidate], draws: Draws) -> Candidate | None:
    """Draw one; then take the most probable other token."""
    if not elder:
        return independent(draft, elder, draws)
    tried = {candidate.token for candidate in elder}
    others = sorted((token for token in draft.token_ids if token not in tried), key=lambda t: -prob_of(draft, t))
    return Candidate(others[0], one_hot(others[0])) if others else None


def certain_then_drawn(draft: SparseDistribution, elder: Sequence[Candidate], draws: Draws) -> Candidate | None:
    """Take the most probable token; then draw, perhaps the same again."""
    return (independent if elder else most_probable)(draft, elder, draws)


def from_two_drafters(draft: SparseDistribution, elder: Sequence[Candidate], draws: Draws) -> Candidate | None:
    """Draw from two distributions in turn, whose supports overlap in part."""
    return independent(other_draft(draft) if len(elder) % 2 else draft, elder, draws)


def other_draft(draft: SparseDistribution) -> SparseDistribution:
    """Return the distribution of a second drafter: the next token ids, the probabilities in reverse."""
    pairs = zip(draft.token_ids, reversed(draft.token_ids), strict=True)
    return sparse({(token + 1) % VOCAB_SIZE: prob_of(draft, other) for token, other in pairs})


def repeated(draft: SparseDistribution, elder: Sequence[Candidate], draws: Draws) -> Candidate | None:
    """Draw one; then offer the same token again, one-hot: it can no longer be accepted."""
    return Candidate(elder[0].token, one_hot(elder[0].token)) if elder else independent(draft, elder, draws)


def until_likely(draft: SparseDistribution, elder: Sequence[Candidate], draws: Draws) -> Candidate | None:
    """Draw until the most probable token is drawn."""
    likely = any(prob_of(draft, candidate.token) == max(draft.probs) for candidate in elder)
    return None if likely else without_replacement(draft, elder, draws)


WAYS: dict[str, Siblings] = {
    "independent": independent,
    "without replacement": without_replacement,
    "most probable": most_probable,
    "drawn, then certain": drawn_then_certain,
    "certain, then drawn": certain_then_drawn,
    "two drafters": from_two_drafters,
    "repeated": repeated,
    "until likely": until_likely,
}


# ---- the enumeration


@dataclass
class GrowingTree:
    """A proposal under construction."""

    tokens: list[int] = field(default_factory=list)
    distributions: list[SparseDistribution] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def add(self, candidate: Candidate, parent: int) -> int:
        """Add a token that continues a position; return the position after it."""
        self.tokens.append(candidate.token)
        self.distributions.append(candidate.distribution)
        self.parents.append(parent)
        return len(self.tokens)

    def proposal(self) -> Proposal:
        """Return the tree."""
        return Proposal(tuple(self.tokens), tuple(self.distributions), tuple(self.parents))


@dataclass(frozen=True)
class TreeEnumeration(Enumeration):
    """Rounds that propose a tree of a given shape; a position with too few candidates has fewer children."""

    shape: Shape = LEAF
    siblings: Siblings = independent

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Draft a tree: all children of a position, then the subtree of the first of them, and so on."""
        tree = GrowingTree()
        self.grow(tree, self.shape, history, 0, draws)
        return tree.proposal()

    def grow(self, tree: GrowingTree, shape: Shape, text: History, position: int, draws: Draws) -> None:
        """Add the subtree of a position."""
        candidates = self.kept(self.candidates(text, len(shape), draws))
        positions = [tree.add(candidate, position) for candidate in candidates]
        for candidate, below, after in zip(candidates, shape, positions, strict=False):
            self.grow(tree, below, (*text, candidate.token), after, draws)

    def candidates(self, text: History, count: int, draws: Draws) -> list[Candidate]:
        """Choose the children of a position."""
        candidates: list[Candidate] = []
        for _ in range(count):
            candidate = self.siblings(self.pair.draft(text), candidates, draws)
            if candidate is None:
                break
            candidates.append(candidate)
        return candidates

    def kept(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates that are proposed: all, in the order in which they were drawn."""
        return candidates
