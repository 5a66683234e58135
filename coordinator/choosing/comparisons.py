"""What a drafter that did not draft a round would have had accepted in it, as the committed text shows.

The text has the target's distribution whoever drafts it. A token that a drafter chooses without a draw is accepted
with the target's probability of it, which is the probability that the text goes on with it. So the text itself says
what such a drafter is worth, without a round that tries it; all drafters are compared on the same text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from coordinator.choosing.plans import MIN_FOUND, DraftPlan
from specdec.exact.tree import longest_path
from specdec.exact.values import Proposal

ROUNDS_PER_GAP = 2  # after so many comparisons of a session the next ones are a round further apart
LONGEST_GAP = 8  # rounds
MAX_WEIGHT = 2.0  # of a comparison, and of none less than its reciprocal
MAX_PENDING = 16  # proposals of one session that wait for the text to reach their end; the oldest go first


class Compared(NamedTuple):
    """A proposal that no round used, and the nodes of it that the text went on with."""

    plan: DraftPlan
    num_drafted: int
    path: Sequence[int]
    weight: float  # in rounds


@dataclass(frozen=True, slots=True)
class Unused:
    """A proposal that no round used."""

    plan: DraftPlan
    proposal: Proposal
    base_length: int  # tokens committed before it
    num_committed: int = 0  # tokens of the round meanwhile; 0: not known yet

    def compared(self, committed: Sequence[int]) -> Compared | None:
        """Return what the text went on with; None while that is not certain."""
        following = committed[self.base_length : self.base_length + self.proposal.depth]
        path = longest_path(self.proposal.tree, self.proposal.tokens, 0, following)
        if len(path) == len(following) < self.proposal.depth:
            return None
        weight = self.num_committed / (len(path) + 1)
        return Compared(self.plan, len(self.proposal), path, min(max(weight, 1 / MAX_WEIGHT), MAX_WEIGHT))


def is_missed(proposal: Proposal) -> bool:
    """Return whether a fallback may take its place: it has hardly a token, and no draw decided that."""
    return len(proposal) < MIN_FOUND and proposal.is_chosen


@dataclass(slots=True)
class Comparisons:
    """The unused proposals of one session: many at its beginning, which say what its text is like, then fewer."""

    _pending: list[Unused] = field(default_factory=list)
    _num_begun: int = 0
    _num_rounds: int = 0  # since the last one began

    def note_round(self) -> None:
        """Count a round in which plans are weighed."""
        self._num_rounds += 1

    def is_due(self, num_sessions: int) -> bool:
        """Return whether the round may ask for a proposal. Sessions at one target worker take turns."""
        return self._num_rounds >= num_sessions * min(1 + self._num_begun // ROUNDS_PER_GAP, LONGEST_GAP)

    def begin(self) -> None:
        """Note that a proposal is asked for."""
        self._num_begun += 1
        self._num_rounds = 0

    def add(self, unused: Unused) -> None:
        """Add a proposal whose tokens were chosen without a draw."""
        self._pending = [*self._pending, unused][-MAX_PENDING:]

    def settled(self, committed: Sequence[int]) -> Iterator[Compared]:
        """Give what has become certain of them, each once."""
        pending, self._pending = self._pending, []
        for unused in pending:
            if not unused.num_committed:
                unused = replace(unused, num_committed=len(committed) - unused.base_length)  # noqa: PLW2901
            compared = unused.compared(committed)
            if compared:
                yield compared
            else:
                self._pending.append(unused)
