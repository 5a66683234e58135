"""The coordinator's client of the draft workers: their drafters, and their proposals, if a worker answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from coordinator import metrics
from coordinator.checks import Checks
from coordinator.observing import NOTHING, part_of
from coordinator.pool.pool import WorkerPool
from coordinator.pool.resolving import Resolve
from coordinator.pool.watching import PoolWatch
from coordinator.round_times import RoundTimes
from coordinator.rounds import Drafted
from coordinator.streams import DESCRIBE_TIMEOUT_S, SessionOpening, WorkerGroup, WorkerStream, answered
from specdec import messages
from specdec.errors import FencedError, InvalidArgumentError, SpecdecError, UnavailableError
from specdec.exact import codec
from specdec.exact.values import ObservationRequest, Observations, Proposal
from specdec.outside import REAL, Outside
from specdec.retry import RetryPolicy
from specdec.serving.tracing import spans
from specdec.types import ModelInfo
from specdec.v1 import draft_pb2, draft_pb2_grpc, types_pb2

RETRY = RetryPolicy(first_s=0.25, maximum_s=8.0)  # rounds go on without a draft meanwhile
MIN_ROUND_S = 2.0  # the least that a proposal is waited for: a busy machine may pause for a second
ROUND_FACTOR = 4.0
CHECKS = Checks(after_s=0.25, timeout_s=0.5, needs_other=False)  # a round goes on without a draft
MAX_PENDING_OBSERVATIONS = 256  # observed tokens kept for the next draft request: 6 MB at 3 layers of 4,096
MAX_PENDING_BYTES = 8 << 20  # of these: half of the largest message
REFUSED_FAILURES = 8  # failures to count after a refusal: a repeated request will be refused again, so wait longest


@dataclass(frozen=True, slots=True)
class OfferedDrafter:
    """A drafter that the draft workers offer."""

    model: ModelInfo
    observations: ObservationRequest = NOTHING  # what the target shall observe for it


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What a proposal may hold."""

    vocab_size: int  # the target's
    context_length: int = 0  # the draft model's; 0: none
    wanted: ObservationRequest = NOTHING  # what the drafter asks the target to observe
    observed: ObservationRequest = NOTHING  # what the target is asked to observe, for all drafters of the session
    is_matched: bool = False  # its tokens count as chosen, also where a worker has drawn them


Offer = Mapping[str, OfferedDrafter]
"""A draft worker's drafters by name, the default first."""


def draft_watch(resolve: Resolve, open_channel: Callable[[str], Any], outside: Outside = REAL) -> PoolWatch[Offer]:
    """Return what finds and probes draft workers."""
    return PoolWatch("draft", resolve, open_channel, _describe, outside)


async def _describe(channel: grpc.aio.Channel) -> Offer:
    """Ask a draft worker for its drafters. Raises UnavailableError if it names none."""
    request = draft_pb2.GetDraftRequest()
    reply = await answered(draft_pb2_grpc.DraftServiceStub(channel).GetDraft(request, timeout=DESCRIBE_TIMEOUT_S))
    offered = {drafter.name: _offered(drafter) for drafter in reply.drafters}
    if not offered or "" in offered:
        raise UnavailableError("a draft worker offers no drafter; restart that worker if it persists")
    return offered


class DraftWorkers:
    """The draft workers of a pool. A round is waited for up to `timeout_s`, longer if it reads a long prompt."""

    def __init__(self, pool: WorkerPool[Offer], timeout_s: float, outside: Outside = REAL) -> None:
        self.pool = pool
        times = RoundTimes(min(MIN_ROUND_S, timeout_s), timeout_s, ROUND_FACTOR)
        self._group = WorkerGroup("draft", pool, times, CHECKS, outside)
        self._outside = outside

    def open(
        self, session: SessionOpening, drafter: str, limits: DraftLimits, on_failure: Callable[[SpecdecError], None]
    ) -> "SessionDrafter":
        """Return a session's drafter; its stream opens with the first round that drafts."""
        opened = draft_pb2.OpenDraft(
            session=session.opening(), drafter=drafter, model_fingerprint=session.model_fingerprint
        )
        opening = draft_pb2.ProposeRequest(open=opened)
        closing = draft_pb2.ProposeRequest(close=types_pb2.CloseSession())
        stream: DraftStream = WorkerStream(
            self._group,
            lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Propose(),
            session,
            opening,
            closing,
            fits=lambda offer: drafter in ("", *offer),
        )
        return SessionDrafter(stream, limits, on_failure, self._outside)


