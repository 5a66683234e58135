"""The coordinator's ends of the worker streams: one bidirectional stream a session and worker.

A stream remembers how many of the session's tokens its worker holds, sends only what is new, and repeats from further
back when the worker says that it holds less. A broken stream is forgotten; the next call opens another, to whichever
worker the balancer picks, and sends everything.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc

from specdec import wire
from specdec.errors import Fenced, InvalidArgument, Overloaded, SpecdecError, Unavailable, from_rpc_error
from specdec.rpc import SESSION_METADATA_KEY
from specdec.types import ModelInfo, Proposal, SamplingParams, Scores
from specdec.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2

DESCRIBE_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 1.0  # until a stream that has failed says why
NO_PROPOSAL = Proposal()
LOST_STREAM = "a worker ended the session's stream"
RETRY_S = 0.1  # between attempts at a target worker that is not there
DRAFT_PAUSE_S = (0.25, 8.0)  # without a draft worker: first and longest pause before it is asked again


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """What a worker is told of a session when a stream opens."""

    session_id: str
    epoch: int
    sampling: SamplingParams
    num_prompt_tokens: int

    def opening(self) -> Any:
        """Return the message."""
        return wire.open_session(self.session_id, self.epoch, self.sampling, self.num_prompt_tokens)


class Reply(Protocol):
    """What the answers of both workers have."""

    cached_len: int


ReplyT = TypeVar("ReplyT", bound=Reply)


class WorkerStream(Generic[ReplyT]):
    """One session's stream to one kind of worker."""

    def __init__(self, call: Callable[..., Any], session_id: str, opening: Any, closing: Any, timeout_s: float) -> None:
        self._call = call
        self._metadata = ((SESSION_METADATA_KEY, session_id),)
        self._opening, self._closing = opening, closing
        self._timeout_s = timeout_s
        self._stream: Any = None
        self._held = 0  # of the committed tokens, how many this stream's worker has
        self.num_fed = 0  # committed tokens that the worker was sent with the last question

    async def ask(self, committed: Sequence[int], message: Callable[[int, Sequence[int]], Any]) -> ReplyT:
        """Bring the worker up to date and return its answer to `message(start, tokens)`.

        Raises the worker's SpecdecError; Unavailable if it did not answer in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask(committed, message)
        except TimeoutError:
            self.drop()
            raise Unavailable(f"a worker did not answer within {self._timeout_s:g} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            ending = await self._ending()
            self.drop()
            raise ending from error
        except BaseException:
            self.drop()
            raise

    async def _ask(self, committed: Sequence[int], message: Callable[[int, Sequence[int]], Any]) -> ReplyT:
        if self._stream is None:
            self._stream = self._call(metadata=self._metadata)
            await self._stream.write(self._opening)
        while True:
            # the last committed token is always sent: a row needs a token to follow
            start = min(self._held, len(committed) - 1)
            self.num_fed = len(committed) - start
            await self._stream.write(message(start, committed[start:]))
            reply = await self._stream.read()
            if reply is grpc.aio.EOF:
                raise asyncio.InvalidStateError("the worker ended the stream")
            if reply.cached_len >= start:
                self._held = min(reply.cached_len, len(committed))
                return reply  # type: ignore[no-any-return]
            self._held = reply.cached_len

    async def _ending(self) -> SpecdecError:
        """Return why the stream ended; what a write or a read raises on a stream that ends is not the reason."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                code = await self._stream.code()
                trailers = await self._stream.initial_metadata(), await self._stream.trailing_metadata()
                details = await self._stream.details()
        except TimeoutError:
            return Unavailable(LOST_STREAM)
        if code == grpc.StatusCode.OK:
            return Unavailable(LOST_STREAM)
        return from_rpc_error(grpc.aio.AioRpcError(code, *trailers, details))

    def keep(self, num_tokens: int, cached_len: int) -> None:
        """Note that the worker's first `num_tokens` tokens are committed now, of the `cached_len` that it holds."""
        if self._stream is not None:
            self._held = min(num_tokens, cached_len)

    def drop(self) -> None:
        """Forget the stream; the worker keeps its cache for whoever comes back."""
        if self._stream is not None:
            self._stream.cancel()
        self._stream, self._held = None, 0

    async def close(self) -> None:
        """End the session at the worker."""
        if self._stream is None:
            return
        try:
            async with asyncio.timeout(1.0):
                await self._stream.write(self._closing)
                await self._stream.done_writing()
                await self._stream.read()
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
            pass  # the worker is gone, and its cache with it
        self.drop()


