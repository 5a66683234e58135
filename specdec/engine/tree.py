"""Trees of draft tokens, written as parents: 0 is the root, the token just before the tree; i + 1 is the i-th token.

A parent comes before its children, so a chain is 0, 1, 2 and so on.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.engine.errors import EngineError

Parents = Sequence[int]


def check_parents(parents: Parents) -> None:
    """Raise EngineError for a node whose parent does not come before it."""
    for node, parent in enumerate(parents):
        if not 0 <= parent <= node:
            raise EngineError(f"token {node} of a tree has parent {parent}; give 0 (the root) to {node}")


def chain_length(parents: Parents) -> int:
    """Return how many tokens at the beginning form a chain."""
    return next((node for node, parent in enumerate(parents) if parent != node), len(parents))


def depths(parents: Parents) -> list[int]:
    """Return each token's distance from the root, 1 for the root's children."""
    result = [0]
    for parent in parents:
        result.append(result[parent] + 1)
    return result[1:]


def path_to(parents: Parents, node: int) -> list[int]:
    """Return the tokens on the path from the root to token `node`, by index, `node` included."""
    path = [node]
    while parents[path[-1]]:
        path.append(parents[path[-1]] - 1)
    return path[::-1]


def ancestor_matrix(parents: Parents) -> NDArray[np.bool_]:
    """Return [tokens, tokens], true where the column's token is the row's token or one of its ancestors."""
    matrix = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent:
            matrix[node] |= matrix[parent - 1]
    return matrix


def longest_path(parents: Parents, tree_tokens: Sequence[int], root: int, tokens: Sequence[int]) -> list[int]:
    """Return the longest path down from `root` (as in `parents`) that spells a prefix of `tokens`, by index.

    Siblings may hold the same token: the longest path is found whichever of them it passes.
    """
    matched = {root: 0}  # tokens spelled on the way to each node that was reached
    deepest = root
    for node, (parent, token) in enumerate(zip(parents, tree_tokens, strict=True), start=1):
        depth = matched.get(parent)
        if depth is not None and depth < len(tokens) and tokens[depth] == token:
            matched[node] = depth + 1
            deepest = node if depth + 1 > matched[deepest] else deepest
    path = []
    while deepest != root:
        path.append(deepest - 1)
        deepest = parents[deepest - 1]
    return path[::-1]
