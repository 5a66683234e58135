"""Workers that lie: proxies between a coordinator and real workers that mutate some of what these answer."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from specdec.channel import MAX_MESSAGE_BYTES, open_channel
from specdec.v1 import draft_pb2, target_pb2
from tests.fuzz.mutation import mutated

ANSWERS: dict[str, type[Message]] = {
    "GetTarget": target_pb2.GetTargetResponse,
    "GetDraft": draft_pb2.GetDraftResponse,
    "Score": target_pb2.ScoreResponse,
    "Propose": draft_pb2.ProposeResponse,
}
ENDINGS = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.NOT_FOUND,
)
NUM_ADDRESSES = 8
END, REPEAT, DROP = 0.02, 0.05, 0.02  # how often a lie is an early end, an answer twice, or none


class Liar(grpc.GenericRpcHandler):
    """Passes calls on to a worker. `chance` of an answer is a lie; `spares` sees a stream's opening."""

    def __init__(self, address: str, seed: int, spares: Callable[[bytes], bool]) -> None:
        self._channel: Any = open_channel(address)
        self._rng = random.Random(seed)
        self._spares = spares
        self.chance = 0.0
        self.describes_wrongly = False
        self.num_lies = 0

    def service(self, handler_call_details: Any) -> Any:
        """Serve the methods of both kinds of workers."""
        path = handler_call_details.method
        name = path.rpartition("/")[2]
        if name in ("GetTarget", "GetDraft"):
            return grpc.unary_unary_rpc_method_handler(partial(self._describe, path, name))
        if name in ("Score", "Propose"):
            return grpc.stream_stream_rpc_method_handler(partial(self._pass_on, path, name))
        return None

    async def close(self) -> None:
        """Close the channel to the worker."""
        await self._channel.close()

    async def _describe(self, path: str, name: str, request: bytes, context: Any) -> bytes:
        answer: bytes = await self._channel.unary_unary(path)(request)
        return self._lie(name, answer) if self.describes_wrongly and self._rng.random() < self.chance else answer

    async def _pass_on(
        self, path: str, name: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        upstream = self._channel.stream_stream(path)()
        forwarding, is_spared = None, False
        try:
            opening = await anext(aiter(requests), None)
            if opening is None:
                return
            is_spared = self._spares(opening)
            await upstream.write(opening)
            forwarding = asyncio.ensure_future(_forward(requests, upstream))
            while (answer := await upstream.read()) is not grpc.aio.EOF:
                for message in [answer] if is_spared else await self._said(name, answer, context):
                    yield message
            await _end_as(upstream, context)
        finally:
            if forwarding:
                forwarding.cancel()
            upstream.cancel()

    async def _said(self, name: str, answer: bytes, context: Any) -> list[bytes]:
        """Return what is sent in an answer's place."""
        if self._rng.random() >= self.chance:
            return [answer]
        self.num_lies += 1
        fate = self._rng.random()
        if fate < END:
            await context.abort(self._rng.choice(ENDINGS), "a lie")
        if fate < END + REPEAT:
            return [answer, answer]
        if fate < END + REPEAT + DROP:
            return [b""]
        return [mutated(self._rng, ANSWERS[name].FromString(answer), valid=0.0)]

    def _lie(self, name: str, answer: bytes) -> bytes:
        self.num_lies += 1
        return mutated(self._rng, ANSWERS[name].FromString(answer), valid=0.0)


async def _forward(requests: AsyncIterator[bytes], upstream: Any) -> None:
    async for request in requests:
        await upstream.write(request)
    await upstream.done_writing()


async def _end_as(upstream: Any, context: Any) -> None:
    """End a call as the worker ended it."""
    code = await upstream.code()
    if code is not grpc.StatusCode.OK:
        context.set_trailing_metadata(await upstream.trailing_metadata())
        await context.abort(code, await upstream.details() or "")


@asynccontextmanager
async def lying(address: str, seed: int, spares: Callable[[bytes], bool]) -> AsyncIterator[tuple[Liar, str]]:
    """Serve a proxy to the worker at an address; yield it and its name, which leads to several addresses.

    A worker that has lied is left by all sessions for a moment: with several they do not wait for each other.
    """
    liar = Liar(address, seed, spares)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    server.add_generic_rpc_handlers((liar,))
    addresses = [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" for _ in range(NUM_ADDRESSES)]
    await server.start()
    try:
        yield liar, f"ipv4:{','.join(addresses)}"
    finally:
        await server.stop(0)
        await liar.close()