# ---- target


@dataclass(frozen=True, slots=True)
class Scored:
    """The target's answer and how long it took, as the coordinator saw it."""

    scores: Scores
    cached_len: int
    elapsed_s: float
    num_fed: int = 1  # committed tokens that the worker had to read first


class TargetWorkers:
    """The target workers behind one address."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float, patience_s: float) -> None:
        self._stub = target_pb2_grpc.TargetServiceStub(channel)
        self._timeout_s, self._patience_s = timeout_s, patience_s

    async def describe(self) -> ModelInfo:
        """Return the model that one of them serves. Raises Unavailable while none answers."""
        metadata = ((SESSION_METADATA_KEY, "describe"),)
        request = target_pb2.GetTargetRequest()
        reply = await _unary(self._stub.GetTarget(request, metadata=metadata, timeout=DESCRIBE_TIMEOUT_S))
        return wire.model_from_proto(reply.model)

    def open(self, session: WorkerSession, vocab_size: int) -> "Scorer":
        """Return a session's scorer; its stream opens with the first round."""
        opening = target_pb2.ScoreRequest(open=target_pb2.OpenTarget(session=session.opening()))
        closing = target_pb2.ScoreRequest(close=types_pb2.CloseSession())
        stream: WorkerStream[target_pb2.ScoreResponse] = WorkerStream(
            self._stub.Score, session.session_id, opening, closing, self._timeout_s
        )
        return Scorer(stream, vocab_size, session.sampling.num_logprobs is not None, self._patience_s)


class Scorer:
    """Scores one session's proposals; waits for a target worker to be back, for as long as the session has patience."""

    def __init__(
        self,
        stream: WorkerStream[target_pb2.ScoreResponse],
        vocab_size: int,
        wants_logprobs: bool,
        patience_s: float,
    ) -> None:
        self._stream = stream
        self._vocab_size, self._wants_logprobs = vocab_size, wants_logprobs
        self._patience_s = patience_s

    async def score(self, committed: Sequence[int], proposal: Proposal) -> Scored:
        """Return K + 1 rows. Repeating a call is harmless: the same message has the same answer."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return await self._score(committed, proposal)
            except (Unavailable, Overloaded):
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _score(self, committed: Sequence[int], proposal: Proposal) -> Scored:
        supports = wire.rows_to_proto(proposal.rows, with_probs=False)

        def message(start: int, tokens: Sequence[int]) -> target_pb2.ScoreRequest:
            score = target_pb2.Score(start=start, tokens=tokens, draft_tokens=proposal.tokens, supports=supports)
            return target_pb2.ScoreRequest(score=score)

        begin = time.perf_counter()
        reply = await self._stream.ask(committed, message)
        try:
            scores = wire.scores_from_proto(reply, proposal, self._vocab_size)
            if bool(scores.logprobs) != self._wants_logprobs:
                raise wire.MalformedReply("log probabilities that are missing, or were not asked for")
        except (wire.MalformedReply, ValueError) as error:
            self._stream.drop()
            raise Unavailable(f"a target worker answered against the contract: {error}") from error
        return Scored(scores, reply.cached_len, time.perf_counter() - begin, self._stream.num_fed)

    def keep(self, num_tokens: int, cached_len: int) -> None:
        """Note how much of what the worker holds is committed now."""
        self._stream.keep(num_tokens, cached_len)

    async def close(self) -> None:
        """End the session at the worker."""
        await self._stream.close()

    def drop(self) -> None:
        """Leave the worker its cache, for whoever resumes the session."""
        self._stream.drop()


# ---- draft


@dataclass(frozen=True, slots=True)
class Drafted:
    """A proposal and how long it took; nothing was drafted where no draft worker answers."""

    proposal: Proposal = NO_PROPOSAL
    cached_len: int | None = None  # None: no worker was asked, or none answered
    elapsed_s: float = 0.0
    num_fed: int = 1  # committed tokens that the worker had to read first


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What a proposal may hold."""

    vocab_size: int  # the target's
    context_length: int = 0  # the draft model's; 0: none


