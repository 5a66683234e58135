"""Which sessions may keep their cache between rounds: as many as fit, the others wait their turn.

Evicting the least recently used session whenever another one needs room would, with more sessions than fit, evict each
just before its next round. So a resident keeps its blocks until it ends, stays away, or has had them for so long that
it is another one's turn.
"""

from dataclasses import dataclass

from specdec.engine.cache import KvCache
from specdec.engine.errors import CacheFull
from specdec.engine.sequence import Sequence

GROWTH_SMOOTHING = 0.1  # weight of the latest session that ended
# of the growth that is expected: residents are not all at their ends at once, but one that has to give up its place
# before its end is read again (of 0, a half and 1 a half gave the most tokens, with short texts)
GROWTH_SHARE = 0.5
AWAY_FACTOR = 4.0  # times the usual absence: who is away for longer makes room
MIN_AWAY_S, MAX_AWAY_S = 1.0, 4.0  # one that is given up too soon is read again: on a busy machine they are late


@dataclass(slots=True)
class _Resident:
    sequence: Sequence
    first_length: int  # when it became resident
    since_s: float
    used_s: float


class Residency:
    """The residents of a cache. It belongs to the engine thread."""

    def __init__(self, cache: KvCache, turn_s: float) -> None:
        self._cache = cache
        self._turn_s = turn_s
        self._residents: dict[str, _Resident] = {}  # by key, in the order of their admission
        self._had_turn: set[str] = set()  # had to make room for others, and wait like new ones
        self._growth_tokens = 0.0  # of a resident until its end, as measured

    def __len__(self) -> int:
        return len(self._residents)

    def has(self, key: str) -> bool:
        """Whether a session is resident."""
        return key in self._residents

    def had_turn(self, key: str) -> bool:
        """Whether a session had its turn while others waited, and none since."""
        return key in self._had_turn

    def admit(self, sequence: Sequence, length: int, now_s: float) -> bool:
        """Make a session with so many tokens resident if there is room, and for what each resident will need soon."""
        num_blocks = self._cache.num_blocks_for(length)
        if self._residents:
            num_blocks += self._num_blocks_more(length, length)
            num_blocks += sum(self._num_blocks_soon(resident) for resident in self._residents.values())
        if num_blocks > self._cache.num_blocks_for_one(sequence):
            return False
        self._residents[sequence.key] = _Resident(sequence, length, now_s, now_s)
        sequence.is_resident = True
        self._had_turn.discard(sequence.key)
        return True

    def _num_blocks_soon(self, resident: _Resident) -> int:
        return self._num_blocks_more(resident.sequence.length, resident.first_length)

    def _num_blocks_more(self, length: int, first_length: int) -> int:
        """Return how many blocks more a session will take: some of what others took until their ends, at least one."""
        soon = int(first_length + GROWTH_SHARE * self._growth_tokens)
        return max(1, self._cache.num_blocks_for(soon) - self._cache.num_blocks_for(length))

    def note_used(self, key: str, now_s: float, others_wait: bool = False) -> None:
        """Take note that a round has ended, and with it the session's turn, if that is over and others wait."""
        if key not in self._residents:
            return
        self._residents[key].used_s = now_s
        if others_wait and now_s - self._residents[key].since_s > self._turn_s:
            self.dismiss(key)
            self._had_turn.add(key)

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
        if key in self._residents:
            resident = self._residents[key]
            grown = max(0, resident.sequence.length - resident.first_length)
            self._growth_tokens += GROWTH_SMOOTHING * (grown - self._growth_tokens)
        self.dismiss(key)
        self._had_turn.discard(key)


def reserved(sequence: Sequence, length: int) -> bool:
    """Reserve room for so many tokens; return whether there was enough."""
    try:
        sequence.reserve(length)
    except CacheFull:
        return False
    return True
