"""What this coordinator has shown of sessions that do not run here any more, for some time.

A store that goes back in time may lose a session's last commits after its last client has left. The coordinator that
made them compares, at growing ages, what the store has of it: a store loses what is young. It stops long before the
session expires, as one that has expired looks as if it was lost, and must not come back.
"""

from collections import OrderedDict
from dataclasses import dataclass

from coordinator.session_record import SessionRecord

KEPT_S = 64.0
MAX_TOKENS = 1 << 20  # of all of them: some 100 MB; the oldest is forgotten first


@dataclass(slots=True)
class _Entry:
    session: SessionRecord
    left_at_s: float
    due_s: float  # when it is compared next

    @property
    def num_tokens(self) -> int:
        return len(self.session.prompt) + len(self.session.emitted)


class ShownSessions:
    """Sessions as they were shown, the one that was left last at the end."""

    def __init__(self, ttl_s: float) -> None:
        """`ttl_s` is how long the store keeps a session after its last commit."""
        self._kept_s = min(KEPT_S, ttl_s / 2)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def all(self) -> list[SessionRecord]:
        """All of them."""
        return [entry.session for entry in self._entries.values()]

    def keep(self, session: SessionRecord, now_s: float) -> None:
        """Keep a session that was left now."""
        self.take(session.session_id)
        self._entries[session.session_id] = entry = _Entry(session, now_s, now_s)
        self._num_tokens += entry.num_tokens
        while self._num_tokens > MAX_TOKENS and len(self._entries) > 1:
            self.take(next(iter(self._entries)))

    def get(self, session_id: str) -> SessionRecord | None:
        """Return a session, if it is known."""
        entry = self._entries.get(session_id)
        return entry.session if entry else None

    def take(self, session_id: str) -> SessionRecord | None:
        """Forget a session and return it, if it is known."""
        entry = self._entries.pop(session_id, None)
        if entry is None:
            return None
        self._num_tokens -= entry.num_tokens
        return entry.session

    def due(self, now_s: float) -> list[SessionRecord]:
        """Return those to compare now: at an age of 0, 1, 2, 4, ... seconds, up to KEPT_S; forget older ones."""
        for entry in [*self._entries.values()]:
            if now_s > entry.left_at_s + self._kept_s:
                self.take(entry.session.session_id)
        entries = [entry for entry in self._entries.values() if entry.due_s <= now_s]
        for entry in entries:
            entry.due_s = now_s + max(1.0, now_s - entry.left_at_s)
        return [entry.session for entry in entries]
