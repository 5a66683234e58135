"""Which sessions may keep their cache between rounds: as many as fit, the others wait their turn.

Evicting the least recently used session whenever another one needs room would, with more sessions than fit, evict each
just before its next round. So a resident keeps its blocks until it ends, stays away, or has had them for so long that
it is another one's turn.
"""

from dataclasses import dataclass

from specdec.engine.cache import KvCache
from specdec.engine.errors import CacheFull
from specdec.engine.sequence import Sequence

AWAY_FACTOR = 4.0  # times the usual absence: who is away for longer makes room
MIN_AWAY_S, MAX_AWAY_S = 0.25, 2.0


@dataclass(slots=True)
class _Resident:
    sequence: Sequence
    since_s: float
    used_s: float


class Residency:
    """The residents of a cache. It belongs to the engine thread."""

    def __init__(self, cache: KvCache, turn_s: float) -> None:
        self._cache = cache
        self._turn_s = turn_s
        self._residents: dict[str, _Resident] = {}  # by key, in the order of their admission
        self._had_turn: set[str] = set()  # had to make room for others, and wait like new ones

    def __len__(self) -> int:
        return len(self._residents)

    def has(self, key: str) -> bool:
        """Whether a session is resident."""
        return key in self._residents

    def had_turn(self, key: str) -> bool:
        """Whether a session had its turn while others waited, and none since."""
        return key in self._had_turn

    def admit(self, sequence: Sequence, length: int, now_s: float) -> bool:
        """Make a session with so many tokens resident if there is room, and for the next block of each resident."""
        needed = self._cache.num_blocks_for(length) + (len(self._residents) + 1 if self._residents else 0)
        if needed > self._cache.num_blocks_for_one(sequence):
            return False
        self._residents[sequence.key] = _Resident(sequence, now_s, now_s)
        sequence.is_resident = True
        self._had_turn.discard(sequence.key)
        return True

    def note_used(self, key: str, now_s: float) -> None:
        """Take note that a round has ended."""
        if key in self._residents:
            self._residents[key].used_s = now_s

    def make_room(self, absence_s: float, now_s: float) -> None:
        """Let those be evicted that stay away or had their turn: others wait."""
        away_s = min(max(MIN_AWAY_S, AWAY_FACTOR * absence_s), MAX_AWAY_S)
        for key, resident in list(self._residents.items()):
            if resident.sequence.num_pins:
                continue
            if now_s - resident.used_s > away_s:
                self.dismiss(key)
            elif now_s - resident.since_s > self._turn_s:
                self.dismiss(key)
                self._had_turn.add(key)

    def dismiss(self, key: str) -> None:
        """Let a session be evicted once it has no round."""
        resident = self._residents.pop(key, None)
        if resident is not None:
            resident.sequence.is_resident = False

    def dismiss_latest(self) -> bool:
        """Let the idle resident that came last be evicted; return whether there is one."""
        idle = [key for key, resident in self._residents.items() if not resident.sequence.num_pins]
        if not idle:
            return False
        self.dismiss(idle[-1])
        return True

    def forget(self, key: str) -> None:
        """Forget a session that is over, or that nobody asks for."""
        self.dismiss(key)
        self._had_turn.discard(key)


def reserved(sequence: Sequence, length: int) -> bool:
    """Reserve room for so many tokens; return whether there was enough."""
    try:
        sequence.reserve(length)
    except CacheFull:
        return False
    return True
