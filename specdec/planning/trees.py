"""Chains and trees of draft tokens, and how many tokens a round of them commits.

A node's gain is the probability that it is on the accepted path: the product of the acceptance of its ranks along the
path. A round commits the closing token and the accepted path, so on average 1 + the sum of all gains: for a chain of K
with acceptance a, (1 - a^(K+1)) / (1 - a) (Leviathan et al. 2023, equation 1).

The optimal tree of N nodes (Chen et al. 2024, "Sequoia", section 3.1: they find it by dynamic programming) has the N
nodes of the largest gain: as ranks are tried in falling order, no node gains more than its parent or its elder sibling,
so the N largest are a tree.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.planning.acceptance import Acceptance


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """A draft token. Nodes are ordered by falling gain."""

    loss: float  # minus the gain
    path: tuple[int, ...]  # the ranks from the first draft token to this one

    @property
    def gain(self) -> float:
        """The probability that it is accepted."""
        return -self.loss

    @property
    def depth(self) -> int:
        """The number of draft tokens up to it."""
        return len(self.path)


Tree = Sequence[Node]


def chain(acceptance: Acceptance, num_tokens: int) -> Tree:
    """Return a chain: at each depth the first rank."""
    return best_tree(Acceptance(tuple(ranks[:1] for ranks in acceptance.by_depth)), num_tokens, num_tokens)


def best_tree(acceptance: Acceptance, num_nodes: int, max_depth: int) -> Tree:
    """Return the optimal tree of at most so many nodes, best first, so that each beginning is optimal as well."""
    tree: list[Node] = []
    open_nodes = _next(acceptance, (), 1.0, max_depth)
    while open_nodes and len(tree) < num_nodes:
        node = heapq.heappop(open_nodes)
        tree.append(node)
        for child in _next(acceptance, node.path, node.gain, max_depth):
            heapq.heappush(open_nodes, child)
    return tree


def _next(acceptance: Acceptance, path: tuple[int, ...], gain: float, max_depth: int) -> list[Node]:
    """Return what may follow a node, best first."""
    if len(path) >= max_depth:
        return []
    ranks = acceptance.ranks(len(path) + 1)
    return [Node(-gain * probability, (*path, rank)) for rank, probability in enumerate(ranks)]


def tokens_per_round(tree: Tree) -> float:
    """Return the expected number of committed tokens, the closing token included."""
    return 1.0 + sum(node.gain for node in tree)


def depth_of(tree: Tree) -> int:
    """Return the length of the longest path."""
    return max((node.depth for node in tree), default=0)


def widths(tree: Tree) -> list[int]:
    """Return the number of nodes at each depth."""
    return [sum(node.depth == depth for node in tree) for depth in range(1, depth_of(tree) + 1)]
