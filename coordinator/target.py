"""The target workers as the coordinator sees them: what they serve, and the scores of a session's proposals."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from coordinator.streams import DESCRIBE_TIMEOUT_S, WorkerSession, WorkerStream, answered, routing_metadata
from specdec import messages
from specdec.errors import Mismatch, Overloaded, SpecdecError, Unavailable
from specdec.exact import codec
from specdec.exact.values import Proposal, Scores
from specdec.retry import RetryPolicy
from specdec.types import ModelInfo
from specdec.v1 import target_pb2, target_pb2_grpc, types_pb2

RETRY = RetryPolicy(first_s=0.1, maximum_s=2.0)  # where no target worker answers
REROUTE = RetryPolicy(first_s=0.01, factor=1.3, maximum_s=0.5)  # where one answers that serves another model


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

    async def describe(self, route: int = 0) -> ModelInfo:
        """Return the model of one of them; other routes may reach others. Raises Unavailable while none answers."""
        request, metadata = target_pb2.GetTargetRequest(), routing_metadata("describe", route)
        reply = await answered(self._stub.GetTarget(request, metadata=metadata, timeout=DESCRIBE_TIMEOUT_S))
        return messages.model_from_proto(reply.model)

    def open(self, session: WorkerSession, vocab_size: int, on_mismatch: Callable[[], None] = lambda: None) -> "Scorer":
        """Return a session's scorer; its stream opens with the first round.

        `on_mismatch` is called when a worker turns out to serve another model than the session's.
        """
        target = target_pb2.OpenTarget(session=session.opening(), model_fingerprint=session.model_fingerprint)
        opening = target_pb2.ScoreRequest(open=target)
        closing = target_pb2.ScoreRequest(close=types_pb2.CloseSession())
        stream: WorkerStream[target_pb2.ScoreResponse] = WorkerStream(
            self._stub.Score, session.session_id, opening, closing, self._timeout_s
        )
        wants_logprobs = session.sampling.num_logprobs is not None
        return Scorer(stream, vocab_size, wants_logprobs, self._patience_s, session.num_prompt_tokens, on_mismatch)


class Scorer:
    """Scores one session's proposals; waits for a target worker to be back, for as long as the session has patience."""

    def __init__(
        self,
        stream: WorkerStream[target_pb2.ScoreResponse],
        vocab_size: int,
        wants_logprobs: bool,
        patience_s: float,
        num_prompt_tokens: int,
        on_mismatch: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._vocab_size, self._wants_logprobs = vocab_size, wants_logprobs
        self._retry = replace(RETRY, budget_s=patience_s)
        self._reroute = replace(REROUTE, budget_s=patience_s)
        self._on_mismatch = on_mismatch
        self._num_prompt_tokens = num_prompt_tokens

    async def score(self, committed: Sequence[int], proposal: Proposal) -> Scored:
        """Return K + 1 rows. Repeating a call is harmless: the same message has the same answer."""
        begin, failures = time.monotonic(), Counter[type[SpecdecError]]()
        while True:
            try:
                return await self._score(committed, proposal)
            except (Unavailable, Overloaded, Mismatch) as error:
                failures[type(error)] += 1
                pause_s = self._pause_s(error, failures[type(error)], time.monotonic() - begin)
                if pause_s is None:
                    raise self._given_up(error, has_text=len(committed) > self._num_prompt_tokens) from error
                await asyncio.sleep(pause_s)

    def _pause_s(self, error: SpecdecError, num_failures: int, elapsed_s: float) -> float | None:
        """Return the pause before the next attempt, None if the session's patience is at an end."""
        if not isinstance(error, Mismatch):
            return self._retry.pause_s(num_failures, elapsed_s, random.random())
        self._stream.reroute()
        self._on_mismatch()
        return self._reroute.pause_s(num_failures, elapsed_s, random.random())

    def _given_up(self, error: SpecdecError, has_text: bool) -> SpecdecError:
        waited_s = self._retry.budget_s
        if isinstance(error, Mismatch) and not has_text:
            return Unavailable("the target's model has just changed; resume the session, which has no text yet")
        if isinstance(error, Mismatch):
            message = f"no worker that serves the model of this session's text was found within {waited_s:g} s"
            return Mismatch(f"{message}; begin a new session, or resume this one when that model is served again")
        if isinstance(error, Unavailable):
            message = f"no target worker has served this round for {waited_s:g} s; the session can be resumed"
            return Unavailable(f"{message} (last: {error})", error.retry_after_s)
        return error

    async def _score(self, committed: Sequence[int], proposal: Proposal) -> Scored:
        supports = codec.distributions_to_proto(proposal.rows, with_probs=False)

        def message(start: int, tokens: Sequence[int]) -> target_pb2.ScoreRequest:
            score = target_pb2.Score(start=start, tokens=tokens, draft_tokens=proposal.tokens, supports=supports)
            return target_pb2.ScoreRequest(score=score)

        begin = time.perf_counter()
        reply = await self._stream.ask(committed, message)
        try:
            scores = codec.scores_from_proto(reply, proposal, self._vocab_size)
            if bool(scores.logprobs) != self._wants_logprobs:
                raise codec.MalformedReply("log probabilities that are missing, or were not asked for")
        except (codec.MalformedReply, ValueError) as error:
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
