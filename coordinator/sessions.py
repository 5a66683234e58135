"""Sessions in Redis: one idempotent Lua call a round, fenced by epoch, chained by digest.

Safety is the epoch's: a commit names the epoch, length and digest that it builds on, and the script refuses anything
else. A commit whose reply was lost is recognised when it is repeated, so the client library may retry.

Where the sessions are: coordinator/stores.
"""

import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from coordinator.generation import OutputToken, Round
from coordinator.prompts import EncodedPrompt
from coordinator.session_ids import SECRET_BYTES
from coordinator.stores.client import PATIENCE_S, RedisClient
from coordinator.stores.opening import open_redis
from specdec import messages
from specdec.errors import AlreadyExistsError, DataLossError, FencedError, NotFoundError, UnavailableError
from specdec.exact.prefix import chain
from specdec.outside import REAL, Outside
from specdec.types import FinishReason, ModelInfo, Statistics, TokenLogprobs, TokenOrigin
from specdec.v1 import generation_pb2, types_pb2

# what a script says to an owner, and the length of such a reply
OUTCOMES = [(b"committed", 1), (b"alive", 1), (b"cancelled", 1), (b"gone", 1), (b"fenced", 2), (b"conflict", 2)]
SECRET_KEY = "specdec:secret"
UNSTARTED_STATISTICS = generation_pb2.Statistics().SerializeToString()


class Status(Enum):
    """The state of a session, by the word that the store holds."""

    ACTIVE = "active"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What the store holds of a session."""

    session_id: str
    epoch: int
    status: Status
    request: bytes  # the serialised GenerateRequest, seed resolved
    model: ModelInfo | None  # the target that the text belongs to; None: not recorded, as before version 0.2
    prompt: tuple[int, ...]
    prompt_digest: bytes  # empty: not recorded, as before version 0.2
    emitted: tuple[OutputToken, ...]
    digest: bytes
    finish: FinishReason | None
    statistics: Statistics
    incarnation: str = ""  # which session of this id; empty: not recorded, as before version 0.3

    def check_position(self, offset: int, digest: bytes) -> None:
        """Raise DataLossError if a client's `offset` tokens with this digest (empty: not compared) are not all here."""
        if offset > len(self.emitted):
            raise DataLossError(f"offset {offset} is past the {len(self.emitted)} tokens that the session store holds")
        base = self.prompt_digest or chain(b"", self.prompt)
        if digest and digest != chain(base, [entry.token for entry in self.emitted[:offset]]):
            raise DataLossError(f"the session store holds other tokens than the client, up to offset {offset}")


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
        self._secret = redis.script("secret", lambda reply: isinstance(reply, bytes) and len(reply) == SECRET_BYTES)

    async def ping(self) -> bool:
        """Return once Redis answered: whether it says that it keeps sessions when it is full.

        Raises ValueError for one that gives them up.
        """
        await self._redis.ping()
        return await self._redis.refuse_eviction()

    async def secret(self) -> bytes:
        """Return the secret that keys session ids; it stays as long as the store."""
        secret: bytes = await self._secret([SECRET_KEY], [secrets.token_bytes(SECRET_BYTES)])
        return secret

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
        meta = {
            "epoch": 0,
            "length": len(prompt.tokens),
            "prompt_length": len(prompt.tokens),
            "digest": prompt.digest,
            "prompt_digest": prompt.digest,
            "status": Status.ACTIVE.value,
            "finish": "",
            "request": request,
            "model": pack_model(model),
            "incarnation": f"{self._outside.random_bits(64):016x}",
            "statistics": UNSTARTED_STATISTICS,
        }
        pairs: list[Any] = [item for pair in meta.items() for item in pair]
        arguments = [fingerprint, self._ttl_ms, pack_tokens(prompt.tokens), *pairs]
        if await self._create(keys(session_id), arguments) == b"conflict":
            raise AlreadyExistsError("this request_id was used with other parameters; send a new request_id")

    async def claim(self, session_id: str, served: ModelInfo | None = None) -> SessionRecord:
        """Take a session over and return it; without text it takes the model `served` now. Raises NotFoundError."""
        return await self._read(session_id, "1", pack_model(served))

    async def read(self, session_id: str) -> SessionRecord:
        """Return a session as it is, without its log probabilities. Raises NotFoundError."""
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

    async def heartbeat(self, session_id: str, epoch: int) -> None:
        """Keep a session from expiring during a long round. Raises as `commit`."""
        _check_owner(*await self._heartbeat(keys(session_id), [epoch, self._ttl_ms]))

    async def cancel(self, session_id: str) -> Status:
        """End a session; return its state. Raises NotFoundError."""
        status = await self._cancel(keys(session_id), [])
        if status is None:
            raise _not_found()
        return Status(status.decode())

    async def _read(self, session_id: str, claim: str, model: bytes) -> SessionRecord:
        found = await self._claim(keys(session_id), [claim, self._ttl_ms, model])
        if not found:
            raise _not_found()
        try:
            return _session(session_id, *found)
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


