"""GenerationService: decode, call, encode."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from coordinator import metrics
from coordinator.admission import Ticket
from coordinator.followed import Ending
from coordinator.generation import CommittedChunk, OutputToken
from coordinator.healing import BEGINNING, Position
from coordinator.requests import known_session
from coordinator.service import Coordinator, StoredSession
from coordinator.session_ids import SessionIds, SessionName
from coordinator.session_record import Status
from specdec import messages
from specdec.errors import InvalidArgumentError, OverloadedError, SpecdecError
from specdec.outside import REAL, Outside
from specdec.serving.security.caller import current_tenant
from specdec.serving.telemetry import get_logger
from specdec.serving.tracing import spans
from specdec.serving.writing import Writer
from specdec.types import TokenOrigin
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc

_STATUS = {
    Status.ACTIVE: pb.SESSION_STATUS_ACTIVE,
    Status.FINISHED: pb.SESSION_STATUS_FINISHED,
    Status.CANCELLED: pb.SESSION_STATUS_CANCELLED,
}

_ORIGINS = frozenset(origin.value for origin in TokenOrigin)

Send = Callable[[pb.GenerateResponse], Awaitable[None]]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The public service."""

    def __init__(self, coordinator: Coordinator, ids: SessionIds, outside: Outside = REAL) -> None:
        self._coordinator = coordinator
        self._ids = ids
        self._outside = outside

    # grpc.aio also takes handlers that write instead of yielding, and those see a cancelled call at once
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        """Stream a new session, or attach to the one that has this request_id."""
        with _Request("Generate", context, self._outside) as record:
            # an id that is too long is refused by `begin`, and hashed to no end until then
            session, tenant = self._ids.of_request(current_tenant(), request.request_id), current_tenant()
            with spans.span("admission"):
                ticket = await self._coordinator.begin(request, session, tenant, context.time_remaining())
            record.session_id = session.stored
            await self._stream(session, BEGINNING, Writer(context).write, record, ticket)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> None:  # type: ignore[override]
        """Stream a session from the client's offset."""
        with _Request("Resume", context, self._outside) as record:
            session = _known(request.session_id, record)
            writer = Writer(context)

            async def resume(chunk: pb.GenerateResponse) -> None:
                await writer.write(pb.ResumeResponse(chunk=chunk))

            position = self._position(session, request)
            ticket = self._coordinator.resume(current_tenant(), context.time_remaining())
            await self._stream(session, position, resume, record, ticket)

    async def GetSession(self, request: pb.GetSessionRequest, context: Any) -> pb.GetSessionResponse:
        """Return what the store holds."""
        with _Request("GetSession", context, self._outside) as record:
            session = _known(request.session_id, record)
            return session_to_proto(session.public, await self._coordinator.read(session.stored))

    async def CancelSession(self, request: pb.CancelSessionRequest, context: Any) -> pb.CancelSessionResponse:
        """End a session."""
        with _Request("CancelSession", context, self._outside) as record:
            session = _known(request.session_id, record)
            status = await self._coordinator.cancel(session.stored)
            return pb.CancelSessionResponse(status=_STATUS[status])

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        """Return the models."""
        with _Request("GetModel", context, self._outside):
            models = self._coordinator.capabilities
            return pb.GetModelResponse(
                target=messages.model_to_proto(models.target),
                drafters=models.drafters,
                context_length=models.target.context_length,
                max_draft_tokens=self._coordinator.limits.max_draft_tokens,
            )

    async def _stream(
        self, session: SessionName, position: Position, send: Send, record: "_Request", ticket: Ticket
    ) -> None:
        admission, is_complete = self._coordinator.admission, False
        following = self._coordinator.follow(
            session.stored, position.offset, position.digest, position.handed, position.incarnation
        )
        try:
            async with aclosing(following) as chunks:
                async for chunk, ending in chunks:
                    admission.progress(ticket, len(chunk.emitted))
                    message = chunk_to_proto(session.public, chunk, ending)
                    end = chunk.offset + len(chunk.emitted)
                    message.proof = self._ids.proof(session, chunk.incarnation, end, chunk.digest)
                    await send(message)
                    admission.sent(ticket)
                    record.wrote(chunk, ending)
                    is_complete = ending is not None
        finally:
            admission.leave(ticket, is_complete=is_complete)

    def _position(self, session: SessionName, request: pb.ResumeRequest) -> Position:
        """Return where a client is. Raises InvalidArgumentError."""
        incarnation = self._ids.proved(session, request.offset, request.digest, request.proof)
        if incarnation is None:
            return Position(request.offset, request.digest)
        if len(request.tokens) != len(request.origins):
            raise InvalidArgumentError({"origins": "has not one entry for each of the tokens"})
        if any(origin not in _ORIGINS for origin in request.origins):
            raise InvalidArgumentError({"origins": "has an entry that this service does not know"})
        handed = map(OutputToken, request.tokens, map(TokenOrigin, request.origins))
        return Position(request.offset, request.digest, tuple(handed), incarnation)


