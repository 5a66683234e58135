"""What was drafted in a round, and what is known of how the round may end."""

from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from draft_service.model.forecasts import Rival
from specdec.exact.values import Proposal

NOTHING = Proposal()


class Rejection(NamedTuple):
    """How a round may end: so many draft tokens are accepted, then another token closes it."""

    num_accepted: int
    closing: int
    chance: float


@dataclass(frozen=True, slots=True)
class Drafted:
    """A round's draft tokens. Chances are those of being reached and accepted, as the draft model sees them."""

    proposal: Proposal = NOTHING
    chances: tuple[float, ...] = ()  # of each token, when it was about to be drawn
    rivals: tuple[Rival, ...] = ()  # of each token
    stopped_chance: float | None = None  # of the token before which it stopped; None: interrupted, or it is whole

    def first(self, num_tokens: int) -> "Drafted":
        """Return its first tokens."""
        proposal = Proposal(self.proposal.tokens[:num_tokens], self.proposal.distributions[:num_tokens])
        return Drafted(proposal, self.chances[:num_tokens], self.rivals[:num_tokens])

    def asked(self, num_tokens: int, stop_below: float) -> tuple["Drafted", bool]:
        """Return as much of it as a request of at most `num_tokens` would have drawn, and whether that is all of it."""
        likely = sum(1 for _ in takewhile(lambda chance: chance >= stop_below, self.chances))
        size = min(likely, num_tokens)
        has_stopped = self.stopped_chance is not None and self.stopped_chance < stop_below
        return self.first(size), size == num_tokens or size < len(self.chances) or has_stopped

    def rejections(self) -> list[Rejection]:
        """Return how the round may end where not all is accepted, the likeliest first."""
        reached = (1.0, *self.chances)
        found = (Rejection(n, rival.token, reached[n] * rival.share) for n, rival in enumerate(self.rivals))
        return sorted(found, key=lambda rejection: -rejection.chance)


UNDRAFTED = Drafted()
