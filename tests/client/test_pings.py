"""A server that is stopped, not ended: nobody closes its connections, and its kernel still takes bytes."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from specdec import AsyncClient, UnavailableError
from specdec.channel import MAX_QUICK_BYTES, PATIENT_PINGS, QUICK_PINGS, Pings, open_channel
from specdec.completion import Transcript
from specdec.connection import Connection
from specdec.retry import RetryPolicy
from specdec.serving.channels import open_worker_channel
from specdec.v1 import generation_pb2, generation_pb2_grpc
from tests.support.scripted import TOKENS
from tests.support.stoppable import stoppable_server

NOTICED_S = QUICK_PINGS.period_s + QUICK_PINGS.timeout_s
BUSY_S = 3.0  # what a busy machine may add; without pings that time out it is 20 s or more


async def silent_stream(channel: grpc.aio.Channel) -> AsyncIterator[Any]:
    """Begin a stream that has one answer and then stays silent."""
    stream = generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest())
    await stream.read()
    return stream  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["client", "worker"])
async def test_a_stopped_server_is_noticed_in_seconds(kind: str) -> None:
    async with stoppable_server() as (process, port):
        address = f"127.0.0.1:{port}"
        opened = open_channel(address) if kind == "client" else open_worker_channel(address)
        async with opened as channel:
            stream: Any = await silent_stream(channel)
            process.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began_s < NOTICED_S + BUSY_S


async def test_a_client_goes_on_at_another_coordinator_in_seconds() -> None:
    """grpc tries the stopped one first: it takes the connection and never answers."""
    async with stoppable_server() as (process, port), stoppable_server() as (_, other):
        client = AsyncClient("any", channel=lambda: open_channel(f"ipv4:127.0.0.1:{port},127.0.0.1:{other}"))
        async with client, client.generate("hello") as stream:
            first = await anext(stream)
            process.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            rest = [token async for chunk in stream for token in chunk.tokens]
            assert time.monotonic() - began_s < NOTICED_S + BUSY_S
        assert (*first.tokens, *rest) == TOKENS


async def test_servers_take_as_many_pings_as_are_sent() -> None:
    """A server that finds them too many closes the connection at the third or fourth."""
    async with (
        stoppable_server() as (_, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=Pings(0.3, 5.0).options()) as channel,
    ):
        stream: Any = await silent_stream(channel)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.read(), timeout=4.0)


@pytest.mark.parametrize(("num_bytes", "expected"), [(100, QUICK_PINGS), (MAX_QUICK_BYTES + 1, PATIENT_PINGS)])
async def test_large_requests_are_sent_with_patient_pings(num_bytes: int, expected: Pings) -> None:
    """A ping waits behind a request: over a slow connection it would be late each time the request is sent."""
    opened = []

    def open_and_note(pings: Pings) -> grpc.aio.Channel:
        opened.append(pings)
        return open_channel("127.0.0.1:1", pings=pings)

    connection = Connection(
        "127.0.0.1:1",
        open_channel=open_and_note,
        closes_channel=True,
        metadata=(),
        policy=RetryPolicy(max_failures=1),
        connect_timeout_s=5,
    )
    request = generation_pb2.GenerateRequest(text="x" * num_bytes)
    with pytest.raises(UnavailableError):
        await anext(connection.follow(request, Transcript(), 5.0))
    await connection.close()
    assert opened == [expected]
