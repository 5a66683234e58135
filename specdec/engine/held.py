"""Which tokens stand behind the keys and values that a sequence holds.

A sequence knows how many tokens it holds, not which. Penalties need to know; and so does a stream that takes a session
over: it sends everything, of which only what the cache does not hold already is computed again.
"""

from array import array
from collections.abc import Sequence as Tokens
from weakref import WeakKeyDictionary

from specdec.engine import CacheMiss, Sequence
from specdec.exact.prefix import num_equal


class HeldTokens:
    """The tokens of every cached sequence; remembered as long as the sequence itself. Engine thread only."""

    def __init__(self) -> None:
        self._tokens: WeakKeyDictionary[Sequence, array[int]] = WeakKeyDictionary()

    def of(self, sequence: Sequence) -> "array[int]":
        """Return the tokens that `sequence` holds, [sequence.length]. Append to it what will be fed next."""
        tokens = self._tokens.setdefault(sequence, array("I"))
        # truncation, eviction and failure shorten the sequence without telling
        del tokens[sequence.length :]
        return tokens

    def resume(self, sequence: Sequence, start: int, tokens: Tokens[int], min_fed: int, match: bool) -> list[int]:
        """Truncate `sequence` to `start`, to append `tokens`; return what is left to feed, at least `min_fed` tokens.

        With `match`, tokens that the sequence holds already are kept. Raises CacheMiss if it holds less than `start`.
        """
        held = self.of(sequence)
        if len(held) < start:
            raise CacheMiss(len(held), start)
        num_matching = num_equal(held[start:], tokens) if match else 0
        kept = min(start + num_matching, start + len(tokens) - min_fed)
        fed = [*held[kept:start], *tokens[max(0, kept - start) :]]
        sequence.truncate(kept)
        del held[kept:]
        held.extend(fed)
        return fed
