"""What the store holds of a session, as values and as the fields and bytes that Redis has."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from coordinator.generation import OutputToken
from specdec import messages
from specdec.errors import DataLossError
from specdec.exact.prefix import chain
from specdec.types import FinishReason, ModelInfo, Statistics, TokenLogprobs, TokenOrigin
from specdec.v1 import generation_pb2, types_pb2


class Status(Enum):
    """The state of a session, by the word that the store holds."""

    ACTIVE = "active"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    LOST = "lost"  # clients were shown other text than the store has


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What the store holds of a session."""

    session_id: str
    fingerprint: bytes  # of the request
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

    @property
    def tokens(self) -> list[int]:
        """The completion's tokens."""
        return [entry.token for entry in self.emitted]

    @property
    def has_logprobs(self) -> bool:
        """Whether its tokens have log probabilities."""
        return generation_pb2.GenerateRequest.FromString(self.request).sampling.HasField("num_logprobs")

    def begins_with(self, other: "SessionRecord") -> bool:
        """Return whether the text begins with another session's."""
        return self.prompt == other.prompt and self.tokens[: len(other.emitted)] == other.tokens

    def holds(self, offset: int, digest: bytes) -> bool:
        """Return whether a client's `offset` tokens with this digest (empty: not compared) are all here."""
        return offset <= len(self.emitted) and (not digest or digest == self._digest_at(offset))

    def check_position(self, offset: int, digest: bytes) -> None:
        """Raise DataLossError if a client's `offset` tokens with this digest (empty: not compared) are not all here."""
        if offset > len(self.emitted):
            raise DataLossError(f"offset {offset} is past the {len(self.emitted)} tokens that the session store holds")
        if not self.holds(offset, digest):
            raise DataLossError(f"the session store holds other tokens than the client, up to offset {offset}")

    def _digest_at(self, offset: int) -> bytes:
        return chain(self.prompt_digest or chain(b"", self.prompt), self.tokens[:offset])


@dataclass(frozen=True, slots=True)
class LogEnd:
    """Where a session's log ends, as one knows it."""

    length: int  # tokens, prompt included
    digest: bytes
    num_logprob_bytes: int

    @classmethod
    def of(cls, session: SessionRecord) -> "LogEnd":
        """Return the end of a session that was read with its log probabilities."""
        return cls(len(session.prompt) + len(session.emitted), session.digest, len(packed_logprobs(session.emitted)))

    def after(self, emitted: Sequence[OutputToken]) -> "LogEnd":
        """Return the end once these are appended."""
        digest = chain(self.digest, [entry.token for entry in emitted])
        return LogEnd(self.length + len(emitted), digest, self.num_logprob_bytes + len(packed_logprobs(emitted)))


@dataclass(frozen=True, slots=True)
class SessionNews:
    """What a session's log has gained since it was read last."""

    epoch: int
    status: Status
    emitted: tuple[OutputToken, ...]
    length: int  # of the log, prompt included
    digest: bytes  # after it
    finish: FinishReason | None
    statistics: Statistics
    lease_left_s: float  # for which the log is its owner's to write; 0: anybody may claim it


def news_of(parts: Sequence[Any]) -> SessionNews:
    """Return what `tail` answers as values."""
    epoch, status, digest, finish, statistics, length, lease_left_ms, tokens, origins, logprobs = parts
    return SessionNews(
        epoch=int(epoch),
        status=Status(status.decode()),
        emitted=_emitted(unpack_tokens(tokens), origins, logprobs),
        length=int(length),
        digest=digest,
        finish=FinishReason[finish.decode()] if finish else None,
        statistics=messages.statistics_from_proto(generation_pb2.Statistics.FromString(statistics)),
        lease_left_s=lease_left_ms / 1000,
    )


def _emitted(tokens: Sequence[int], origins: bytes, logprobs: bytes) -> tuple[OutputToken, ...]:
    """Return completion tokens from lists as they are stored. Raises DataLossError where they differ in length."""
    details: Sequence[TokenLogprobs | None] = unpack_logprobs(logprobs) or [None] * len(tokens)
    if len(origins) != len(tokens):
        raise DataLossError("the session store holds only part of this session; begin a new one")
    if len(details) != len(tokens):
        raise DataLossError("the session store holds only part of this session's log probabilities; begin a new one")
    return tuple(map(OutputToken, tokens, map(TokenOrigin, origins), details))


def session_of(session_id: str, meta: Any, tokens: bytes, origins: bytes, logprobs: bytes) -> SessionRecord:
    entries = meta if isinstance(meta, Mapping) else dict(zip(meta[::2], meta[1::2], strict=True))
    all_tokens = unpack_tokens(tokens)
    split = int(entries[b"prompt_length"])
    if len(all_tokens) != int(entries[b"length"]):
        raise DataLossError("the session store holds only part of this session; begin a new one")
    return SessionRecord(
        session_id=session_id,
        fingerprint=entries[b"fingerprint"],
        epoch=int(entries[b"epoch"]),
        status=Status(entries[b"status"].decode()),
        request=entries[b"request"],
        model=unpack_model(entries.get(b"model", b"")),
        prompt=all_tokens[:split],
        prompt_digest=entries.get(b"prompt_digest", b""),
        emitted=_emitted(all_tokens[split:], origins, logprobs),
        digest=entries[b"digest"],
        finish=FinishReason[entries[b"finish"].decode()] if entries[b"finish"] else None,
        statistics=messages.statistics_from_proto(generation_pb2.Statistics.FromString(entries[b"statistics"])),
        incarnation=entries.get(b"incarnation", b"").decode(),
    )


def fields_of(session: SessionRecord) -> list[Any]:
    """Return the names and values of a session's fields, but for the request's fingerprint."""
    fields = {
        "epoch": session.epoch,
        "length": len(session.prompt) + len(session.emitted),
        "prompt_length": len(session.prompt),
        "digest": session.digest,
        "prompt_digest": session.prompt_digest,
        "status": session.status.value,
        "finish": session.finish.name if session.finish else "",
        "request": session.request,
        "model": pack_model(session.model),
        "incarnation": session.incarnation,
        "statistics": messages.statistics_to_proto(session.statistics).SerializeToString(),
    }
    return [item for pair in fields.items() for item in pair]


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


def packed_logprobs(emitted: Iterable[OutputToken]) -> bytes:
    """Return the log probabilities of those tokens that have some."""
    return b"".join(pack_logprobs(entry.logprobs) for entry in emitted if entry.logprobs)


def unpack_logprobs(data: bytes) -> list[TokenLogprobs]:
    """Return the log probabilities of all tokens, oldest first."""
    result, position = [], 0
    while position < len(data):
        layout = f"<Bf{'If' * data[position]}"
        _, logprob, *pairs = struct.unpack_from(layout, data, position)
        result.append(TokenLogprobs(logprob, tuple(zip(pairs[::2], pairs[1::2], strict=True))))
        position += struct.calcsize(layout)
    return result
