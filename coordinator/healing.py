"""What a coordinator does when the store has less than clients were shown, or other text: it went back in time.

What was shown is not taken back. A coordinator that ran the session, or a client that hands its tokens back, brings
the store up to date where the text goes on from what the store has. Then nobody runs the session for some seconds:
others may have been shown more of it, and bring that. Where the text does not go on from what the store has, two texts
were shown under one name: the session is lost, and nobody is shown more of it.
"""

from collections.abc import Awaitable
from dataclasses import dataclass, replace
from enum import Enum, auto

from coordinator import metrics
from coordinator.generation import CommittedChunk, OutputToken
from coordinator.session_record import SessionRecord, Status
from coordinator.sessions import SessionStore
from specdec.errors import DataLossError, FencedError, SpecdecError, UnavailableError
from specdec.exact.prefix import chain
from specdec.serving.telemetry import get_logger

SETTLED_S = 3.0  # after a store may have gone back, until every coordinator has compared what it has shown
MAX_ATTEMPTS = 4  # against others that change the session meanwhile


class Healing(Enum):
    """What became of a session."""

    CURRENT = auto()  # the store has all that was shown
    HEALED = auto()  # it has it again
    LOST = auto()  # it has other text, and says so from now on
    REPLACED = auto()  # it has another session under this name, which is left as it is


@dataclass(frozen=True, slots=True)
class Position:
    """Where a client is in a session: what it was shown ends after `offset` tokens."""

    offset: int = 0
    digest: bytes = b""  # empty: not compared
    handed: tuple[OutputToken, ...] | None = None  # its last tokens; None: no proof that it was shown any
    incarnation: str = ""  # that the proof is of; empty: of a session that has none

    def goes_on_from(self, stored: SessionRecord) -> bool:
        """Return whether the tokens that were handed back are what the store's text lacks."""
        missing = self._missing(stored)
        is_complete = len(stored.emitted) + len(missing) == self.offset
        return is_complete and chain(stored.digest, [entry.token for entry in missing]) == self.digest

    def appended_to(self, stored: SessionRecord) -> SessionRecord:
        """Return the session with what the store's text lacks."""
        emitted = (*stored.emitted, *self._missing(stored))
        return replace(stored, emitted=emitted, digest=self.digest, epoch=stored.epoch + 1)

    def after(self, chunk: CommittedChunk) -> "Position":
        """Return where the client is once it was shown a chunk from here on."""
        handed = None if self.handed is None else (*self.handed, *chunk.emitted)
        return replace(self, offset=chunk.offset + len(chunk.emitted), digest=chunk.digest, handed=handed)

    def _missing(self, stored: SessionRecord) -> tuple[OutputToken, ...]:
        count = self.offset - len(stored.emitted)
        return (self.handed or ())[-count:] if count > 0 else ()


BEGINNING = Position()


async def heal(store: SessionStore, shown: SessionRecord) -> Healing:
    """Let the store have what this coordinator has shown, or mark the session as lost. Raises UnavailableError."""
    for _ in range(MAX_ATTEMPTS):
        stored = await store.find(shown.session_id)
        if stored is not None and stored.fingerprint != shown.fingerprint:
            return Healing.REPLACED
        if stored is not None and stored.status is Status.LOST:
            return Healing.LOST
        if stored is not None and stored.begins_with(shown) and _is_later(stored, shown):
            return Healing.CURRENT
        if stored is not None and not shown.begins_with(stored):
            if stored.incarnation != shown.incarnation:
                return Healing.REPLACED
            await store.lose(shown.session_id)
            return _noted(shown, Healing.LOST)
        if await store.restore(_above(shown, stored), stored, SETTLED_S):
            return _noted(shown, Healing.HEALED)
    raise UnavailableError("others are changing the session; resume it")


async def take_back(store: SessionStore, session_id: str, shown: Position) -> Healing:
    """Let the store have what a client was shown, or mark the session as lost. Raises as `SessionStore.read`.

    A session that came later under the same name is left as it is: NotFoundError, as for one that nobody has.
    """
    for _ in range(MAX_ATTEMPTS):
        stored = await store.read(session_id)
        if stored.holds(shown.offset, shown.digest):
            return Healing.CURRENT
        if stored.incarnation != shown.incarnation:
            raise store.expired()
        if stored.has_logprobs or not shown.goes_on_from(stored):  # clients hand back no log probabilities
            await store.lose(session_id)
            return _noted(stored, Healing.LOST)
        if await store.restore(shown.appended_to(stored), stored, SETTLED_S):
            return _noted(stored, Healing.HEALED)
    raise UnavailableError("others are changing the session; resume it")


def _is_later(stored: SessionRecord, shown: SessionRecord) -> bool:
    """Return whether the store's session, which has all that was shown, is as it was or went on from there."""
    return stored.epoch >= shown.epoch or len(stored.emitted) > len(shown.emitted)


def told(healing: Healing) -> SpecdecError:
    """Return what followers are told by a coordinator that could not commit."""
    if healing in (Healing.LOST, Healing.REPLACED):
        return DataLossError("the session store lost text that was shown of this session; begin a new session")
    if healing is Healing.HEALED:
        return UnavailableError("the session store went back in time and has this session again; resume it")
    return FencedError("another coordinator has taken this session over; resume it")


async def not_lost(healing: Awaitable[Healing]) -> None:
    """Raise DataLossError for a session that is lost."""
    if await healing is Healing.LOST:
        raise told(Healing.LOST)


def _above(shown: SessionRecord, stored: SessionRecord | None) -> SessionRecord:
    """Return what to store: an epoch that nobody has, and an end that a client has asked for meanwhile."""
    if stored is None:
        return replace(shown, epoch=shown.epoch + 1)
    above = replace(shown, epoch=max(shown.epoch, stored.epoch) + 1)
    if stored.status is Status.CANCELLED and shown.status is Status.ACTIVE:
        return replace(above, status=stored.status, finish=stored.finish)
    return above


def _noted(session: SessionRecord, healing: Healing) -> Healing:
    metrics.NUM_WENT_BACK.labels(healing.name.lower()).inc()
    get_logger().warning("store_went_back", session_id=session.session_id, session=healing.name.lower())
    return healing