class DraftWorkers:
    """The draft workers behind one address."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub = draft_pb2_grpc.DraftServiceStub(channel)
        self._timeout_s = timeout_s

    async def describe(self) -> dict[str, ModelInfo]:
        """Return the drafters on offer, the default first. Raises Unavailable while no worker answers."""
        metadata = ((SESSION_METADATA_KEY, "describe"),)
        request = draft_pb2.GetDraftRequest()
        reply = await _unary(self._stub.GetDraft(request, metadata=metadata, timeout=DESCRIBE_TIMEOUT_S))
        return {drafter.name: wire.model_from_proto(drafter.model) for drafter in reply.drafters}

    def open(
        self, session: WorkerSession, drafter: str, limits: DraftLimits, on_failure: Callable[[SpecdecError], None]
    ) -> "SessionDrafter":
        """Return a session's drafter; its stream opens with the first round that drafts."""
        opening = draft_pb2.ProposeRequest(open=draft_pb2.OpenDraft(session=session.opening(), drafter=drafter))
        closing = draft_pb2.ProposeRequest(close=types_pb2.CloseSession())
        stream: WorkerStream[draft_pb2.ProposeResponse] = WorkerStream(
            self._stub.Propose, session.session_id, opening, closing, self._timeout_s
        )
        return SessionDrafter(stream, limits, on_failure)


class NoDrafter:
    """Drafts nothing: plain decoding."""

    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Drafted:
        """Return an empty proposal."""
        return Drafted()

    def keep(self, num_tokens: int, cached_len: int) -> None:
        """Nothing is held."""

    async def close(self) -> None:
        """Nothing is open."""

    def drop(self) -> None:
        """Nothing is open."""


class SessionDrafter:
    """Drafts for one session. Never raises: without a draft worker it drafts nothing, and asks again after a pause."""

    def __init__(
        self,
        stream: WorkerStream[draft_pb2.ProposeResponse],
        limits: DraftLimits,
        on_failure: Callable[[SpecdecError], None],
    ) -> None:
        self._stream = stream
        self._limits = limits
        self._on_failure = on_failure
        self._pause_s = DRAFT_PAUSE_S[0]
        self._ask_again_at = 0.0

    @property
    def available(self) -> bool:
        """Say whether it is worth asking now."""
        return time.monotonic() >= self._ask_again_at

    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Drafted:
        """Return at most K tokens with their rows."""
        fits = not self._limits.context_length or len(committed) + num_draft_tokens <= self._limits.context_length
        if not num_draft_tokens or not fits or not self.available:
            return Drafted()
        begin = time.perf_counter()
        try:
            reply, proposal = await self._propose(committed, num_draft_tokens)
        except SpecdecError as error:
            self._fail(error)
            return Drafted(elapsed_s=time.perf_counter() - begin)
        self._pause_s = DRAFT_PAUSE_S[0]
        return Drafted(proposal, reply.cached_len, time.perf_counter() - begin, self._stream.num_fed)

    async def _propose(
        self, committed: Sequence[int], num_draft_tokens: int
    ) -> tuple[draft_pb2.ProposeResponse, Proposal]:
        def message(start: int, tokens: Sequence[int]) -> draft_pb2.ProposeRequest:
            propose = draft_pb2.Propose(start=start, tokens=tokens, num_draft_tokens=num_draft_tokens)
            return draft_pb2.ProposeRequest(propose=propose)

        reply = await self._stream.ask(committed, message)
        try:
            return reply, wire.proposal_from_proto(reply, num_draft_tokens, self._limits.vocab_size)
        except (wire.MalformedReply, ValueError) as error:
            self._stream.drop()
            raise Unavailable(f"a draft worker answered against the contract: {error}") from error

    def _fail(self, error: SpecdecError) -> None:
        """Do without for a while; what the worker refuses outright it will refuse again, so wait longest then."""
        if isinstance(error, InvalidArgument | Fenced):
            self._pause_s = DRAFT_PAUSE_S[1]
        self._ask_again_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, DRAFT_PAUSE_S[1])
        self._on_failure(error)

    def keep(self, num_tokens: int, cached_len: int) -> None:
        """Note how much of what the worker holds is committed now."""
        self._stream.keep(num_tokens, cached_len)

    async def close(self) -> None:
        """End the session at the worker."""
        await self._stream.close()

    def drop(self) -> None:
        """Leave the worker its cache, for whoever resumes the session."""
        self._stream.drop()


async def _unary(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
