"""The coordinator's client of the target workers: their models, and the scores of a session's proposals."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import grpc

from coordinator import metrics
from coordinator.checks import Checks
from coordinator.choosing.plans import Forward
from coordinator.loads import ReportedLoads
from coordinator.observing import NOTHING
from coordinator.pool.pool import WorkerPool
from coordinator.pool.resolving import Resolve
from coordinator.pool.watching import PoolWatch
from coordinator.round_times import RoundTimes
from coordinator.rounds import DEFAULT_OPTIONS, Scored, ScoreOptions
from coordinator.streams import DESCRIBE_TIMEOUT_S, SessionOpening, WorkerGroup, WorkerStream, answered
from specdec import messages
from specdec.errors import (
    ContextTooShortError,
    InternalError,
    ModelMismatchError,
    OverloadedError,
    SpecdecError,
    UnavailableError,
)
from specdec.exact import codec
from specdec.exact.prefix import chain_draft
from specdec.exact.values import ObservationRequest, Proposal, Scores
from specdec.outside import REAL, Outside
from specdec.retry import RetryPolicy
from specdec.serving.tracing import spans
from specdec.types import ModelInfo
from specdec.v1 import target_pb2, target_pb2_grpc, types_pb2

RETRY = RetryPolicy(first_s=0.1, maximum_s=1.0)  # where no target worker is in service
REROUTE = RetryPolicy(first_s=0.01, factor=1.3, maximum_s=0.5)  # where another one can be asked
MIN_ROUND_S = 10.0  # a worker that answers probes is waited for so long at least: it may be busy with others' prompts
ROUND_FACTOR = 10.0
CHECKS = Checks(after_s=0.5, timeout_s=1.0)
# of one round, fewer than end a worker (specdec/serving/model_worker.py): what one session asks must not end workers
MAX_INTERNAL_ERRORS = 7
MAX_FORWARD_TOKENS, MAX_FORWARD_S = 1 << 20, 600.0  # what a worker tells beyond is no measurement
TargetStream: TypeAlias = "WorkerStream[target_pb2.ScoreResponse, ModelInfo]"
RETRIED = (UnavailableError, OverloadedError, InternalError, ModelMismatchError, ContextTooShortError)


def target_watch(resolve: Resolve, open_channel: Callable[[str], Any], outside: Outside = REAL) -> PoolWatch[ModelInfo]:
    """Return what finds and probes target workers."""
    return PoolWatch("target", resolve, open_channel, _describe, outside)


async def _describe(channel: grpc.aio.Channel) -> ModelInfo:
    """Ask a target worker for its model. Raises UnavailableError if it describes none."""
    request = target_pb2.GetTargetRequest()
    reply = await answered(target_pb2_grpc.TargetServiceStub(channel).GetTarget(request, timeout=DESCRIBE_TIMEOUT_S))
    model = messages.model_from_proto(reply.model)
    if not (model.name and model.tokenizer_fingerprint and model.vocab_size and model.context_length):
        raise UnavailableError("a target worker describes no model; restart that worker if it persists")
    return model


class TargetWorkers:
    """The target workers of a pool. A round is waited for up to `timeout_s`, longer if it reads a long prompt."""

    def __init__(
        self, pool: WorkerPool[ModelInfo], timeout_s: float, patience_s: float, outside: Outside = REAL
    ) -> None:
        self.pool = pool
        times = RoundTimes(min(MIN_ROUND_S, timeout_s), timeout_s, ROUND_FACTOR)
        self._group = WorkerGroup("target", pool, times, CHECKS, outside)
        self._patience_s, self._outside = patience_s, outside
        self.loads = ReportedLoads(outside)

    def open(
        self,
        session: SessionOpening,
        vocab_size: int,
        observations: ObservationRequest = NOTHING,
        on_mismatch: Callable[[], None] = lambda: None,
    ) -> "SessionScorer":
        """Return a session's scorer; its stream opens with the first round.

        `on_mismatch` is called when a worker cannot serve the session: its model is another, its context too short.
        """
        target = target_pb2.OpenTarget(
            session=session.opening(),
            model_fingerprint=session.model_fingerprint,
            observations=codec.observation_request_to_proto(observations),
            matches_chosen=True,
        )
        opening = target_pb2.ScoreRequest(open=target)
        closing = target_pb2.ScoreRequest(close=types_pb2.CloseSession())
        stream: TargetStream = WorkerStream(
            self._group,
            lambda channel: target_pb2_grpc.TargetServiceStub(channel).Score(),
            session,
            opening,
            closing,
            fits=lambda model: session.model_fingerprint in ("", model.fingerprint),
            in_progress=self._in_progress,
        )
        wants_logprobs = session.sampling.num_logprobs is not None
        return SessionScorer(
            stream,
            vocab_size,
            wants_logprobs,
            self._patience_s,
            session.num_prompt_tokens,
            on_mismatch,
            self.loads,
            self._outside,
            session.prefix_digest,
        )

    def _in_progress(self, reply: target_pb2.ScoreResponse) -> bool:
        """Take note of the load in a message that is no answer yet; return whether it is one."""
        if reply.in_progress:
            self.loads.report(reply.load)
        return reply.in_progress


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a round that has not been asked for yet."""

    reply: target_pb2.ScoreResponse  # by itself
    elapsed_s: float
    num_fed: int  # tokens that the worker read first, for all of them
    num_sessions: int
    num_offered: int  # draft tokens that it may offer for the round after it


