"""Sessions that no client follows any more: what an operator says of them, and those that wait to be cancelled."""

from dataclasses import dataclass
from typing import NamedTuple

from specdec.types import DetachedPolicy

DETACHED_PATIENCE_S = 30.0  # a client that lost its connection has come back by then


@dataclass(frozen=True, slots=True)
class DetachedRule:
    """What an operator says of sessions that nobody follows."""

    policy: DetachedPolicy = DetachedPolicy.PARK  # of requests that have none of their own
    patience_s: float = DETACHED_PATIENCE_S  # for which a client may come back before its session is cancelled


class Detached(NamedTuple):
    """A session as its last client left it."""

    session_id: str
    epoch: int


class DetachedSessions:
    """Sessions that are to be cancelled, the next one first."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s` is how long a client has to come back."""
        self._patience_s = patience_s
        self._due_s: dict[Detached, float] = {}

    def add(self, session_id: str, epoch: int, now_s: float) -> None:
        """Take note that a session was left now."""
        self._due_s[Detached(session_id, epoch)] = now_s + self._patience_s

    def due(self, now_s: float) -> list[Detached]:
        """Take out those whose clients had their time."""
        due = [detached for detached, due_s in self._due_s.items() if due_s <= now_s]
        for detached in due:
            del self._due_s[detached]
        return due
