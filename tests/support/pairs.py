"""Pairs of distributions for the enumeration: chosen cases, and random ones."""

from collections.abc import Sequence

from hypothesis import strategies as st

from tests.support.enumeration import Dense, Pair, dense, markov_pair, truncated

# a target, a draft, and the size of the draft's support
DISTRIBUTIONS: dict[str, tuple[Sequence[int], Sequence[int], int]] = {
    "ties": ([1, 1, 1], [1, 1, 1], 3),
    "identical": ([1, 2, 3], [1, 2, 3], 3),
    "disjoint": ([1, 3, 0], [0, 0, 1], 3),
    "zero in the target": ([0, 3, 1], [2, 1, 1], 3),
    "zero in the draft": ([2, 1, 1], [0, 3, 1], 3),
    "one-hot target": ([0, 1, 0], [2, 1, 1], 3),
    "one-hot draft": ([2, 1, 1], [0, 1, 0], 3),
    "one-hot draft, impossible": ([2, 0, 1], [0, 1, 0], 3),
    "both one-hot": ([0, 0, 1], [0, 1, 0], 3),
    "a residual of two tokens": ([1, 5, 3], [4, 4, 1], 3),
    "a residual of one token": ([6, 2, 1], [2, 4, 3], 3),
    "two tokens": ([1, 4, 0], [4, 1, 0], 3),
    "nearly equal": ([100, 101, 99], [101, 99, 100], 3),
    "both peaked": ([1, 1, 18], [1, 18, 1], 3),
    "a flat draft": ([7, 2, 1], [1, 1, 1], 3),
    "a tail": ([2, 3, 4], [3, 1, 2], 2),
    "a tail and a zero": ([3, 0, 2], [2, 3, 1], 2),
    "a tail, a support of one": ([1, 2, 2], [1, 3, 1], 1),
    "no tail mass": ([2, 3, 0], [3, 2, 1], 2),
}

MARKOV_TARGETS = [dense(1, 5, 3), dense(4, 1, 4), dense(0, 3, 2)]
MARKOV_DRAFTS = [dense(4, 4, 1), dense(1, 5, 4), dense(4, 2, 3)]


def rotating_pair(target: Sequence[int], draft: Sequence[int], size: int) -> Pair:
    """Return a Markov pair: these weights after token 0; after token t, the weights rotated by t."""
    moves = range(len(target))
    targets = [dense(*(target[token - move] for token in moves)) for move in moves]
    return markov_pair(targets, [truncated([draft[token - move] for token in moves], size) for move in moves])


def sparse_markov_pair(size: int) -> Pair:
    """Return a Markov pair with supports of a size."""
    return markov_pair(MARKOV_TARGETS, [truncated(draft, size) for draft in MARKOV_DRAFTS])


@st.composite
def markov_pairs(draw_from: st.DrawFn) -> Pair:
    """Draw a Markov pair over three tokens with rational distributions and supports of any size."""
    weights = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)
    targets: list[Dense] = [dense(*draw_from(weights)) for _ in range(3)]
    return markov_pair(targets, [truncated(draw_from(weights), draw_from(st.integers(1, 3))) for _ in range(3)])