class SessionScorer:
    """Scores one session's proposals; waits for a target worker to come back, up to a limit in seconds."""

    def __init__(
        self,
        stream: TargetStream,
        vocab_size: int,
        wants_logprobs: bool,
        patience_s: float,
        num_prompt_tokens: int,
        on_mismatch: Callable[[], None],
        loads: ReportedLoads | None = None,
        outside: Outside = REAL,
        prefix_digest: Callable[[int], bytes] = lambda length: b"",
    ) -> None:
        """`prefix_digest` gives the digest of so many committed tokens."""
        self._stream = stream
        self._prefix_digest = prefix_digest
        self._answered = deque[Answered]()  # to the rounds that follow, in order
        self._loads = loads or ReportedLoads(outside)
        self._outside = outside
        self._vocab_size, self._wants_logprobs = vocab_size, wants_logprobs
        self._retry = replace(RETRY, budget_s=patience_s)
        self._reroute = replace(REROUTE, budget_s=patience_s)
        self._on_mismatch = on_mismatch
        self._num_prompt_tokens = num_prompt_tokens

    async def score(
        self, committed: Sequence[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS
    ) -> Scored:
        """Return the N + 1 positions of a proposal of N tokens. A repeated call has the same answer.

        A round that fails at one worker is asked at another: where one is in service without a long pause, and also
        when patience is at an end. Rounds that fail inside workers are asked up to MAX_INTERNAL_ERRORS times.
        """
        begin, failures = self._outside.now_s(), Counter[type[SpecdecError]]()
        self._answered.clear()
        while True:
            try:
                scored = await self._score(committed, proposal, options)
                return replace(scored, has_lost=bool(failures) and options.num_rounds > 1)
            except RETRIED as error:
                failures[type(error)] += 1
                await self._prepare_retry(error)
                pause_s = self._pause_s(error, failures[type(error)], self._outside.now_s() - begin)
                if pause_s is None:
                    raise self._given_up(error, has_text=len(committed) > self._num_prompt_tokens) from error
                await asyncio.sleep(pause_s)

    def known(self, committed: Sequence[int], proposal: Proposal) -> Scored | None:
        """Return the answer to a round that came with the one before it, if this is the round that was expected.

        A worker whose answer is none is left.
        """
        if not self._answered:
            return None
        try:
            return self._known(committed, proposal)
        except UnavailableError:  # the worker was left
            return None

    def _known(self, committed: Sequence[int], proposal: Proposal) -> Scored | None:
        answered, length = self._answered.popleft(), len(committed)
        reply = answered.reply
        if not self._is_of_round(reply, length, proposal):
            return None
        with self._checking():
            if reply.HasField("observations"):
                raise codec.MalformedReply("observations that nobody asked for")
            scores = self._scores(reply, proposal)
            offer = codec.offer_from_proto(reply.offer, answered.num_offered, self._vocab_size)
        metrics.observe_worker("score", reply.timing)
        self._stream.note_held(length)
        facts = answered.num_sessions, offer, _forward(reply.timing), 0.0, len(self._answered)
        return Scored(scores, answered.elapsed_s, answered.num_fed, *facts)

    def _is_of_round(self, reply: target_pb2.ScoreResponse, length: int, proposal: Proposal) -> bool:
        """Return whether an answer that came early is that to a round of so many committed tokens."""
        if reply.cached_len != length or not proposal.is_chosen:
            return False
        return reply.prefix_digest == chain_draft(self._prefix_digest(length), proposal.tokens, proposal.tree)

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Distrust a worker whose answer is found to be none. Raises UnavailableError."""
        try:
            yield
        except (codec.MalformedReply, ValueError) as error:
            self._answered.clear()
            failure = UnavailableError(f"a target worker answered against the contract: {error}")
            self._stream.distrust(failure)
            raise failure from error

    def _scores(self, reply: target_pb2.ScoreResponse, proposal: Proposal) -> Scores:
        """Return what an answer says. Raises MalformedReply."""
        scores = codec.scores_from_proto(reply, proposal, self._vocab_size)
        if bool(scores.logprobs) != self._wants_logprobs:
            raise codec.MalformedReply("log probabilities that are missing, or were not asked for")
        return scores

    async def _prepare_retry(self, error: SpecdecError) -> None:
        if isinstance(error, ModelMismatchError | ContextTooShortError):
            self._on_mismatch()
        elif isinstance(error, UnavailableError):
            await self._stream.find_lost()

    def _pause_s(self, error: SpecdecError, num_failures: int, elapsed_s: float) -> float | None:
        """Return the pause before the next attempt, None if the session's patience is at an end."""
        policy = self._reroute if self._stream.has_other_worker else self._retry
        if isinstance(error, ModelMismatchError | ContextTooShortError):
            policy = self._reroute
        elif isinstance(error, InternalError):
            policy = replace(policy, max_failures=MAX_INTERNAL_ERRORS)
        elif self._stream.has_other_worker:
            elapsed_s = 0.0
        return policy.pause_s(num_failures, elapsed_s, self._outside.uniform())

    def _given_up(self, error: SpecdecError, has_text: bool) -> SpecdecError:
        waited_s = self._retry.budget_s
        if isinstance(error, ModelMismatchError) and not has_text:
            return UnavailableError("the target's model has just changed; resume the session, which has no text yet")
        if isinstance(error, ModelMismatchError):
            message = f"no worker that serves the model of this session's text was found within {waited_s:g} s"
            return ModelMismatchError(
                f"{message}; begin a new session, or resume this one when that model is served again"
            )
        if isinstance(error, ContextTooShortError):
            message = f"no target worker that has room for this session's text was found within {waited_s:g} s"
            return ContextTooShortError(f"{message}; resume it when one is served again, or begin a shorter session")
        if isinstance(error, UnavailableError):
            message = f"no target worker has served this round for {waited_s:g} s; the session can be resumed"
            return UnavailableError(f"{message} (last: {error})", error.retry_after_s)
        return error

    async def _score(
        self,
        committed: Sequence[int],
        proposal: Proposal,
        options: ScoreOptions,
    ) -> Scored:
        def message(start: int, tokens: Sequence[int], prefix_digest: bytes, number: int) -> target_pb2.ScoreRequest:
            score = codec.score_to_proto(start, tokens, proposal, options.observes)
            score.prefix_digest, score.round = prefix_digest, number
            score.trace_context = spans.current().context()
            _add_what_follows(score, options)
            return target_pb2.ScoreRequest(score=score)

        begin = self._outside.now_s()
        with spans.span("score"):
            reply = await self._stream.ask(committed, message)
        with self._checking():
            codec.check_num_observed(reply.observations, len(committed) + len(proposal))
            scores = self._scores(reply, proposal)
            _check_observations(scores, len(committed), len(proposal))
            num_offered = options.next_round.num_offered if options.next_round else 0
            offer = codec.offer_from_proto(reply.offer, num_offered, self._vocab_size)
            _check_num_following(reply, options)
        metrics.observe_worker("score", reply.timing)
        self._loads.report(reply.load)
        waited_s, num_fed = self._outside.now_s() - begin, self._stream.num_fed
        elapsed_s, *others_s = (waited_s * share for share in _shares([reply, *reply.following]))
        facts = num_fed, _num_sessions(reply.load)
        following = zip(reply.following, others_s, strict=True)
        self._answered = deque(Answered(each, each_s, *facts, num_offered) for each, each_s in following)
        return Scored(scores, elapsed_s, *facts, offer, _forward(reply.timing), waited_s, len(self._answered))

    async def close(self) -> None:
        """End the session at the worker."""
        await self._stream.close()

    def abandon(self) -> None:
        """Leave the worker its cache, for the coordinator that resumes the session."""
        self._stream.abandon()


def _add_what_follows(score: target_pb2.Score, options: ScoreOptions) -> None:
    """Say what the target may score ahead, and how much of it it may answer together with the round."""
    if options.next_round is None:
        return
    score.next_round.CopyFrom(codec.next_round_to_proto(options.next_round))
    if options.num_rounds > 1:
        score.num_rounds = options.num_rounds
        score.ending_tokens.extend(options.ending_tokens)


def _shares(replies: Sequence[target_pb2.ScoreResponse]) -> list[float]:
    """Return which part of the time each of the answers took that came together: as their forwards did, where told."""
    forwards = [_forward(reply.timing) for reply in replies]
    seconds = [forward.seconds for forward in forwards if forward]
    if len(seconds) < len(replies):
        return [1 / len(replies)] * len(replies)
    return [each_s / sum(seconds) for each_s in seconds]


def _check_num_following(reply: target_pb2.ScoreResponse, options: ScoreOptions) -> None:
    """Raise MalformedReply for answers to more rounds than were asked for."""
    if len(reply.following) >= max(1, options.num_rounds):
        raise codec.MalformedReply(f"answers to {len(reply.following)} more rounds, of {options.num_rounds} in all")


def _num_sessions(load: types_pb2.Load) -> int:
    """Return the sessions that wait for a forward, or are in it."""
    return max(1, load.num_waiting + load.num_running - load.num_without_place)


def _forward(timing: types_pb2.Timing) -> Forward | None:
    """Return the forward of a round; None where the worker tells of none, or of one that cannot be."""
    is_told = 0 < timing.num_forward_tokens <= MAX_FORWARD_TOKENS and 0 < timing.forward_s <= MAX_FORWARD_S
    return Forward(timing.num_forward_tokens, timing.forward_s) if is_told else None


def _check_observations(scores: Scores, committed_length: int, num_draft_tokens: int) -> None:
    """Raise MalformedReply unless they end with the last committed token and the draft tokens."""
    observations = scores.observations
    if observations is None:
        return
    num_observed = num_draft_tokens if scores.observed is None else len(scores.observed)
    if len(observations) <= num_observed or observations.end != committed_length + num_observed:
        raise codec.MalformedReply(
            f"observations of tokens {observations.start} to {observations.end}, "
            f"where {committed_length} are committed and {num_draft_tokens} drafted"
        )
