"""Texts with their positions sorted by what comes before them, so that the best matches of a context are neighbours.

This is a suffix array of the reversed text (Manber and Myers 1993), with contexts cut to CONTEXT_TOKENS. It takes 12
bytes a token where a suffix automaton in Python takes hundreds, it can be truncated, and whoever looks up a context
finds all of its occurrences, not one. Appending a token is a binary search, and moves the positions after the place.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import NamedTuple, Self

import numpy as np

CONTEXT_TOKENS = 32  # longer matches count as this long
TOKEN_BYTES = 4
CONTEXT_BYTES = CONTEXT_TOKENS * TOKEN_BYTES
SEPARATOR = 0  # stored between texts; a token is stored as one more, and only the largest id shares its number
MAX_STORED = 2**32 - 1


class Match(NamedTuple):
    """A position with a context that ends as the one that was looked up."""

    position: int  # of the token that follows
    num_tokens: int  # the same before it, 1 to CONTEXT_TOKENS


class ContextIndex:
    """One text that grows and shrinks at its end, or several texts one after the other."""

    def __init__(self) -> None:
        self.tokens: array[int] = array("I")  # SEPARATOR where a text has ended
        self._ends: set[int] = set()  # the positions of separators
        self._order: array[int] = array("I")  # positions with a token on either side, by context, then by position
        self._reversed = bytearray(CONTEXT_BYTES)  # at its end: all tokens, last to first, so that contexts are slices

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]]) -> Self:
        """Return the index of whole texts, sorted at once: half a second for a million tokens."""
        index = cls()
        for text in texts:
            index.tokens.extend(text)
            index._ends.add(len(index.tokens))
            index.tokens.append(SEPARATOR)
        index._sort()
        return index

    def append(self, token: int) -> None:
        """Add a token."""
        position = len(self.tokens)
        if position and position - 1 not in self._ends:
            self._order.insert(self._place(self.context()), position)
        self._store(token, min(token + 1, MAX_STORED))

    def end_text(self) -> None:
        """End the last text: the next token begins another one."""
        self._ends.add(len(self.tokens))
        self._store(SEPARATOR, SEPARATOR)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of a single text."""
        for position in range(len(self.tokens) - 1, max(length, 1) - 1, -1):
            # of equal contexts the latest is the last
            del self._order[self._place(self._context_at(position)) - 1]
        del self.tokens[length:]

    def context(self) -> bytearray:
        """Return the context at the end, as `matches` takes it."""
        return self._context_at(len(self.tokens))

    def matches(self, context: bytearray, count: int) -> list[Match]:
        """Return the `count` positions that have most tokens in common with a context, best first."""
        above = self._place(context)
        below = above - 1
        num_below, num_above = self._num_common(context, below), self._num_common(context, above)
        found: list[Match] = []
        while len(found) < count and (num_below or num_above):
            if num_below >= num_above:
                found.append(Match(self._order[below], num_below))
                below -= 1
                num_below = self._num_common(context, below)
            else:
                found.append(Match(self._order[above], num_above))
                above += 1
                num_above = self._num_common(context, above)
        return found

    def following(self, position: int, count: int) -> Sequence[int]:
        """Return at most `count` tokens from a position on, up to the end of its text."""
        tokens = self.tokens[position : position + count]
        return tokens[: next((at for at in range(len(tokens)) if position + at in self._ends), count)]

    def repeating(self, position: int, count: int) -> Sequence[int]:
        """Return `count` tokens from a position on; after the end again from there: a loop goes on as a loop."""
        tokens = self.tokens[position : position + count]
        return tokens if len(tokens) == count else tuple(islice(cycle(tokens), count))

    def _num_common(self, context: bytearray, place: int) -> int:
        """Return how many tokens a context shares with the one at a place in the order; 0 outside of it."""
        if not 0 <= place < len(self._order):
            return 0
        other = self._context_at(self._order[place])
        length = min(len(context), len(other))
        difference = int.from_bytes(context[:length]) ^ int.from_bytes(other[:length])
        return (length - (difference.bit_length() + 7) // 8) // TOKEN_BYTES

    def _context_at(self, position: int) -> bytearray:
        begin = len(self._reversed) - TOKEN_BYTES * position
        return self._reversed[begin : begin + CONTEXT_BYTES]

    def _place(self, context: bytearray) -> int:
        """Return the place after all contexts that are not greater."""
        return bisect_right(self._order, context, key=self._context_at)

    def _store(self, token: int, stored: int) -> None:
        self.tokens.append(token)
        size = TOKEN_BYTES * len(self.tokens)
        if size > len(self._reversed):
            self._reversed = bytearray(len(self._reversed)) + self._reversed
        begin = len(self._reversed) - size
        self._reversed[begin : begin + TOKEN_BYTES] = stored.to_bytes(TOKEN_BYTES)

    def _sort(self) -> None:
        """Sort all positions by contexts of one token, then of 2, 4, ... (prefix doubling)."""
        ends = np.fromiter(self._ends, np.int64, len(self._ends))
        stored = np.minimum(np.frombuffer(self.tokens, np.uint32).astype(np.int64) + 1, MAX_STORED)
        stored[ends] = SEPARATOR
        self._reversed = bytearray(stored[::-1].astype(">u4").tobytes())
        # [positions]: how contexts of `length` tokens compare, from 0 for none
        ranks = np.unique(np.concatenate([[0], stored]), return_inverse=True)[1]
        length = 1
        while length < min(CONTEXT_TOKENS, len(ranks)):
            before = np.concatenate([np.zeros(length, np.int64), ranks[:-length]])
            ranks = np.unique(ranks * (before.max() + 1) + before, return_inverse=True)[1]
            length *= 2
        inside = np.ones(len(ranks), bool)
        inside[[0, -1]] = inside[ends] = inside[ends + 1] = False
        positions = np.flatnonzero(inside)
        order = positions[np.argsort(ranks[positions], kind="stable")]
        self._order = array("I", order.astype(np.uint32).tobytes())
