"""Comparing texts as tokens."""

from collections.abc import Sequence


def num_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    shorter = min(len(ours), len(theirs))
    return next((index for index in range(shorter) if ours[index] != theirs[index]), shorter)
