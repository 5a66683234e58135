"""What a client sees of a session: chunks, the completion that they add up to, and the check that they fit together.

Pure values. `Transcript` makes resuming safe: tokens that a server sends again must be those that it sent before, and
new ones must begin where those end.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise

from specdec.errors import DataLossError, ModelMismatchError
from specdec.messages import model_from_proto, sampling_from_proto, statistics_from_proto
from specdec.types import FinishReason, ModelInfo, RoundDraft, SamplingParams, Statistics, TokenLogprobs, TokenOrigin
from specdec.v1 import generation_pb2


class SessionStatus(Enum):
    """The state of a session in the store."""

    ACTIVE = 1
    FINISHED = 2
    CANCELLED = 3


@dataclass(frozen=True, slots=True)
class Usage:
    """What a session cost, in tokens."""

    num_prompt_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """How a session ended."""

    reason: FinishReason
    usage: Usage
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round committed. `digest` is the hash chain over prompt and completion up to this chunk's end."""

    session_id: str
    offset: int  # completion tokens before this chunk
    tokens: tuple[int, ...]  # [N]
    text: str
    origins: tuple[TokenOrigin, ...]  # [N]
    digest: bytes  # 16 bytes
    logprobs: tuple[TokenLogprobs, ...] = ()  # [N] if the request set num_logprobs, else empty
    text_ends: tuple[int, ...] = ()  # [N]: where each token's certain text ends within `text`, in characters
    finish: Finish | None = None  # only in the last chunk
    proof: bytes = b""  # that the service sent the text up to this chunk's end
    rounds: tuple[RoundDraft, ...] = ()  # that end in this chunk; none for tokens that were read from the store

    @property
    def end(self) -> int:
        """Return the completion tokens up to the end of this chunk."""
        return self.offset + len(self.tokens)

    @property
    def pieces(self) -> tuple[str, ...]:
        """Return each token's part of `text`, then what became certain only with the end."""
        return tuple(self.text[begin:end] for begin, end in pairwise((0, *self.text_ends, len(self.text))))

    def after(self, offset: int) -> "Chunk":
        """Return the part from `offset` on, which lies within the chunk."""
        count = offset - self.offset
        cut = self.text_ends[count - 1] if count else 0
        return replace(
            self,
            offset=offset,
            tokens=self.tokens[count:],
            text=self.text[cut:],
            origins=self.origins[count:],
            logprobs=self.logprobs[count:],
            text_ends=tuple(end - cut for end in self.text_ends[count:]),
            rounds=tuple(each for each in self.rounds if each.end > offset),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """The chunks of a finished session together, from the first one that the stream yielded."""

    session_id: str
    tokens: tuple[int, ...]  # [N]
    text: str
    origins: tuple[TokenOrigin, ...]  # [N]
    logprobs: tuple[TokenLogprobs, ...]  # [N] if the request set num_logprobs, else empty
    digest: bytes  # 16 bytes
    finish: Finish
    rounds: tuple[RoundDraft, ...] = ()  # as far as the chunks told of them

    @property
    def finish_reason(self) -> FinishReason:
        """Return why generation ended."""
        return self.finish.reason

    @property
    def usage(self) -> Usage:
        """Return the tokens of prompt and completion."""
        return self.finish.usage

    @property
    def statistics(self) -> Statistics:
        """Return the sums over the session's rounds."""
        return self.finish.statistics

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "Completion":
        """Join the chunks of a finished session. Raises ValueError if the last one has no `finish`."""
        finish = chunks[-1].finish if chunks else None
        if finish is None:
            raise ValueError(f"the session has not finished: none of {len(chunks)} chunks has `finish`")
        return cls(
            session_id=chunks[-1].session_id,
            tokens=tuple(token for chunk in chunks for token in chunk.tokens),
            text="".join(chunk.text for chunk in chunks),
            origins=tuple(origin for chunk in chunks for origin in chunk.origins),
            logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
            digest=chunks[-1].digest,
            finish=finish,
            rounds=tuple(each for chunk in chunks for each in chunk.rounds),
        )


@dataclass(frozen=True, slots=True)
class Session:
    """What the store holds of a session."""

    session_id: str
    status: SessionStatus
    epoch: int
    num_prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    digest: bytes
    sampling: SamplingParams
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The models of a service. No drafters means plain decoding."""

    target: ModelInfo
    drafters: tuple[str, ...]
    context_length: int
    max_draft_tokens: int


@dataclass(slots=True)
class Transcript:
    """The tokens of one session that a client has seen, from `start` on."""

    session_id: str = ""
    start: int = 0
    digests: dict[int, bytes] = field(default_factory=dict)  # at the end of each chunk
    tokens: list[int] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)  # one a token
    proof: bytes = b""  # that the service sent the tokens up to `end`
    finished: bool = False

    @property
    def end(self) -> int:
        """Return the completion tokens that the client has."""
        return self.start + len(self.tokens)

    @property
    def digest(self) -> bytes:
        """Return the digest at `end`; empty if it is not known."""
        return self.digests.get(self.end, b"")

    def admit(self, chunk: Chunk) -> Chunk | None:
        """Return the new part of a chunk, or None. Raises DataLossError if it contradicts what was seen."""
        self._check(chunk)
        news = chunk.after(min(max(self.end, chunk.offset), chunk.end))
        self.session_id = chunk.session_id
        self.digests[chunk.end] = chunk.digest
        self.tokens += news.tokens
        self.origins += news.origins
        if chunk.end == self.end:
            self.proof = chunk.proof
        self.finished = chunk.finish is not None
        return news if news.tokens or news.finish else None

    def _check(self, chunk: Chunk) -> None:
        if self.session_id and chunk.session_id != self.session_id:
            raise DataLossError(f"asked for session {self.session_id}, the server sent {chunk.session_id}")
        where = f"session {chunk.session_id}: the server sent the tokens from {chunk.offset} to {chunk.end}"
        if chunk.offset > self.end:
            raise DataLossError(f"{where}, but the client has only {self.end}; tokens are missing")
        if self.digests.get(chunk.end, chunk.digest) != chunk.digest:
            raise DataLossError(f"{where} again with another digest; the store holds other text than was shown")
        again = zip(range(chunk.offset, self.end), chunk.tokens, strict=False)
        if any(self.tokens[place - self.start] != token for place, token in again if place >= self.start):
            raise DataLossError(f"{where} again with other tokens; the store holds other text than was shown")


@contextmanager
def _readable() -> Iterator[None]:
    """Turn a value that this version does not know into ModelMismatchError."""
    try:
        yield
    except ValueError as error:
        problem = f"the server sent a value that this client does not know ({error}); update the client"
        raise ModelMismatchError(problem) from error


def chunk_from_proto(message: generation_pb2.GenerateResponse) -> Chunk:
    """Convert. Raises ModelMismatchError for what this version cannot read."""
    if not len(message.tokens) == len(message.origins) == len(message.text_ends):
        raise ModelMismatchError("the server sent a chunk whose lists differ in length; update client or server")
    with _readable():
        return _chunk(message)


def _chunk(message: generation_pb2.GenerateResponse) -> Chunk:
    return Chunk(
        session_id=message.session_id,
        offset=message.offset,
        tokens=tuple(message.tokens),
        text=message.text,
        origins=tuple(map(TokenOrigin, message.origins)),
        digest=message.digest,
        logprobs=tuple(
            TokenLogprobs(entry.logprob, tuple((top.token, top.logprob) for top in entry.top))
            for entry in message.logprobs
        ),
        text_ends=tuple(message.text_ends),
        finish=finish_from_proto(message.finish) if message.HasField("finish") else None,
        proof=message.proof,
        rounds=tuple(RoundDraft(each.drafter, each.num_draft_tokens, each.depth, each.end) for each in message.rounds),
    )


def finish_from_proto(message: generation_pb2.Finish) -> Finish:
    """Convert."""
    usage = Usage(message.usage.num_prompt_tokens, message.usage.num_completion_tokens)
    return Finish(FinishReason(message.reason), usage, statistics_from_proto(message.statistics))


def session_from_proto(message: generation_pb2.GetSessionResponse) -> Session:
    """Convert. Raises ModelMismatchError for what this version cannot read."""
    with _readable():
        return Session(
            session_id=message.session_id,
            status=SessionStatus(message.status),
            epoch=message.epoch,
            num_prompt_tokens=message.num_prompt_tokens,
            tokens=tuple(message.tokens),
            text=message.text,
            digest=message.digest,
            sampling=sampling_from_proto(message.sampling),
            finish=finish_from_proto(message.finish) if message.HasField("finish") else None,
        )


def status_from_proto(message: generation_pb2.CancelSessionResponse) -> SessionStatus:
    """Convert. Raises ModelMismatchError for what this version cannot read."""
    with _readable():
        return SessionStatus(message.status)


def served_model_from_proto(message: generation_pb2.GetModelResponse) -> ServedModel:
    """Convert."""
    return ServedModel(
        target=model_from_proto(message.target),
        drafters=tuple(message.drafters),
        context_length=message.context_length,
        max_draft_tokens=message.max_draft_tokens,
    )
