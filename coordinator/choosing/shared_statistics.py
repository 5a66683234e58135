"""What all sessions of a coordinator have measured, and which of it a session may learn from."""

from coordinator.choosing.acceptance_history import AcceptanceHistory
from coordinator.choosing.costs import Costs
from coordinator.choosing.exploration import Exploration

FIRST_SCOUTS = 8  # sessions at most, from which the others learn
SCOUTED_ROUNDS = 512  # of theirs, after which there is no need of more
SESSIONS_PER_SCOUT = 16  # after these
OFFERING_SHARE = 0.003  # of the time, for trials of offers: each costs so little that they would leave no others
MAX_SEEDS = 100_000  # remembered; what older sessions accepted has decayed


class Scouting:
    """Which greedy, or which sampled, sessions look for better plans even where drafts have clearly lost of late."""

    def __init__(self) -> None:
        self._num_begun = 0  # sessions
        self._num_rounds = 0  # of scouts that have looked at drafters

    def begin(self) -> bool:
        """Count a session that begins; return whether it is a scout."""
        self._num_begun += 1
        is_early = self._num_begun <= FIRST_SCOUTS and self._num_rounds < SCOUTED_ROUNDS
        return is_early or self._num_begun % SESSIONS_PER_SCOUT == 0

    def note_round(self) -> None:
        """Count a round of a scout that has looked."""
        self._num_rounds += 1


class SharedStatistics:
    """What all sessions of a coordinator have measured."""

    def __init__(self, costs: Costs | None = None, is_repeated: bool = False) -> None:
        """`is_repeated`: of one session, whose draws another one has made before it."""
        self.costs = costs or Costs()
        self.is_repeated = is_repeated
        self.exploration = Exploration()
        self.offering = Exploration(OFFERING_SHARE)
        self._acceptance: dict[tuple[str, bool], AcceptanceHistory] = {}
        self.scouting = {is_greedy: Scouting() for is_greedy in (False, True)}
        self._seeds: dict[int, None] = {}  # in the order in which they came

    def acceptance(self, drafter: str, is_greedy: bool) -> AcceptanceHistory:
        """Return a drafter's history over greedy, or over sampled, sessions."""
        return self._acceptance.setdefault((drafter, is_greedy), AcceptanceHistory())

    def for_seed(self, seed: int | None) -> "SharedStatistics":
        """Return what a session may learn from; `seed` is None for a greedy one, whose text no draw decides.

        Two sessions with one seed make the same draws: a choice made by what those draws accepted in the first would
        depend on the second's own future draws. So a seed's second session shares nothing but costs.
        """
        return SharedStatistics(self.costs, is_repeated=True) if seed is not None and self._is_repeated(seed) else self

    def _is_repeated(self, seed: int) -> bool:
        """Return whether a session had this seed before, and note it."""
        is_repeated = self._seeds.pop(seed, False) is None
        self._seeds[seed] = None
        if len(self._seeds) > MAX_SEEDS:
            del self._seeds[next(iter(self._seeds))]
        return is_repeated
