"""What the coordinator's own lookups are worth, by the length of their match.

What was found is known before a round is planned, and costs nothing. So each round decides by its own match: the longer
that is, the likelier is what followed it (Oliaro et al. 2024, "SuffixDecoding", section 4, scores matches so). And each
round that does not draft what was found tells what that would have been worth, also in a rest: the text itself says it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.choosing.acceptance_history import SessionAcceptance
from coordinator.choosing.costs import Counts, Floats
from coordinator.choosing.plans import DraftPlan, Estimate
from coordinator.choosing.shared_statistics import SharedStatistics
from specdec.exact.lookup import LONGEST, SHORTEST, Match

LOOKUP = "lookup"  # in place of a drafter's name, where the coordinator drafted what it found itself
SHORTEST_OF = (SHORTEST, 3, 4, 6, 9, 16)  # tokens of the shortest match of each class
CLASSES = [bisect_right(SHORTEST_OF, length) - 1 for length in range(SHORTEST, LONGEST + 1)]  # by length of a match
COMPARED_LENGTH = 16  # tokens of a lookup that is not drafted, and compared with the text
REMEMBERED_ROUNDS = 16  # an estimate holds for so many rounds, as costs change slowly


@dataclass(slots=True)
class Pending:
    """A match that no round drafted, and how far the text has followed it."""

    match: Match
    base_length: int  # tokens committed before it
    num_same: int = 0

    def follow(self, committed: Sequence[int], limit: int) -> bool:
        """Compare the text with it; return whether it is known how far they are the same, up to `limit` tokens."""
        period = self.base_length - self.match.position
        while self.num_same < limit:
            place = self.base_length + self.num_same
            if place >= len(committed):
                return False
            if committed[place] != committed[self.match.position + self.num_same % period]:
                return True
            self.num_same += 1
        return True


class Lookups:
    """The lookups of one session."""

    def __init__(self, shared: SharedStatistics, maximum: int, is_greedy: bool) -> None:
        self._costs = shared.costs
        names = (f"{LOOKUP} {shortest}" for shortest in SHORTEST_OF)
        self._acceptance = [SessionAcceptance(shared.acceptance(name, is_greedy)) for name in names]
        self._compared_length = min(COMPARED_LENGTH, maximum)
        self._estimates: dict[tuple[int, int, int], tuple[int, Estimate]] = {}  # by class, load and longest
        self._seconds: tuple[tuple[int, int, int], Floats] | None = None  # by load and longest, in a round
        self._num_rounds = 0
        self._pending: Pending | None = None

    def best(self, num_tokens: int, lengths: Counts) -> Estimate:
        """Return the plan that drafts most tokens a second of a match of so many, `lengths` at choice."""
        key = _class_of(num_tokens), self._costs.load, int(lengths[-1])
        number, estimate = self._estimates.get(key, (0, None))
        if estimate is None or self._num_rounds - number > REMEMBERED_ROUNDS:
            estimate = self._estimate(key[0], lengths)
            self._estimates[key] = self._num_rounds, estimate
        return estimate

    def _estimate(self, index: int, lengths: Counts) -> Estimate:
        tokens = self._acceptance[index].expected_tokens()[lengths]
        seconds = self._seconds_of(lengths)
        best = int(np.argmax(tokens / seconds))
        return Estimate(DraftPlan(LOOKUP, int(lengths[best])), float(tokens[best]), float(seconds[best]))

    def _seconds_of(self, lengths: Counts) -> Floats:
        """Return what rounds take that draft so many tokens each, whatever their class."""
        key = self._num_rounds, self._costs.load, int(lengths[-1])
        if self._seconds is None or self._seconds[0] != key:
            self._seconds = key, self._costs.looked_up_each_s(lengths.astype(float), LOOKUP)
        return self._seconds[1]

    def draft_lengths(self, lengths: Counts, least_speed: float) -> tuple[int, ...]:
        """Return how many tokens a round drafts of a match of SHORTEST tokens, of SHORTEST + 1, and so on; 0: none.

        What does not promise more than so many tokens a second is not drafted.
        """
        found = [self.best(shortest, lengths) for shortest in SHORTEST_OF]
        by_class = [estimate.plan.num_draft_tokens if estimate.speed > least_speed else 0 for estimate in found]
        return tuple(by_class[index] for index in CLASSES)

    def observe(self, match: Match, num_drafted: int, num_accepted: int) -> None:
        """Add what was accepted of a match."""
        index = _class_of(match.num_tokens)
        self._acceptance[index].observe(num_drafted, num_drafted, range(num_accepted))
        self._estimates = {key: known for key, known in self._estimates.items() if key[0] != index}

    def compare(self, match: Match, base_length: int) -> None:
        """Take note of a match that the round after `base_length` tokens does not draft."""
        if match.num_tokens and self._pending is None:
            self._pending = Pending(match, base_length)

    def settle(self, committed: Sequence[int]) -> None:
        """Count a round, and learn how far the text has followed the match that is compared."""
        self._num_rounds += 1
        if self._pending and self._pending.follow(committed, self._compared_length):
            self.observe(self._pending.match, self._compared_length, self._pending.num_same)
            self._pending = None


def _class_of(num_tokens: int) -> int:
    return CLASSES[num_tokens - SHORTEST]
