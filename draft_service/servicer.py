"""DraftService: checks what arrives, lets a drafter draft, and packs the answer."""

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from draft_service.drafter import Drafter, DraftResult
from specdec import messages
from specdec.drafting.request import DraftRequest
from specdec.errors import InvalidArgumentError, OverloadedError
from specdec.exact import codec
from specdec.exact.values import Observations
from specdec.serving.session_stream import (
    EpochFence,
    SessionRounds,
    SessionStream,
    WorkerSession,
    serve_session,
    session_from_proto,
)
from specdec.serving.telemetry import get_logger
from specdec.serving.writing import Writer
from specdec.types import MAX_DRAFT_TOKENS
from specdec.v1 import draft_pb2, draft_pb2_grpc


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves one or more drafters; the first is the default."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self._drafters = drafters
        self._fence = EpochFence()

    async def GetDraft(self, request: draft_pb2.GetDraftRequest, context: Any) -> draft_pb2.GetDraftResponse:
        """Return the drafters on offer."""
        drafters = [
            draft_pb2.Drafter(
                name=drafter.name,
                model=messages.model_to_proto(drafter.model),
                observations=codec.observation_request_to_proto(drafter.observations),
            )
            for drafter in self._drafters.values()
        ]
        return draft_pb2.GetDraftResponse(drafters=drafters)

    async def Propose(self, requests: AsyncIterator[draft_pb2.ProposeRequest], context: Any) -> None:  # type: ignore[override]  # writes by itself
        """Answer each round of one session, until the stream ends."""
        await serve_session(
            SessionStream(requests, "propose", "DraftService/Propose"), Writer(context).write, self._fence, self._begin
        )

    def _begin(self, opening: draft_pb2.OpenDraft) -> "DraftRounds":
        drafter = self._drafter(opening.drafter)
        vocab_size = drafter.model.vocab_size or None
        session = session_from_proto(opening.session, vocab_size, opening.model_fingerprint, drafter.grammars)
        return DraftRounds(session, drafter)

    def _drafter(self, name: str) -> Drafter:
        chosen = name or next(iter(self._drafters))
        messages.check_id("open.drafter", chosen, messages.MAX_NAME_CHARACTERS)
        if chosen not in self._drafters:
            raise InvalidArgumentError({"open.drafter": f"is {chosen!r}; on offer: {', '.join(self._drafters)}"})
        return self._drafters[chosen]


class DraftRounds(SessionRounds):
    """One session at the draft worker."""

    def __init__(self, session: WorkerSession, drafter: Drafter) -> None:
        super().__init__(session, drafter.name)
        self._drafter = drafter
        self._last: tuple[DraftRequest, DraftResult] | None = None

    async def answer(self, message: draft_pb2.Propose, is_first: bool) -> draft_pb2.ProposeResponse:
        """Draft for one round."""
        request = _checked(self._drafter, message)
        with suppress(InvalidArgumentError, OverloadedError):  # without its grammar, more of the draft is rejected
            await self.session.grammar.compile(self.session.sampling)
        result = await self._drafter.propose(self.session, request, match=is_first)
        self._last = request, result
        return _packed(result)

    def answered(self) -> None:
        """Draft ahead."""
        assert self._last
        request, result = self._last
        self._drafter.draft_ahead(self.session, request, result.proposal)
        _report(self._drafter, self.session, request, result)

    def forget(self) -> None:
        """Free what the drafter holds of the session."""
        self._drafter.forget(self.session)

    def leave(self, is_latest: bool) -> None:
        """Stop drafting ahead."""
        self._drafter.abandon(self.session, is_latest)


def _packed(result: DraftResult) -> draft_pb2.ProposeResponse:
    response = codec.proposal_to_proto(result.proposal)
    response.cached_len = result.cached_len
    response.timing.CopyFrom(codec.timing_to_proto(result.timing))
    return response


def _checked(drafter: Drafter, message: draft_pb2.Propose) -> DraftRequest:
    """Check a round, so that nothing in it can harm another session. Raises InvalidArgumentError."""
    model = drafter.model
    if message.num_draft_tokens > MAX_DRAFT_TOKENS:
        problem = f"is {message.num_draft_tokens}; the maximum is {MAX_DRAFT_TOKENS}"
        raise InvalidArgumentError({"propose.num_draft_tokens": problem})
    length = message.start + len(message.tokens)
    if not length:
        raise InvalidArgumentError(
            {"propose.tokens": "is empty at the beginning of a text; a row needs a token to follow"}
        )
    if model.context_length and length > model.context_length:
        problem = f"would be {length} tokens long; this worker's context holds {model.context_length}"
        raise InvalidArgumentError({"propose": problem})
    if model.vocab_size:
        messages.check_tokens(message.tokens, model.vocab_size, "propose.tokens")
    observations = _observations(message) if message.HasField("observations") and drafter.observations else None
    if not 0 <= message.stop_below <= 1:
        raise InvalidArgumentError({"propose.stop_below": f"is {message.stop_below}; a chance is 0 to 1"})
    return DraftRequest(
        message.start,
        list(message.tokens),
        message.num_draft_tokens,
        observations,
        message.stop_below,
        message.prefix_digest,
    )


def _observations(message: draft_pb2.Propose) -> Observations:
    """Return observations of committed tokens. Raises InvalidArgumentError."""
    end = message.observations.start + message.observations.count
    if end > message.start + len(message.tokens):
        problem = f"end at token {end}; {message.start + len(message.tokens)} are committed"
        raise InvalidArgumentError({"propose.observations": problem})
    try:
        return codec.observations_from_proto(message.observations)
    except codec.MalformedReply as error:
        raise InvalidArgumentError({"propose.observations": f"are malformed: {error}"}) from None


def _report(drafter: Drafter, session: WorkerSession, request: DraftRequest, result: DraftResult) -> None:
    get_logger().debug(
        "round_drafted",
        session_id=session.session_id,
        drafter=drafter.name,
        start=request.start,
        num_tokens=len(request.tokens),
        num_draft_tokens=len(result.proposal),
        queue_s=result.timing.queue_s,
        forward_s=result.timing.forward_s,
        total_s=result.timing.total_s,
    )