def _offered(message: draft_pb2.Drafter) -> OfferedDrafter:
    asked = message.observations
    observations = ObservationRequest(tuple(asked.hidden_layers), asked.num_top_tokens)
    return OfferedDrafter(messages.model_from_proto(message.model), observations)


def _num_kept(observations: Observations) -> int:
    """Return how many observed tokens are kept for the next request."""
    token_bytes = len(observations.hidden_states[-1]) if observations.hidden_states else 0
    return min(MAX_PENDING_OBSERVATIONS, max(1, MAX_PENDING_BYTES // max(1, token_bytes)))


DraftStream: TypeAlias = "WorkerStream[draft_pb2.ProposeResponse, Offer]"


class SessionDrafter:
    """Drafts for one session. Never raises: without a draft worker it drafts nothing, and tries again after a pause."""

    def __init__(
        self,
        stream: DraftStream,
        limits: DraftLimits,
        on_failure: Callable[[SpecdecError], None],
        outside: Outside = REAL,
    ) -> None:
        self._stream = stream
        self._limits = limits
        self._on_failure = on_failure
        self._outside = outside
        self._num_failures = 0
        self._ask_again_at = -math.inf
        self._observations: Observations | None = None  # not yet sent
        self._is_asked = False

    @property
    def available(self) -> bool:
        """Whether it is not being asked, the pause after a failure is over, and there is a worker to ask."""
        return not self._is_asked and self._outside.now_s() >= self._ask_again_at and self._stream.has_worker

    async def propose(self, committed: Sequence[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return a tree of at most K tokens with their distributions; never raises."""
        fits = not self._limits.context_length or len(committed) + num_draft_tokens <= self._limits.context_length
        if not num_draft_tokens or not fits or not self.available:
            return Drafted(has_failed=True)
        begin, self._is_asked = self._outside.now_s(), True
        observations, self._observations = self._observations, None
        try:
            proposal = await self._propose(committed, num_draft_tokens, stop_below, observations)
        except Exception as error:
            if not isinstance(error, SpecdecError):
                self._stream.abandon()
                error = UnavailableError(f"a draft worker's stream broke: {type(error).__name__}")
            self._fail(error)
            self._observations = _joined(observations, self._observations)
            return Drafted(elapsed_s=self._outside.now_s() - begin, has_failed=True)
        finally:
            self._is_asked = False
        self._num_failures = 0
        return Drafted(proposal, self._outside.now_s() - begin, self._stream.num_fed)

    async def _propose(
        self, committed: Sequence[int], num_draft_tokens: int, stop_below: float, observations: Observations | None
    ) -> Proposal:
        observed = codec.observations_to_proto(observations) if observations else None

        def message(start: int, tokens: Sequence[int], prefix_digest: bytes, number: int) -> draft_pb2.ProposeRequest:
            propose = draft_pb2.Propose(
                start=start,
                tokens=tokens,
                prefix_digest=prefix_digest,
                num_draft_tokens=num_draft_tokens,
                observations=observed,
                stop_below=stop_below,
                trace_context=spans.current().context(),
                round=number,
            )
            return draft_pb2.ProposeRequest(propose=propose)

        with spans.span("propose"):
            reply = await self._stream.ask(committed, message)
        try:
            proposal = codec.proposal_from_proto(reply, num_draft_tokens, self._limits.vocab_size)
        except (codec.MalformedReply, ValueError) as error:
            failure = UnavailableError(f"a draft worker answered against the contract: {error}")
            self._stream.distrust(failure)
            raise failure from error
        metrics.observe_worker("draft", reply.timing)
        return proposal.as_chosen if self._limits.is_matched else proposal

    def _fail(self, error: SpecdecError) -> None:
        """Pause drafting for this session."""
        self._num_failures += REFUSED_FAILURES if isinstance(error, InvalidArgumentError | FencedError) else 1
        pause_s = RETRY.pause_s(self._num_failures, 0.0, self._outside.uniform()) or 0.0
        self._ask_again_at = self._outside.now_s() + pause_s
        self._on_failure(error)

    def observe(self, observations: Observations) -> None:
        """Keep observations for the next request, only the latest ones if they are many."""
        own = part_of(observations, self._limits.observed, self._limits.wanted)
        if own:
            self._observations = _joined(self._observations, own)

    async def close(self) -> None:
        """End the session at the worker."""
        await self._stream.close()

    def abandon(self) -> None:
        """Leave the worker its cache, for the coordinator that resumes the session."""
        self._stream.abandon()


def _joined(earlier: Observations | None, later: Observations | None) -> Observations | None:
    """Return both, only the latest if they are many."""
    joined = earlier.followed_by(later) if earlier and later else earlier or later
    return joined.latest(_num_kept(joined)) if joined else None
