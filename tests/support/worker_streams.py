"""Streams to one worker, as a coordinator opens them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import grpc
import pytest

from specdec.channel import open_channel
from specdec.exact import codec
from specdec.exact.prefix import chain
from specdec.exact.values import ObservationRequest, SparseDistribution
from specdec.serving.session_stream import open_session
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2
from tests.support.cluster import serving_draft, serving_target

PROMPT = [5, 6, 7, 8, 9, 10]
PLAIN = SamplingParams(seed=7)
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


@asynccontextmanager
async def connected_target(model: Path, **settings: object) -> AsyncIterator[grpc.aio.Channel]:
    """Serve a target worker and connect to it."""
    async with (
        serving_target(model, **{"kv_cache_bytes": 8 << 20} | settings) as address,
        open_channel(address) as channel,
    ):
        yield channel


@asynccontextmanager
async def connected_draft(model: Path | None, **settings: object) -> AsyncIterator[grpc.aio.Channel]:
    """Serve a draft worker and connect to it; it drafts ahead only if told to."""
    values = {"kv_cache_bytes": 8 << 20, "drafters": "model,ngram", "draft_ahead": False}
    async with serving_draft(model, **values | settings) as address, open_channel(address) as channel:
        yield channel


class WorkerStream(Generic[RequestT, ResponseT]):
    """A stream that sends its opening before the first message."""

    def __init__(self, call: grpc.aio.StreamStreamCall[RequestT, ResponseT], opening: RequestT) -> None:
        self._call = call
        self._opening: RequestT | None = opening
        self.text: list[int] = []  # of the session, as far as this stream was told; a test may know more

    async def open(self) -> None:
        """Send the opening once."""
        if self._opening is not None:
            await self._call.write(self._opening)
            self._opening = None

    async def read(self) -> ResponseT | None:
        """Return the next answer; None at the end of the stream."""
        answer = await self._call.read()
        while getattr(answer, "in_progress", False):
            answer = await self._call.read()
        return None if answer is grpc.aio.EOF else cast("ResponseT", answer)

    async def send(self, message: RequestT) -> ResponseT | None:
        """Send a message; return the answer, or None at the end of the stream."""
        await self.open()
        self._prove(message)
        await self._call.write(message)
        return await self.read()

    def _prove(self, message: Any) -> None:
        """Fill in the digest of the text before a round's tokens, as a coordinator does."""
        name = message.WhichOneof("payload")
        if name not in ("score", "propose"):
            return
        asked = getattr(message, name)
        asked.prefix_digest = asked.prefix_digest or chain(b"", self.text[: asked.start])
        self.text[asked.start :] = asked.tokens

    async def ask(self, message: RequestT) -> ResponseT:
        """Send a message; return the answer that must come."""
        answer = await self.send(message)
        assert answer is not None
        return answer

    async def finish(self, closing: RequestT) -> None:
        """End the session."""
        assert await self.send(closing) is None
        assert await self._call.code() == grpc.StatusCode.OK

    async def abandon(self) -> None:
        """End the stream without a `close`."""
        await self._call.done_writing()
        assert await self.read() is None

    async def fail(self, message: RequestT) -> grpc.aio.AioRpcError:
        """Send a message; return the error that ends the stream."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.send(message)
        return caught.value

    async def refused(self) -> grpc.aio.AioRpcError:
        """Send the opening; return the error that ends the stream."""
        await self.open()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.read()
        return caught.value


class TargetStream(WorkerStream[target_pb2.ScoreRequest, target_pb2.ScoreResponse]):
    """A session's stream to a target worker."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        session_id: str,
        sampling: SamplingParams = PLAIN,
        *,
        epoch: int = 1,
        num_prompt: int = len(PROMPT),
        observations: ObservationRequest | None = None,
        matches_chosen: bool = True,
        model_fingerprint: str = "",
        incarnation: str = "",
    ) -> None:
        opening = target_pb2.OpenTarget(
            session=open_session(session_id, epoch, sampling, num_prompt, incarnation),
            observations=codec.observation_request_to_proto(observations) if observations else None,
            model_fingerprint=model_fingerprint,
            matches_chosen=matches_chosen,
        )
        super().__init__(target_pb2_grpc.TargetServiceStub(channel).Score(), target_pb2.ScoreRequest(open=opening))

    async def score(
        self,
        start: int,
        tokens: Sequence[int],
        draft: Sequence[int] = (),
        supports: Sequence[Sequence[int]] = (),
    ) -> target_pb2.ScoreResponse:
        """Run one round."""
        return await self.ask(
            score_request(start=start, tokens=tokens, draft_tokens=draft, supports=packed_supports(*supports))
        )

    async def close(self) -> None:
        """End the session."""
        await self.finish(target_pb2.ScoreRequest(close=types_pb2.CloseSession()))


class DraftStream(WorkerStream[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse]):
    """A session's stream to a draft worker."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        session_id: str,
        sampling: SamplingParams = PLAIN,
        *,
        drafter: str = "model",
        epoch: int = 1,
        is_matched: bool = False,
    ) -> None:
        opened = open_session(session_id, epoch, sampling, len(PROMPT), is_matched=is_matched)
        opening = draft_pb2.OpenDraft(session=opened, drafter=drafter)
        super().__init__(draft_pb2_grpc.DraftServiceStub(channel).Propose(), draft_pb2.ProposeRequest(open=opening))

    async def propose(
        self, start: int, tokens: Sequence[int], count: int, stop_below: float = 0.0
    ) -> draft_pb2.ProposeResponse:
        """Run one round."""
        request = propose_request(start=start, tokens=tokens, num_draft_tokens=count, stop_below=stop_below)
        return await self.ask(request)

    async def close(self) -> None:
        """End the session."""
        await self.finish(draft_pb2.ProposeRequest(close=types_pb2.CloseSession()))


def score_request(**fields: Any) -> target_pb2.ScoreRequest:
    """Return the message of one round to a target worker."""
    return target_pb2.ScoreRequest(score=target_pb2.Score(**fields))


def propose_request(**fields: Any) -> draft_pb2.ProposeRequest:
    """Return the message of one round to a draft worker."""
    return draft_pb2.ProposeRequest(propose=draft_pb2.Propose(**fields))


def packed_supports(*supports: Sequence[int]) -> types_pb2.SparseDistributions:
    """Return supports as a target worker gets them: without probabilities."""
    return codec.distributions_to_proto([SparseDistribution(ids, ()) for ids in supports], with_probs=False)
