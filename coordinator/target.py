"""The coordinator's client of the target workers: their models, and the scores of a session's proposals."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc

from coordinator import metrics
from coordinator.loads import ReportedLoads
from coordinator.observing import NOTHING
from coordinator.rounds import Scored
from coordinator.streams import DESCRIBE_TIMEOUT_S, SessionOpening, WorkerStream, answered, routing_metadata
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
from specdec.exact.values import ObservationRequest, Proposal, Scores
from specdec.outside import REAL, Outside
from specdec.retry import RetryPolicy
from specdec.types import ModelInfo
from specdec.v1 import target_pb2, target_pb2_grpc, types_pb2

RETRY = RetryPolicy(first_s=0.1, maximum_s=2.0)  # where no target worker answers
REROUTE = RetryPolicy(first_s=0.01, factor=1.3, maximum_s=0.5)  # where one answers that cannot serve the session
# of one round, fewer than end a worker (specdec/serving/model_worker.py): what one session asks must not end workers
MAX_INTERNAL_ERRORS = 7
RETRIED = (UnavailableError, OverloadedError, InternalError, ModelMismatchError, ContextTooShortError)


class TargetWorkers:
    """The target workers at one address."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float, patience_s: float, outside: Outside = REAL) -> None:
        self._stub = target_pb2_grpc.TargetServiceStub(channel)
        self._outside = outside
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self.loads = ReportedLoads(outside)

    async def describe(self, route: int = 0) -> ModelInfo:
        """Return the model of one of them; routes may reach different ones. Raises UnavailableError if none answers."""
        request, metadata = target_pb2.GetTargetRequest(), routing_metadata("describe", route)
        reply = await answered(self._stub.GetTarget(request, metadata=metadata, timeout=DESCRIBE_TIMEOUT_S))
        return messages.model_from_proto(reply.model)

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
        )
        opening = target_pb2.ScoreRequest(open=target)
        closing = target_pb2.ScoreRequest(close=types_pb2.CloseSession())
        stream: WorkerStream[target_pb2.ScoreResponse] = WorkerStream(
            self._stub.Score, session.session_id, opening, closing, self._timeout_s, self._in_progress
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
        )

    def _in_progress(self, reply: target_pb2.ScoreResponse) -> bool:
        """Take note of the load in a message that is no answer yet; return whether it is one."""
        if reply.in_progress:
            self.loads.report(reply.load)
        return reply.in_progress


class SessionScorer:
    """Scores one session's proposals; waits for a target worker to come back, up to a limit in seconds."""

    def __init__(
        self,
        stream: WorkerStream[target_pb2.ScoreResponse],
        vocab_size: int,
        wants_logprobs: bool,
        patience_s: float,
        num_prompt_tokens: int,
        on_mismatch: Callable[[], None],
        loads: ReportedLoads | None = None,
        outside: Outside = REAL,
    ) -> None:
        self._stream = stream
        self._loads = loads or ReportedLoads(outside)
        self._outside = outside
        self._vocab_size, self._wants_logprobs = vocab_size, wants_logprobs
        self._retry = replace(RETRY, budget_s=patience_s)
        self._retry_internal = replace(self._retry, max_failures=MAX_INTERNAL_ERRORS)
        self._reroute = replace(REROUTE, budget_s=patience_s)
        self._on_mismatch = on_mismatch
        self._num_prompt_tokens = num_prompt_tokens

    async def score(self, committed: Sequence[int], proposal: Proposal, observes: bool = True) -> Scored:
        """Return the N + 1 positions of a proposal of N tokens. A repeated call has the same answer.

        A round that fails inside one worker may succeed at another: it is asked again, up to MAX_INTERNAL_ERRORS times.
        """
        begin, failures = self._outside.now_s(), Counter[type[SpecdecError]]()
        while True:
            try:
                return await self._score(committed, proposal, observes)
            except RETRIED as error:
                failures[type(error)] += 1
                pause_s = self._pause_s(error, failures[type(error)], self._outside.now_s() - begin)
                if pause_s is None:
                    raise self._given_up(error, has_text=len(committed) > self._num_prompt_tokens) from error
                await asyncio.sleep(pause_s)

    def _pause_s(self, error: SpecdecError, num_failures: int, elapsed_s: float) -> float | None:
        """Return the pause before the next attempt, None if the session's patience is at an end."""
        if isinstance(error, ModelMismatchError | ContextTooShortError):
            self._stream.reroute()
            self._on_mismatch()
            policy = self._reroute
        elif isinstance(error, InternalError):
            if num_failures > 1:  # the first may have been another session's fault
                self._stream.reroute()
            policy = self._retry_internal
        else:
            policy = self._retry
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

    async def _score(self, committed: Sequence[int], proposal: Proposal, observes: bool) -> Scored:
        def message(start: int, tokens: Sequence[int]) -> target_pb2.ScoreRequest:
            return target_pb2.ScoreRequest(score=codec.score_to_proto(start, tokens, proposal, observes))

        begin = self._outside.now_s()
        reply = await self._stream.ask(committed, message)
        try:
            scores = codec.scores_from_proto(reply, proposal, self._vocab_size)
            if bool(scores.logprobs) != self._wants_logprobs:
                raise codec.MalformedReply("log probabilities that are missing, or were not asked for")
            _check_observations(scores, len(committed), len(proposal))
        except (codec.MalformedReply, ValueError) as error:
            self._stream.abandon()
            raise UnavailableError(f"a target worker answered against the contract: {error}") from error
        metrics.observe_worker("score", reply.timing)
        self._loads.report(reply.load)
        load = reply.load
        num_sessions = max(1, load.num_waiting + load.num_running - load.num_without_place)
        return Scored(scores, self._outside.now_s() - begin, self._stream.num_fed, num_sessions)

    async def close(self) -> None:
        """End the session at the worker."""
        await self._stream.close()

    def abandon(self) -> None:
        """Leave the worker its cache, for the coordinator that resumes the session."""
        self._stream.abandon()


def _check_observations(scores: Scores, committed_length: int, num_draft_tokens: int) -> None:
    """Raise MalformedReply unless they end with the last committed token and the draft tokens."""
    observations = scores.observations
    if observations is None:
        return
    if len(observations) <= num_draft_tokens or observations.end != committed_length + num_draft_tokens:
        raise codec.MalformedReply(
            f"observations of tokens {observations.start} to {observations.end}, "
            f"where {committed_length} are committed and {num_draft_tokens} drafted"
        )