def _not_found() -> NotFoundError:
    return NotFoundError("there is no such session, or it has expired; begin a new one with Generate")


def _session(session_id: str, meta: Any, tokens: bytes, origins: bytes, logprobs: bytes) -> SessionRecord:
    entries = meta if isinstance(meta, Mapping) else dict(zip(meta[::2], meta[1::2], strict=True))
    all_tokens = unpack_tokens(tokens)
    split = int(entries[b"prompt_length"])
    completion = all_tokens[split:]
    if len(all_tokens) != int(entries[b"length"]) or len(origins) != len(completion):
        raise DataLossError("the session store holds only part of this session; begin a new one")
    details: Sequence[TokenLogprobs | None] = unpack_logprobs(logprobs) or [None] * len(completion)
    if len(details) != len(completion):
        raise DataLossError("the session store holds only part of this session's log probabilities; begin a new one")
    return SessionRecord(
        session_id=session_id,
        epoch=int(entries[b"epoch"]),
        status=Status(entries[b"status"].decode()),
        request=entries[b"request"],
        model=unpack_model(entries.get(b"model", b"")),
        prompt=all_tokens[:split],
        prompt_digest=entries.get(b"prompt_digest", b""),
        emitted=tuple(map(OutputToken, completion, map(TokenOrigin, origins), details)),
        digest=entries[b"digest"],
        finish=FinishReason[entries[b"finish"].decode()] if entries[b"finish"] else None,
        statistics=messages.statistics_from_proto(generation_pb2.Statistics.FromString(entries[b"statistics"])),
        incarnation=entries.get(b"incarnation", b"").decode(),
    )


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32."""
    return np.array(tokens, "<u4").tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Return token ids from little-endian uint32."""
    return tuple(np.frombuffer(data, "<u4").tolist())


def pack_model(model: ModelInfo | None) -> bytes:
    """Return a model as stored; empty for none."""
    return messages.model_to_proto(model).SerializeToString() if model else b""


def unpack_model(data: bytes) -> ModelInfo | None:
    """Return a model from what is stored."""
    return messages.model_from_proto(types_pb2.ModelInfo.FromString(data)) if data else None


def pack_logprobs(logprobs: TokenLogprobs) -> bytes:
    """Return one token's log probabilities: how many top ones, its own, then pairs of token and log probability."""
    pairs = (value for pair in logprobs.top for value in pair)
    return struct.pack(f"<Bf{'If' * len(logprobs.top)}", len(logprobs.top), logprobs.logprob, *pairs)


def unpack_logprobs(data: bytes) -> list[TokenLogprobs]:
    """Return the log probabilities of all tokens, oldest first."""
    result, position = [], 0
    while position < len(data):
        layout = f"<Bf{'If' * data[position]}"
        _, logprob, *pairs = struct.unpack_from(layout, data, position)
        result.append(TokenLogprobs(logprob, tuple(zip(pairs[::2], pairs[1::2], strict=True))))
        position += struct.calcsize(layout)
    return result