def _known(session_id: str, record: "_Request") -> SessionName:
    """Return the names of a session by its id from a client. Raises InvalidArgumentError for what cannot be one."""
    session = SessionName.of(current_tenant(), known_session(session_id))
    record.session_id = session.stored
    return session


def chunk_to_proto(session_id: str, chunk: CommittedChunk, ending: Ending | None) -> pb.GenerateResponse:
    """Convert; the last chunk says how the session ended."""
    logprobs = [entry for emitted in chunk.emitted for entry in _logprobs_to_proto(emitted)]
    message = pb.GenerateResponse(
        session_id=session_id,
        offset=chunk.offset,
        tokens=[emitted.token for emitted in chunk.emitted],
        text=chunk.text,
        origins=[pb.TokenOrigin.ValueType(emitted.origin.value) for emitted in chunk.emitted],
        digest=chunk.digest,
        finish=finish_to_proto(ending) if ending else None,
        logprobs=logprobs,
        text_ends=chunk.text_ends,
    )
    for each in chunk.rounds:  # a message that is handed in would be copied
        message.rounds.add(drafter=each.drafter, num_draft_tokens=each.num_draft_tokens, depth=each.depth, end=each.end)
    return message


def _logprobs_to_proto(emitted: OutputToken) -> list[pb.TokenLogprobs]:
    if emitted.logprobs is None:
        return []
    top = [pb.TopLogprob(token=token, logprob=logprob) for token, logprob in emitted.logprobs.top]
    return [pb.TokenLogprobs(logprob=emitted.logprobs.logprob, top=top)]


def session_to_proto(session_id: str, stored: StoredSession) -> pb.GetSessionResponse:
    """Convert; `session_id` is the client's name of it."""
    session = stored.session
    return pb.GetSessionResponse(
        session_id=session_id,
        status=_STATUS[session.status],
        epoch=session.epoch,
        num_prompt_tokens=len(session.prompt),
        tokens=[entry.token for entry in session.emitted],
        text=stored.text,
        digest=session.digest,
        sampling=messages.sampling_to_proto(stored.sampling),
        finish=finish_to_proto(stored.ending) if stored.ending else None,
    )


def finish_to_proto(ending: Ending) -> pb.Finish:
    """Convert."""
    return pb.Finish(
        reason=pb.FinishReason.ValueType(ending.reason.value),
        usage=pb.Usage(num_prompt_tokens=ending.num_prompt_tokens, num_completion_tokens=ending.num_completion_tokens),
        statistics=messages.statistics_to_proto(ending.statistics),
    )


class _Request:
    """Counts and logs one request, however it ends."""

    def __init__(self, method: str, context: Any, outside: Outside) -> None:
        self._method = method
        self._span = spans.request(f"GenerationService/{method}", context)
        self._outside = outside
        self._begin = outside.now_s()
        self._num_tokens = 0
        self._ending: Ending | None = None
        self.session_id = ""

    def __enter__(self) -> "_Request":
        self._span.__enter__()
        return self

    def wrote(self, chunk: CommittedChunk, ending: Ending | None) -> None:
        """Record a chunk that was sent."""
        self._ending = ending
        if not self._num_tokens and chunk.emitted:
            metrics.TIME_TO_FIRST_TOKEN_S.observe(self._outside.now_s() - self._begin, self._span.exemplar())
        self._num_tokens += len(chunk.emitted)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        # clients may cancel as soon as they have the last chunk
        code = _code(None if self._ending else error)
        metrics.NUM_REQUESTS.labels(self._method, code).inc()
        if isinstance(error, OverloadedError):
            metrics.NUM_REFUSALS.labels(error.metadata.get("limit", "other")).inc()
        facts: dict[str, Any] = {"num_tokens": self._num_tokens} if self._num_tokens else {}
        if self._ending:
            statistics = self._ending.statistics
            facts |= {"num_rounds": statistics.num_rounds, "num_accepted": statistics.num_accepted_tokens}
        self._trace(code, facts)
        elapsed_s = round(self._outside.now_s() - self._begin, 4)
        get_logger().info(
            "request", method=self._method, code=code, session_id=self.session_id, elapsed_s=elapsed_s, **facts
        )

    def _trace(self, code: str, facts: dict[str, Any]) -> None:
        """End the span."""
        self._span.set(code=code, **facts)
        self._span.set_session(self.session_id)
        if code != grpc.StatusCode.OK.name:
            self._span.fail(code)
        self._span.__exit__(None, None, None)


def _code(error: BaseException | None) -> str:
    if error is None:
        return grpc.StatusCode.OK.name
    if isinstance(error, SpecdecError):
        return error.code.name
    # a client that leaves cancels the handler
    return (grpc.StatusCode.INTERNAL if isinstance(error, Exception) else grpc.StatusCode.CANCELLED).name
