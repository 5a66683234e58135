"""Writes to clients that do not read, or have left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from specdec.errors import UnavailableError
from specdec.serving.server import Server, serving
from specdec.serving.writing import Writer
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc
from target_service.settings import TargetSettings

SERVICE = "specdec.v1.GenerationService"
SETTINGS = TargetSettings(model="none", port=0, drain_s=0)
UNBUFFERED = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
CHUNK = pb.GenerateResponse(text="x" * 100_000)


class Floods(generation_pb2_grpc.GenerationServiceServicer):
    """Writes without end, and keeps the error that ends it."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        """Write."""
        writer = Writer(context, timeout_s=0.1)
        try:
            while True:
                await writer.write(CHUNK)
        except BaseException as error:
            self.ended.set_result(error)
            raise


async def test_a_client_that_does_not_read_ends_the_handler() -> None:
    """What was written before arrives, then the error, which lets it resume."""
    servicer = Floods()  # type: ignore[abstract]  # no other method is called

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.grpc)
        yield

    async with (
        serving(SETTINGS, SERVICE, build) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=UNBUFFERED) as channel,
    ):
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="x"))
        assert isinstance(await servicer.ended, UnavailableError)
        read: list[pb.GenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError, match=r"took nothing for 0\.1 s; resume"):
            await read_into(read, call)
        assert read == [CHUNK] * len(read) != []


async def read_into(messages: list[pb.GenerateResponse], call: Any) -> None:
    async for message in call:
        messages.append(message)


class Left:
    """The context of a call whose client leaves during a write."""

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def write(self, message: object) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")


async def test_a_client_that_leaves_during_a_write_cancels_the_handler() -> None:
    with pytest.raises(asyncio.CancelledError):
        await Writer(Left()).write(CHUNK)
