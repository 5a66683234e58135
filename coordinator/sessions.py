"""Sessions in Redis: one idempotent Lua call a round, fenced by epoch, chained by digest.

Safety is the epoch's: a commit names the epoch, length and digest that it builds on, and the script refuses anything
else. A commit whose reply was lost is recognised when it is repeated, so the client library may retry. Who runs a
session is for the lease to say (lease.lua): while it lasts, the others read.

Where the sessions are: coordinator/stores.
"""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator.generation import Round
from coordinator.prompts import EncodedPrompt
from coordinator.session_ids import SECRET_BYTES
from coordinator.session_record import (
    LogEnd,
    SessionNews,
    SessionRecord,
    Status,
    fields_of,
    news_of,
    pack_model,
    pack_tokens,
    packed_logprobs,
    session_of,
)
from coordinator.session_replies import (
    LeasedElsewhere,
    decoding,
    is_contents,
    is_news,
    is_outcome,
    is_status,
    lost,
    lost_commits,
    not_found,
    refusal,
)
from coordinator.stores.client import PATIENCE_S, RedisClient
from coordinator.stores.opening import open_redis
from specdec import messages
from specdec.errors import AlreadyExistsError, NotFoundError, UnavailableError
from specdec.outside import REAL, Outside
from specdec.types import ModelInfo, Statistics

SECRET_KEY = "specdec:secret"
LEASE_S = 2.0  # a coordinator that dies is replaced after it: clients wait for little else
RELEASE_TIMEOUT_S = 1.0  # what was not released by then lapses soon


Beat = tuple[str, int, int, bytes]
"""What an owner says of a session when it renews its lease: session, epoch, committed length and digest."""


