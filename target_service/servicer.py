"""TargetService: checks what arrives, runs it through the engine, and packs the answer."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from specdec import messages
from specdec.engine import CacheMiss, EngineLoop, TaskTimes
from specdec.errors import ContextTooShortError, InvalidArgumentError, ModelMismatchError
from specdec.exact import codec
from specdec.exact.lookup import NextRound
from specdec.exact.prefix import chain_draft
from specdec.exact.values import MAX_SUPPORT_TOKENS, ObservationRequest, Scores, Timing
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.model_worker import run_task
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
from specdec.types import MAX_DRAFT_TOKENS, ModelInfo
from specdec.v1 import target_pb2, target_pb2_grpc, types_pb2
from target_service.ahead import ScoringAhead
from target_service.metrics import METRICS
from target_service.observing import of_accepted, request_from_proto
from target_service.offering import SessionOffers, SharedSuccessors
from target_service.own_head import OwnHead
from target_service.scorer import Scorer, ScoreRound, ScoreTask

MAX_STEP_S = 5.0  # a forward that takes longer may hang
MAX_ROUNDS = 16  # that are answered together
MAX_HEAD_SESSIONS = 2  # at once, for which the worker's own head drafts: all of them wait for it


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves one model."""

    def __init__(
        self,
        engine: EngineLoop[ScoreTask],
        scorer: Scorer,
        model: ModelInfo,
        grammars: GrammarCompiler | None = None,
        scores_ahead: bool = True,
        successors: SharedSuccessors | None = None,
        head: OwnHead | None = None,
    ) -> None:
        self.engine = engine
        self.scores_ahead = scores_ahead
        self.head = head
        self._successors = successors or SharedSuccessors()
        self._scorer = scorer
        self._model = model
        self._grammars = grammars
        self._fence = EpochFence()

    async def GetTarget(self, request: target_pb2.GetTargetRequest, context: Any) -> target_pb2.GetTargetResponse:
        """Return the model that this worker scores with."""
        return target_pb2.GetTargetResponse(model=messages.model_to_proto(self._model))

    async def Score(self, requests: AsyncIterator[target_pb2.ScoreRequest], context: Any) -> None:  # type: ignore[override]  # writes by itself
        """Answer each round of one session, until the stream ends."""
        await serve_session(
            SessionStream(requests, "score", "TargetService/Score"), Writer(context).write, self._fence, self._begin
        )

    def _begin(self, opening: target_pb2.OpenTarget) -> "ScoreRounds":
        self._check_model(opening.model_fingerprint)
        session = session_from_proto(opening.session, self._model.vocab_size, grammars=self._grammars)
        observations = request_from_proto(opening, self._model.num_layers)
        return ScoreRounds(session, self, observations, opening.matches_chosen)

    def new_offers(self, session: WorkerSession) -> SessionOffers:
        """Return what drafts for a session's rounds that are scored ahead."""
        return SessionOffers(session, self._successors.of(session))

    def forget(self, session: WorkerSession) -> None:
        """Free what is held of a session."""
        self.engine.forget(session.key)
        if self.head:
            self.head.forget(session)

    def leave(self, session: WorkerSession) -> None:
        """Let a session's cache make room for others: its stream has ended."""
        self.engine.leave(session.key)

    def _check_model(self, fingerprint: str) -> None:
        """Refuse a session whose text belongs to another model. Raises ModelMismatchError."""
        if fingerprint not in ("", self._model.fingerprint):
            problem = f"serves the model {self._model.fingerprint}, the session's text belongs to {fingerprint[:64]!r}"
            raise ModelMismatchError(f"this worker {problem}; ask another worker", served=self._model.fingerprint)

    async def score(
        self,
        session: WorkerSession,
        message: target_pb2.Score,
        observations: ObservationRequest,
        ahead: ScoringAhead,
        match: bool,
    ) -> tuple[target_pb2.ScoreResponse, list[ScoreTask]]:
        """Score one round, and those that are answered with it; `match` keeps cached tokens after `start` if the same.

        Return the answer, and the tasks that have scored its rounds; none where the round was not scored.
        """
        given = self._checked(message, ahead.matches_chosen)
        request = ObservationRequest() if message.without_observations else observations
        next_round = self._checked_next(message)
        takes_ahead = next_round is not None and self.scores_ahead and session.sampling.grammar is None
        head = self._idle_head() if takes_ahead and next_round and next_round.learns else None
        task = ahead.take(given, request) or self._scorer.task(session, given, request, match, head is not None)
        if takes_ahead and next_round:
            ahead.begin(task, self._scorer.watch(request, head is not None), next_round, head)
        try:
            scores = await run_task(self.engine, task)
        except CacheMiss as miss:
            return target_pb2.ScoreResponse(cached_len=miss.cached_len, load=self._load()), []
        await ahead.note_scored(task)
        if not request:  # a round that was scored ahead may have observed in vain
            scores = replace(scores, observations=None)
        response = _answer(task, of_accepted(scores, given), ahead.offer)
        tasks = [task]
        if takes_ahead and next_round and not request:
            num_more = min(message.num_rounds, MAX_ROUNDS) - 1
            async for following, more in ahead.following(task, num_more, message.ending_tokens):
                response.following.append(_answer(following, more, ahead.offer))
                response.following[-1].prefix_digest = _digest(following)
                tasks.append(following)
        response.load.CopyFrom(self._load(tasks[-1].num_batched))
        return response, tasks

    def _idle_head(self) -> OwnHead | None:
        """Return the worker's own head, unless many sessions would wait for it."""
        load = self.engine.load if self.head else None
        return self.head if load and load.num_running + load.num_waiting <= MAX_HEAD_SESSIONS else None

    def _checked_next(self, message: target_pb2.Score) -> NextRound | None:
        """Check what is said of the next round, if anything. Raises InvalidArgumentError."""
        if not message.HasField("next_round"):
            return None
        try:
            return codec.next_round_from_proto(message.next_round, self._model.context_length)
        except codec.MalformedReply as error:
            raise InvalidArgumentError({"score.next_round": f"has {error}"}) from None

    def _checked(self, message: target_pb2.Score, matches_chosen: bool) -> ScoreRound:
        """Check a round, so that nothing in it can harm another session. It may be one that is matched.

        Raises InvalidArgumentError, ContextTooShortError.
        """
        num_drafted = len(message.draft_tokens)
        if not message.tokens:
            raise InvalidArgumentError({"score.tokens": "is empty; repeat at least the last committed token"})
        if num_drafted > MAX_DRAFT_TOKENS:
            raise InvalidArgumentError({"score.draft_tokens": f"has {num_drafted}; the maximum is {MAX_DRAFT_TOKENS}"})
        length = message.start + len(message.tokens) + num_drafted
        if length > self._model.context_length:
            holds = f"this worker's context holds {self._model.context_length}"
            raise ContextTooShortError(f"the text would be {length} tokens long; {holds}; ask another worker")
        messages.check_tokens(message.tokens, self._model.vocab_size, "score.tokens")
        messages.check_tokens(message.draft_tokens, self._model.vocab_size, "score.draft_tokens")
        if len(message.supports.sizes) > codec.UINT32.itemsize * num_drafted:
            raise InvalidArgumentError(
                {"score.supports": f"has more than one support for each of {num_drafted} tokens"}
            )
        if len(message.supports.token_ids) > codec.UINT32.itemsize * MAX_SUPPORT_TOKENS * num_drafted:
            raise InvalidArgumentError({"score.supports": f"has a support of more than {MAX_SUPPORT_TOKENS} tokens"})
        try:
            parents = codec.checked_parents(message.parents, num_drafted)
            supports = codec.draft_supports_from_proto(message)
        except codec.MalformedReply as error:
            raise InvalidArgumentError({"score": f"has a malformed proposal: {error}"}) from None
        for support in supports:
            messages.check_tokens(support, self._model.vocab_size, "score.supports")
        return ScoreRound(
            message.start,
            list(message.tokens),
            list(message.draft_tokens),
            supports,
            parents,
            message.prefix_digest,
            is_matched=matches_chosen and num_drafted > 0 and all(len(support) == 1 for support in supports),
        )

    def report(self, session: WorkerSession, task: ScoreTask) -> None:
        """Count and log a round that was scored."""
        given, timings = task.round, task.timings
        METRICS.observe_round(task.num_positions, timings)
        get_logger().debug(
            "round_scored",
            session_id=session.session_id,
            start=given.start,
            num_tokens=len(given.tokens),
            num_draft_tokens=len(given.draft_tokens),
            queue_s=timings.queue_s,
            forward_s=timings.forward_s,
            total_s=timings.total_s,
        )

    def _load(self, num_batched: int = 0) -> types_pb2.Load:
        """Return how busy the worker is; those in a round's forward count as running, though it has ended."""
        load = self.engine.load
        return types_pb2.Load(
            num_waiting=load.num_waiting,
            num_running=max(load.num_running, num_batched),
            kv_cache_usage=load.kv_usage,
            num_resident=load.num_resident,
            num_without_place=load.num_without_place,
            num_prompt_tokens=load.num_prompt_tokens,
            prompt_s=load.prompt_s,
        )

    def in_progress(self) -> target_pb2.ScoreResponse | None:
        """Return the message that a round will be answered; None while a forward takes too long to promise it."""
        if self.engine.is_stalled(MAX_STEP_S):
            return None
        return target_pb2.ScoreResponse(in_progress=True, load=self._load())


