"""Sessions in Redis: one idempotent Lua call a round, fenced by epoch, chained by digest.

Safety is the epoch's: a commit names the epoch, length and digest that it builds on, and the script refuses anything
else. A commit whose reply was lost is recognised when it is repeated, so the client library may retry.

Where the sessions are: coordinator/stores.
"""

import secrets
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from coordinator.generation import Round
from coordinator.prompts import EncodedPrompt
from coordinator.session_ids import SECRET_BYTES
from coordinator.session_record import (
    SessionRecord,
    Status,
    fields_of,
    pack_logprobs,
    pack_model,
    pack_tokens,
    session_of,
)
from coordinator.stores.client import PATIENCE_S, RedisClient
from coordinator.stores.opening import open_redis
from specdec import messages
from specdec.errors import AlreadyExistsError, DataLossError, FencedError, NotFoundError, UnavailableError
from specdec.outside import REAL, Outside
from specdec.types import ModelInfo, Statistics

# what a script says to an owner, and the length of such a reply
OUTCOMES = [(b"committed", 1), (b"alive", 1), (b"cancelled", 1), (b"gone", 1), (b"fenced", 2), (b"conflict", 2)]
SECRET_KEY = "specdec:secret"


class SessionCancelled(Exception):
    """The session was cancelled while this coordinator ran it."""


class SessionStore:
    """Sessions in one Redis. Every method raises UnavailableError while Redis does not answer."""

    def __init__(self, redis: RedisClient, ttl_s: float, outside: Outside = REAL) -> None:
        self._redis = redis
        self._outside = outside
        self._ttl_ms = int(ttl_s * 1000)
        self._create = redis.script("create", lambda reply: reply in (b"created", b"exists", b"conflict"))
        self._commit, self._heartbeat = redis.script("commit", _is_outcome), redis.script("heartbeat", _is_outcome)
        self._claim, self._cancel = redis.script("claim", _is_contents), redis.script("cancel", _is_status)
        self._restore = redis.script("restore", lambda reply: reply in (b"restored", b"changed"))
        self._lose = redis.script("lose", lambda reply: reply == b"lost")
        self._secret = redis.script("secret", lambda reply: isinstance(reply, bytes) and len(reply) == SECRET_BYTES)

    async def ping(self) -> bool:
        """Return once Redis answered: whether it says that it keeps sessions when it is full.

        Raises ValueError for one that gives them up.
        """
        await self._redis.ping()
        return await self._redis.refuse_eviction()

    async def answers(self) -> None:
        """Return once Redis answered."""
        await self._redis.ping()

    @property
    def ttl_s(self) -> float:
        """Seconds that a session is kept after its last commit."""
        return self._ttl_ms / 1000

    @property
    def unbroken_s(self) -> float:
        """Seconds since a call to the store last failed, also if it was repeated with success."""
        return self._redis.unbroken_s

    async def secret(self) -> bytes:
        """Return the secret that keys session ids; it stays as long as the store."""
        secret: bytes = await self._secret([SECRET_KEY], [secrets.token_bytes(SECRET_BYTES)])
        return secret

    def expired(self) -> NotFoundError:
        """Return the error of a session that was there, and is not kept any more."""
        kept = f"sessions are kept for {self._ttl_ms / 1000:g} s after their last commit"
        return NotFoundError(f"the session has expired, or the store lost all of it; {kept}; begin a new one")

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def create(
        self,
        session_id: str,
        fingerprint: bytes,
        request: bytes,
        prompt: EncodedPrompt,
        model: ModelInfo | None = None,
    ) -> None:
        """Begin a session; nothing happens if it exists with the same fingerprint. Raises AlreadyExistsError otherwise.

        `fingerprint` is the request's; `model` is the target that the text will belong to.
        """
        session = SessionRecord(
            session_id=session_id,
            fingerprint=fingerprint,
            epoch=0,
            status=Status.ACTIVE,
            request=request,
            model=model,
            prompt=tuple(prompt.tokens),
            prompt_digest=prompt.digest,
            emitted=(),
            digest=prompt.digest,
            finish=None,
            statistics=Statistics(),
            incarnation=f"{self._outside.random_bits(64):016x}",
        )
        arguments = [fingerprint, self._ttl_ms, pack_tokens(prompt.tokens), *fields_of(session)]
        if await self._create(keys(session_id), arguments) == b"conflict":
            raise AlreadyExistsError("this request_id was used with other parameters; send a new request_id")

    async def claim(self, session_id: str, served: ModelInfo | None = None) -> SessionRecord:
        """Take a session over and return it; without text it takes the model `served` now. Raises as `read`."""
        return _readable(await self._read(session_id, "1", pack_model(served)))

    async def read(self, session_id: str) -> SessionRecord:
        """Return a session as it is, without its log probabilities.

        Raises NotFoundError, DataLossError for one that is marked as lost.
        """
        return _readable(await self._read(session_id, "0", b""))

    async def find(self, session_id: str) -> SessionRecord | None:
        """Return a session as it is, without its log probabilities, even if it is lost; None if there is none."""
        return await self._read(session_id, "0", b"")

    async def commit(self, session_id: str, epoch: int, step: Round, statistics: Statistics) -> None:
        """Append a round.

        Raises FencedError if another coordinator owns the session, SessionCancelled if it was cancelled,
        DataLossError if the store holds less than, or other than, what this coordinator committed.
        """
        arguments = [
            epoch,
            step.base_length,
            step.base_digest,
            step.digest,
            pack_tokens([entry.token for entry in step.emitted]),
            bytes(entry.origin.value for entry in step.emitted),
            b"".join(pack_logprobs(entry.logprobs) for entry in step.emitted if entry.logprobs),
            self._ttl_ms,
            (Status.FINISHED if step.finish else Status.ACTIVE).value,
            step.finish.name if step.finish else "",
            messages.statistics_to_proto(statistics).SerializeToString(),
        ]
        _check_owner(*await self._commit(keys(session_id), arguments))

    async def heartbeat(self, session_id: str, epoch: int, length: int, digest: bytes) -> None:
        """Keep a session from expiring during a long round; at least `length` tokens are committed.

        Raises as `commit`.
        """
        _check_owner(*await self._heartbeat(keys(session_id), [epoch, self._ttl_ms, length, digest]))

    async def compare(self, session_id: str, epoch: int, length: int, digest: bytes) -> None:
        """Ask whether the store has what was committed, of a session that nobody runs: it expires as it would.

        Raises as `commit`.
        """
        _check_owner(*await self._heartbeat(keys(session_id), [epoch, 0, length, digest]))

    async def cancel(self, session_id: str) -> Status:
        """End a session; return its state. Raises as `read`."""
        status = await self._cancel(keys(session_id), [])
        if status is None:
            raise _not_found()
        if Status(status.decode()) is Status.LOST:
            raise _lost()
        return Status(status.decode())

    async def restore(self, session: SessionRecord, over: SessionRecord | None) -> bool:
        """Store a session as it was shown; return whether the store still had `over`, so that it was done."""
        expected = [over.epoch, len(over.prompt) + len(over.emitted), over.digest] if over else ["", "", ""]
        arguments = [
            *expected,
            self._ttl_ms,
            pack_tokens([*session.prompt, *session.tokens]),
            bytes(entry.origin.value for entry in session.emitted),
            b"".join(pack_logprobs(entry.logprobs) for entry in session.emitted if entry.logprobs),
            "fingerprint",
            session.fingerprint,
            *fields_of(session),
        ]
        return bool(await self._restore(keys(session.session_id), arguments) == b"restored")

    async def lose(self, session_id: str) -> None:
        """Mark a session as lost: from now on everybody gets DataLossError."""
        await self._lose(keys(session_id), [])

    async def _read(self, session_id: str, claim: str, model: bytes) -> SessionRecord | None:
        found = await self._claim(keys(session_id), [claim, self._ttl_ms, model])
        if not found:
            return None
        try:
            return session_of(session_id, *found)
        except (KeyError, ValueError, struct.error, DecodeError) as error:
            raise UnavailableError(f"the session store gave a malformed session ({type(error).__name__})") from error


