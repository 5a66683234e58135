"""The target workers as the coordinator sees them: what they serve, and the scores of a session's proposals."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from coordinator.streams import DESCRIBE_METADATA, DESCRIBE_TIMEOUT_S, WorkerSession, WorkerStream, answered
from specdec import messages
from specdec.errors import OverloadedError, UnavailableError
from specdec.exact import codec
from specdec.exact.values import Proposal, Scores
from specdec.types import ModelInfo
from specdec.v1 import target_pb2, target_pb2_grpc, types_pb2

RETRY_S = 0.1  # between attempts at a target worker that is not there


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
        """Return the model that one of them serves. Raises UnavailableError while none answers."""
        request = target_pb2.GetTargetRequest()
        reply = await answered(self._stub.GetTarget(request, metadata=DESCRIBE_METADATA, timeout=DESCRIBE_TIMEOUT_S))
        return messages.model_from_proto(reply.model)

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
            except (UnavailableError, OverloadedError) as error:
                if time.monotonic() < deadline:
                    await asyncio.sleep(RETRY_S)
                elif isinstance(error, OverloadedError):
                    raise
                else:
                    waited = f"no target worker has served this round for {self._patience_s:g} s"
                    message = f"{waited}; the session can be resumed (last: {error})"
                    raise UnavailableError(message, error.retry_after_s) from error

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
            raise UnavailableError(f"a target worker answered against the contract: {error}") from error
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