class ScoreRounds(SessionRounds):
    """One session at the target worker."""

    def __init__(
        self, session: WorkerSession, servicer: TargetServicer, observations: ObservationRequest, matches_chosen: bool
    ) -> None:
        super().__init__(session)
        self._servicer = servicer
        self._observations = observations
        self._ahead = ScoringAhead(servicer.engine, matches_chosen, lambda: servicer.new_offers(session))
        self._scored = list[ScoreTask]()  # the last answer's rounds, until they are reported

    async def answer(self, message: target_pb2.Score, is_first: bool) -> target_pb2.ScoreResponse:
        """Score one round."""
        await self.session.grammar.compile(self.session.sampling)
        answer, self._scored = await self._servicer.score(
            self.session, message, self._observations, self._ahead, match=is_first
        )
        return answer

    def answered(self) -> None:
        """Report the rounds: nobody waits for that."""
        for task in self._scored:
            self._servicer.report(self.session, task)
        self._scored = []

    def in_progress(self) -> target_pb2.ScoreResponse | None:
        """Say that the round will be answered."""
        return self._servicer.in_progress()

    def leave(self, is_latest: bool) -> None:
        """Keep the session's cache only while nobody else needs the room, unless a newer stream uses it."""
        self._ahead.stop()
        if is_latest:
            self._servicer.leave(self.session)

    def forget(self) -> None:
        """Free the session's cache."""
        self._ahead.stop()
        self._servicer.forget(self.session)


def _answer(task: ScoreTask, scores: Scores, offer: ScoreRound | None = None) -> target_pb2.ScoreResponse:
    """Return the answer to a round, with what is offered for the next one; the caller adds what others share."""
    answer = codec.scores_to_proto(scores)
    if offer:
        answer.offer.draft_tokens.extend(offer.draft_tokens)
        answer.offer.parents.extend(offer.parents)
    answer.cached_len = task.round.committed_length
    answer.timing.CopyFrom(codec.timing_to_proto(_timing(task.timings)))
    return answer


def _digest(task: ScoreTask) -> bytes:
    """Return the digest of the text and the draft that a round was of."""
    return chain_draft(task.digest, task.round.draft_tokens, task.round.tree)


def _timing(times: TaskTimes) -> Timing:
    """Return what an answer tells of a round's times."""
    return Timing(times.queue_s, times.forward_s, times.total_s, times.num_forward_tokens)
