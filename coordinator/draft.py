"""The draft workers as the coordinator sees them: what they offer, and proposals, or none where nobody answers."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from coordinator.streams import DESCRIBE_TIMEOUT_S, WorkerSession, WorkerStream, answered, routing_metadata
from specdec import messages
from specdec.errors import Fenced, InvalidArgument, SpecdecError, Unavailable
from specdec.exact import codec
from specdec.exact.values import Proposal
from specdec.retry import RetryPolicy
from specdec.types import ModelInfo
from specdec.v1 import draft_pb2, draft_pb2_grpc, types_pb2

NO_PROPOSAL = Proposal()
RETRY = RetryPolicy(first_s=0.25, maximum_s=8.0)  # rounds go on without a draft meanwhile
REFUSED_FAILURES = 8  # what a worker refuses outright it will refuse again: wait longest


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
        request = draft_pb2.GetDraftRequest()
        metadata = routing_metadata("describe", 0)
        reply = await answered(self._stub.GetDraft(request, metadata=metadata, timeout=DESCRIBE_TIMEOUT_S))
        return {drafter.name: messages.model_from_proto(drafter.model) for drafter in reply.drafters}

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
        self._num_failures = 0
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
        self._num_failures = 0
        return Drafted(proposal, reply.cached_len, time.perf_counter() - begin, self._stream.num_fed)

    async def _propose(
        self, committed: Sequence[int], num_draft_tokens: int
    ) -> tuple[draft_pb2.ProposeResponse, Proposal]:
        def message(start: int, tokens: Sequence[int]) -> draft_pb2.ProposeRequest:
            propose = draft_pb2.Propose(start=start, tokens=tokens, num_draft_tokens=num_draft_tokens)
            return draft_pb2.ProposeRequest(propose=propose)

        reply = await self._stream.ask(committed, message)
        try:
            return reply, codec.proposal_from_proto(reply, num_draft_tokens, self._limits.vocab_size)
        except (codec.MalformedReply, ValueError) as error:
            self._stream.drop()
            raise Unavailable(f"a draft worker answered against the contract: {error}") from error

    def _fail(self, error: SpecdecError) -> None:
        """Do without for a while."""
        self._num_failures += REFUSED_FAILURES if isinstance(error, InvalidArgument | Fenced) else 1
        self._ask_again_at = time.monotonic() + (RETRY.pause_s(self._num_failures, 0.0, random.random()) or 0.0)
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