def open_store(
    url: str, ttl_s: float, password_file: Path | None = None, *, num_replicas: int = 0, patience_s: float = PATIENCE_S
) -> SessionStore:
    """Return the store at an address, or one in this process ("memory"). Raises ValueError for a wrong address."""
    return SessionStore(open_redis(url, password_file, num_replicas=num_replicas, patience_s=patience_s), ttl_s)


def keys(session_id: str) -> list[str]:
    """Return a session's keys; the braces keep them in one cluster slot."""
    return [f"specdec:{{{session_id}}}:{part}" for part in ("meta", "tokens", "origins", "logprobs")]


def _is_outcome(reply: Any) -> bool:
    """Return whether a reply is an outcome with its facts."""
    return isinstance(reply, list) and bool(reply) and (reply[0], len(reply)) in OUTCOMES


def _is_contents(reply: Any) -> bool:
    """Return whether a reply is a session's fields and packed lists, or empty: there is none."""
    if not isinstance(reply, list) or len(reply) not in (0, 4):
        return False
    return not reply or (isinstance(reply[0], list | Mapping) and all(isinstance(part, bytes) for part in reply[1:]))


def _is_status(reply: Any) -> bool:
    """Return whether a reply is a session's status, or None: there is none."""
    return reply is None or reply in [status.value.encode() for status in Status]


def _check_owner(outcome: bytes, *facts: bytes) -> None:
    """Raise what a script says against the caller being the owner of a session as the store has it."""
    if outcome == b"fenced":
        raise FencedError("another coordinator has taken this session over; resume it there", epoch=facts[0].decode())
    if outcome == b"cancelled":
        raise SessionCancelled
    if outcome in (b"gone", b"conflict"):
        raise DataLossError("the session store lost what was committed; begin a new session")


def _readable(found: SessionRecord | None) -> SessionRecord:
    if found is None:
        raise _not_found()
    if found.status is Status.LOST:
        raise _lost()
    return found


def _lost() -> DataLossError:
    return DataLossError("the session store lost text that was shown of this session; begin a new session")


def _not_found() -> NotFoundError:
    return NotFoundError("there is no such session, or it has expired; begin a new one with Generate")