class SessionStore:
    """Sessions in one Redis. Every method raises UnavailableError while Redis does not answer."""

    def __init__(self, redis: RedisClient, ttl_s: float, outside: Outside = REAL, lease_s: float = LEASE_S) -> None:
        self._redis = redis
        self._outside = outside
        self._ttl_ms, self._lease_ms = int(ttl_s * 1000), int(lease_s * 1000)
        self._create = redis.script("create", lambda reply: reply in (b"created", b"exists", b"conflict"))
        self._commit, self._heartbeat = redis.script("commit", is_outcome), redis.script("heartbeat", is_outcome)
        self._heartbeats = redis.script_for_many("heartbeat", is_outcome)
        self._claim, self._cancel = redis.script("claim", is_contents), redis.script("cancel", is_status)
        self._release = redis.script("release", lambda reply: reply == b"released")
        self._tail = redis.script("tail", is_news)
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
    def lease_s(self) -> float:
        """Seconds after its last commit or heartbeat for which a session is left to its owner."""
        return self._lease_ms / 1000

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

    async def claim(self, session_id: str, served: ModelInfo | None = None, owner: str = "") -> SessionRecord:
        """Take a session over and return it; without text it takes the model `served` now.

        `owner` is the caller's name, which keeps others away as long as its lease lasts. Raises as `read`,
        LeasedElsewhere while another one has a lease.
        """
        return _readable(await self._read(session_id, "1", pack_model(served), owner))

    async def release(self, session_id: str, epoch: int) -> None:
        """End the lease of a session that its owner runs no more; never raises: else it lapses."""
        with suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self._release(keys(session_id), [epoch])

    async def tail(self, session_id: str, end: LogEnd) -> tuple[SessionNews, LogEnd]:
        """Return what the log has gained since it ended at `end`, log probabilities included, and its end now.

        Raises as `read`, DataLossError for a log that does not go on from there.
        """
        found = await self._tail(keys(session_id), [end.length, end.num_logprob_bytes])
        if not found:
            raise self.expired()
        with decoding():
            news = news_of(found)
        if news.status is Status.LOST:
            raise lost()
        end = end.after(news.emitted)
        if (news.length, news.digest) != (end.length, end.digest):
            raise lost_commits()
        return news, end

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
            packed_logprobs(step.emitted),
            self._ttl_ms,
            (Status.FINISHED if step.finish else Status.ACTIVE).value,
            step.finish.name if step.finish else "",
            messages.statistics_to_proto(statistics).SerializeToString(),
            self._lease_ms,
        ]
        _check_owner(await self._commit(keys(session_id), arguments))

    async def heartbeat(self, session_id: str, epoch: int, length: int, digest: bytes) -> None:
        """Renew the lease and keep a session from expiring during a long round; `length` tokens or more are committed.

        Raises as `commit`.
        """
        _check_owner(await self._heartbeat(keys(session_id), self._beat(epoch, length, digest)))

    async def heartbeats(self, beats: Sequence[Beat]) -> list[Exception | None]:
        """Do the same for many sessions at once, without repeating; return what `heartbeat` would raise for each.

        A call that failed has no say: None.
        """
        calls = [(keys(name), self._beat(epoch, length, digest)) for name, epoch, length, digest in beats]
        return [refusal(reply) for reply in await self._heartbeats(calls)]

    def _beat(self, epoch: int, length: int, digest: bytes) -> list[Any]:
        return [epoch, self._ttl_ms, length, digest, self._lease_ms]

    async def compare(self, session_id: str, epoch: int, length: int, digest: bytes) -> None:
        """Ask whether the store has what was committed, of a session that nobody runs: it expires as it would.

        Raises as `commit`.
        """
        _check_owner(await self._heartbeat(keys(session_id), [epoch, 0, length, digest, 0]))

    async def cancel(self, session_id: str, at_epoch: int | None = None) -> Status:
        """End a session, with `at_epoch` only if nobody has claimed it since; return its state. Raises as `read`."""
        status = await self._cancel(keys(session_id), ["" if at_epoch is None else at_epoch])
        if status is None:
            raise not_found()
        if Status(status.decode()) is Status.LOST:
            raise lost()
        return Status(status.decode())

    async def restore(self, session: SessionRecord, over: SessionRecord | None, rest_s: float = 0.0) -> bool:
        """Store a session as it was shown; return whether the store still had `over`, so that it was done.

        Nobody may run it for `rest_s` seconds: a claim raises LeasedElsewhere.
        """
        expected = [over.epoch, len(over.prompt) + len(over.emitted), over.digest] if over else ["", "", ""]
        arguments = [
            *expected,
            self._ttl_ms,
            pack_tokens([*session.prompt, *session.tokens]),
            bytes(entry.origin.value for entry in session.emitted),
            packed_logprobs(session.emitted),
            int(rest_s * 1000),
            "fingerprint",
            session.fingerprint,
            *fields_of(session),
        ]
        return bool(await self._restore(keys(session.session_id), arguments) == b"restored")

    async def lose(self, session_id: str) -> None:
        """Mark a session as lost: from now on everybody gets DataLossError."""
        await self._lose(keys(session_id), [])

    async def _read(self, session_id: str, claim: str, model: bytes, owner: str = "") -> SessionRecord | None:
        found = await self._claim(keys(session_id), [claim, self._ttl_ms, model, owner, self._lease_ms])
        if not found:
            return None
        *contents, is_leased = found
        with decoding():
            session = session_of(session_id, *contents)
        if is_leased:
            raise LeasedElsewhere(session)
        return session


def open_store(
    url: str,
    ttl_s: float,
    password_file: Path | None = None,
    *,
    num_replicas: int = 0,
    patience_s: float = PATIENCE_S,
    lease_s: float = LEASE_S,
) -> SessionStore:
    """Return the store at an address, or one in this process ("memory"). Raises ValueError for a wrong address."""
    redis = open_redis(url, password_file, num_replicas=num_replicas, patience_s=patience_s)
    return SessionStore(redis, ttl_s, lease_s=lease_s)


def keys(session_id: str) -> list[str]:
    """Return a session's keys; the braces keep them in one cluster slot."""
    return [f"specdec:{{{session_id}}}:{part}" for part in ("meta", "tokens", "origins", "logprobs")]


def _check_owner(outcome: Sequence[bytes]) -> None:
    """Raise what a script says against the caller being the owner of a session as the store has it."""
    if against := refusal(outcome):
        raise against


def _readable(found: SessionRecord | None) -> SessionRecord:
    if found is None:
        raise not_found()
    if found.status is Status.LOST:
        raise lost()
    return found
