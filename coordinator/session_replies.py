"""What the scripts' replies are, and what they mean."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import DecodeError

from coordinator.session_record import SessionRecord, Status
from specdec.errors import DataLossError, FencedError, NotFoundError, UnavailableError

# what a script says to an owner, and the length of such a reply
OUTCOMES = [(b"committed", 1), (b"alive", 1), (b"cancelled", 1), (b"gone", 1), (b"fenced", 2), (b"conflict", 2)]
NUM_NEWS, LEASE_PLACE = 10, 6  # parts of what `tail` answers; the one that is a number


class SessionCancelled(Exception):
    """The session was cancelled while this coordinator ran it."""


class LeasedElsewhere(Exception):
    """Another coordinator runs the session; this one may read it."""

    def __init__(self, session: SessionRecord) -> None:
        super().__init__(session.session_id)
        self.session = session


def is_outcome(reply: Any) -> bool:
    """Return whether a reply is an outcome with its facts."""
    return isinstance(reply, list) and bool(reply) and (reply[0], len(reply)) in OUTCOMES


def is_contents(reply: Any) -> bool:
    """Return whether a reply is a session's fields, packed lists and lease, or empty: there is none."""
    if not isinstance(reply, list) or len(reply) not in (0, 5):
        return False
    return not reply or (
        isinstance(reply[0], list | Mapping)
        and all(isinstance(part, bytes) for part in reply[1:4])
        and reply[4] in (0, 1)
    )


def is_news(reply: Any) -> bool:
    """Return whether a reply is what a log has gained, or empty: there is none."""
    if not isinstance(reply, list) or len(reply) not in (0, NUM_NEWS):
        return False
    return all(isinstance(part, int if place == LEASE_PLACE else bytes) for place, part in enumerate(reply))


def is_status(reply: Any) -> bool:
    """Return whether a reply is a session's status, or None: there is none."""
    return reply is None or reply in [status.value.encode() for status in Status]


@contextmanager
def decoding() -> Iterator[None]:
    """Turn what cannot be decoded into UnavailableError."""
    try:
        yield
    except (KeyError, ValueError, struct.error, DecodeError) as error:
        raise UnavailableError(f"the session store gave a malformed session ({type(error).__name__})") from error


def refusal(outcome: Sequence[bytes] | None) -> Exception | None:
    """Return what an outcome says against the caller being the owner of a session; None: nothing, or not known."""
    if outcome is None:
        return None
    if outcome[0] == b"fenced":
        return FencedError("another coordinator has taken this session over; resume it", epoch=outcome[1].decode())
    if outcome[0] == b"cancelled":
        return SessionCancelled()
    return lost_commits() if outcome[0] in (b"gone", b"conflict") else None


def lost_commits() -> DataLossError:
    """Return the error of a session of which the store has less, or other text, than its owner."""
    return DataLossError("the session store lost what was committed; begin a new session")


def lost() -> DataLossError:
    """Return the error of a session that is marked as lost."""
    return DataLossError("the session store lost text that was shown of this session; begin a new session")


def not_found() -> NotFoundError:
    """Return the error of a session that the store does not have."""
    return NotFoundError("there is no such session, or it has expired; begin a new one with Generate")
