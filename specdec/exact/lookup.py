"""Looking up how a session's text goes on, in that text itself: what followed the longest match of its end.

It takes microseconds and depends on nothing but the text. So the coordinator knows what was found before it plans a
round, and the target worker, which has the text too, finds the same, and may score it before it is asked to. Saxena
2023, "Prompt lookup decoding". Matches are found by hash chains, as deflate finds them (RFC 1951).
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from specdec.exact.values import Proposal, one_hot

SHORTEST = 2  # tokens of a match
LONGEST = 16  # longer matches count as this long
MAX_CANDIDATES = 16  # places that are compared for one match, the latest first
NUM_LENGTHS = LONGEST - SHORTEST + 1  # of matches
MAX_READ = 2048  # tokens of a new text that are read in one round: they hold the event loop for 2 ms
FIRST_SLOTS = 1 << 10
MULTIPLIERS = (0x85EBCA6B, 0x9E3779B1)  # of a pair's last and first token; odd, and unlike each other


@dataclass(frozen=True, slots=True)
class Match:
    """Where the text's end occurred before."""

    position: int = 0  # of the token that followed there
    num_tokens: int = 0  # that were the same before it; 0: nothing was found


NO_MATCH = Match()


@dataclass(frozen=True, slots=True)
class NextRound:
    """What the round after another one will most likely draft, as far as is known before that one's outcome.

    It drafts what followed the longest match of the text's end, `draft_lengths[i]` tokens of it after a match of
    SHORTEST + i tokens. Where that is nothing, it drafts what the target offers, and where that is nothing as well,
    nothing at all.
    """

    draft_lengths: Sequence[int] = ()  # [NUM_LENGTHS]; those that are missing are 0
    plain: bool = False  # nothing may be drafted at all; else nobody knows what is drafted then
    max_length: int = 1 << 31  # tokens of the text at which the session ends at the latest
    num_offered: int = 0  # draft tokens that the target may offer
    learns: bool = False  # the target remembers what the round before shows, to offer drafts of it later
    stop_below: float = 0.0  # and the chance to be accepted below which one is not worth its place

    def num_draft_tokens(self, match: Match, length: int) -> int:
        """Return how many tokens are drafted after a match at the end of a text of `length` tokens."""
        place = match.num_tokens - SHORTEST
        wanted = self.draft_lengths[place] if 0 <= place < len(self.draft_lengths) else 0
        return max(0, min(wanted, self.max_length - length - 1))


class Chains:
    """The places of all pairs of tokens in a text, by hash; 12 to 20 bytes a token of the text."""

    def __init__(self, num_tokens: int = 0) -> None:
        """Make room for a text of so many tokens: to make more of it later takes a millisecond a thousand."""
        num_slots = max(FIRST_SLOTS, 1 << (2 * num_tokens).bit_length())
        self._latest = array("I", bytes(4 * num_slots))  # by hash: where the token after a pair is; 0: nowhere
        self._earlier = array("I", bytes(4 * SHORTEST))  # by position: the one before it with the same hash

    def __len__(self) -> int:
        return len(self._earlier)

    def read(self, tokens: Sequence[int], end: int) -> None:
        """Add the pairs that end before the positions up to `end`, which is none of them."""
        for position in range(len(self._earlier), end):
            if position > len(self._latest) // 2:
                self._grow(tokens, position)
            slot = self._slot(tokens, position)
            self._earlier.append(self._latest[slot])
            self._latest[slot] = position

    def places(self, tokens: Sequence[int], maximum: int) -> Iterator[int]:
        """Give where the pair at the text's end may have occurred before, latest first; hashes may be wrong."""
        position = self._latest[self._slot(tokens, len(tokens))]
        for _ in range(maximum):
            if not position:
                return
            yield position
            position = self._earlier[position]

    def _grow(self, tokens: Sequence[int], end: int) -> None:
        self._latest = array("I", bytes(8 * len(self._latest)))
        for position in range(SHORTEST, end):
            slot = self._slot(tokens, position)
            self._earlier[position] = self._latest[slot]
            self._latest[slot] = position

    def _slot(self, tokens: Sequence[int], position: int) -> int:
        hashed = tokens[position - 1] * MULTIPLIERS[0] + tokens[position - 2] * MULTIPLIERS[1]
        return (hashed >> 7) & (len(self._latest) - 1)


class TextLookup:
    """What followed earlier in one text that only grows; a shorter one is read anew."""

    def __init__(self) -> None:
        self._pairs: Chains | None = None  # until the first text

    def find(self, tokens: Sequence[int]) -> Match:
        """Return the longest match of the text's end, the latest of several; nothing while a long text is read."""
        best = NO_MATCH
        for match in self.matches(tokens):
            if match.num_tokens > best.num_tokens:
                best = match
            if match.num_tokens == LONGEST:
                break
        return best

    def matches(self, tokens: Sequence[int]) -> Iterator[Match]:
        """Give the latest matches of the text's end, latest first; none while a long text is read."""
        pairs = self._read(tokens)
        if pairs is None:
            return
        for position in pairs.places(tokens, MAX_CANDIDATES):
            num_tokens = num_common(tokens, position, len(tokens))
            if num_tokens >= SHORTEST:
                yield Match(position, num_tokens)

    def _read(self, tokens: Sequence[int]) -> Chains | None:
        """Add what is new of a text, or a part of it; return its pairs if all of it is there."""
        if self._pairs is None or len(tokens) < len(self._pairs):
            self._pairs = Chains(len(tokens))
        end = min(len(tokens), len(self._pairs) + MAX_READ)
        self._pairs.read(tokens, end)
        return self._pairs if end == len(tokens) >= SHORTEST else None


def num_common(tokens: Sequence[int], position: int, end: int) -> int:
    """Return how many tokens are the same before two positions, LONGEST at most."""
    count, limit = 0, min(LONGEST, position)
    while count < limit and tokens[position - 1 - count] == tokens[end - 1 - count]:
        count += 1
    return count


def continued(tokens: Sequence[int], match: Match, count: int) -> Proposal:
    """Return what followed a match as a chain; where that reaches the text's end, a loop goes on as a loop."""
    chain = following(tokens, match, count)
    return Proposal(chain, tuple(map(one_hot, chain)))


def following(tokens: Sequence[int], match: Match, count: int) -> tuple[int, ...]:
    """Return the tokens that followed a match, as `continued` does."""
    return tuple(islice(cycle(tokens[match.position : match.position + count]), count))
