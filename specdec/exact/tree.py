"""Trees of draft tokens, as pure functions of their `parents`.

A tree of N tokens has N + 1 positions: position 0 is after the last committed token, position i + 1 is after token i
and its ancestors. `parents[i]` is the position that token i continues, at most i: a parent comes before its children.
Siblings are in the order in which they were drawn. A chain is the tree in which `parents[i]` is i.
"""

from collections.abc import Iterable, Sequence


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


def matching_path(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """Return the tokens, as indices, of the longest path from the root that `text` begins with.

    Of equal siblings the first one is taken: they have the same prefix, so the same state.
    """
    children, path, position = children_of(parents), [], 0
    for wanted in text:
        match = next((child for child in children[position] if tokens[child] == wanted), None)
        if match is None:
            break
        path.append(match)
        position = match + 1
    return path


def union(supports: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the token ids of all supports, each once, in the order of their first appearance."""
    return tuple(dict.fromkeys(token for support in supports for token in support))
