"""Trees of draft tokens, as pure functions of their `parents`.

A tree of N tokens has N + 1 positions: position 0 is after the last committed token, position i + 1 is after token i
and its ancestors. `parents[i]` is the position that token i continues, at most i: a parent comes before its children.
Siblings are in the order in which they were drawn. A chain is the tree in which `parents[i]` is i.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray


def chain_parents(num_tokens: int) -> tuple[int, ...]:
    """Return the parents of a chain."""
    return tuple(range(num_tokens))


def is_tree(parents: Sequence[int]) -> bool:
    """Return whether each token continues a position that comes before it."""
    return all(0 <= parent <= index for index, parent in enumerate(parents))


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """Return the tokens that continue each position, in the order drawn: [N + 1] lists of indices into the tokens."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for token, parent in enumerate(parents):
        children[parent].append(token)
    return children


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return each token's depth [N], 1 for the children of the root."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def path_to(position: int, parents: Sequence[int]) -> list[int]:
    """Return the tokens from the root to a position, as indices."""
    path = []
    while position:
        path.append(position - 1)
        position = parents[position - 1]
    return path[::-1]


def chain_length(parents: Sequence[int]) -> int:
    """Return how many tokens at the beginning form a chain."""
    return next((token for token, parent in enumerate(parents) if parent != token), len(parents))


def ancestor_matrix(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Return [N, N], true where the column's token is the row's token or one of its ancestors."""
    matrix = np.eye(len(parents), dtype=np.bool_)
    for token, parent in enumerate(parents):
        if parent:
            matrix[token] |= matrix[parent - 1]
    return matrix


def longest_path(parents: Sequence[int], tree_tokens: Sequence[int], position: int, tokens: Sequence[int]) -> list[int]:
    """Return the longest path down from `position` that spells a prefix of `tokens`, as indices.

    Siblings may hold the same token: the longest path is found whichever of them it passes.
    """
    matched = {position: 0}  # tokens spelled on the way to each position that was reached
    deepest = position
    for after, (parent, token) in enumerate(zip(parents, tree_tokens, strict=True), start=1):
        depth = matched.get(parent)
        if depth is not None and depth < len(tokens) and tokens[depth] == token:
            matched[after] = depth + 1
            deepest = after if depth + 1 > matched[deepest] else deepest
    path = []
    while deepest != position:
        path.append(deepest - 1)
        deepest = parents[deepest - 1]
    return path[::-1]


def union(supports: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the token ids of all supports, each once, in the order of their first appearance."""
    first, *others = [*supports] or [()]
    if not others:
        return tuple(first)  # a support has each id once
    return tuple(dict.fromkeys(chain(first, *others)))
