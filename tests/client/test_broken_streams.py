"""Streams that break: the client resumes them, and drops or refuses what comes twice."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

import specdec
from specdec import (
    AsyncClient,
    SamplingParams,
    TokenOrigin,
)
from specdec.v1 import generation_pb2 as pb
from tests.support.scripted import SESSION, TEXT, TOKENS, WHOLE, Send, Service, chunk, digest_at, sends, served


@pytest.mark.parametrize("broken", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
async def test_broken_stream_resumes_where_it_broke(
    service: Service, client: AsyncClient, num_chunks: int, broken: grpc.StatusCode
) -> None:
    service.handlers = [sends(*WHOLE[:num_chunks], then=broken), sends(*WHOLE[num_chunks:])]
    assert (await client.complete("x")).text == TEXT
    have = WHOLE[num_chunks]["offset"]
    assert service.requests[1] == pb.ResumeRequest(session_id=SESSION, offset=have, digest=digest_at(have))


async def test_resumed_stream_hands_back_what_it_proves(service: Service, client: AsyncClient) -> None:
    proved = [{**fields, "proof": bytes([number]) * 16} for number, fields in enumerate(WHOLE)]
    service.handlers = [sends(*proved[:2], then=grpc.StatusCode.UNAVAILABLE), sends(*proved[2:])]
    assert (await client.complete("x")).text == TEXT
    resumed, have = service.requests[1], WHOLE[2]["offset"]
    assert (resumed.offset, resumed.proof, tuple(resumed.tokens)) == (have, b"\x01" * 16, TOKENS[:have])
    assert len(resumed.origins) == have


async def test_stream_survives_a_break_after_every_chunk(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(one, then=grpc.StatusCode.UNAVAILABLE) for one in WHOLE]
    completion = await client.complete("x")
    assert completion.tokens == TOKENS
    assert [type(request).__name__ for request in service.requests] == ["GenerateRequest"] + ["ResumeRequest"] * 3


async def test_request_is_repeated_under_its_id(service: Service, client: AsyncClient) -> None:
    gone = sends(then=grpc.StatusCode.UNAVAILABLE)
    service.handlers = [gone, gone, sends(*WHOLE)]
    assert (await client.complete("x", sampling=SamplingParams(seed=1))).text == TEXT
    assert service.requests[0].request_id
    assert service.requests[0] == service.requests[1] == service.requests[2]


async def test_stream_without_finish_is_resumed(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE[:2]), sends(*WHOLE[2:])]
    assert (await client.complete("x")).text == TEXT


async def test_fenced_session_is_resumed(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(WHOLE[0], then=specdec.FencedError("another coordinator owns it")), sends(*WHOLE[1:])]
    assert (await client.complete("x")).text == TEXT


async def test_error_after_last_chunk_is_ignored(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE, then=grpc.StatusCode.UNAVAILABLE)]
    assert (await client.complete("x")).text == TEXT
    assert len(service.requests) == 1


async def test_retries_are_reported(service: Service) -> None:
    gone = grpc.StatusCode.UNAVAILABLE
    service.handlers = [sends(then=gone), sends(*WHOLE[:1], then=gone), sends(*WHOLE[1:])]
    seen: list[specdec.Retry] = []
    async with served(service) as port, AsyncClient(f"127.0.0.1:{port}", on_retry=seen.append) as client:
        assert (await client.complete("x", timeout_s=60)).text == TEXT
    assert [retry.session_id for retry in seen] == [None, SESSION]
    assert all(isinstance(retry.failure, specdec.UnavailableError) for retry in seen)
    # no server had answered at first: the shorter time-out of an address counts
    assert seen[0].left_s <= 20.0 < seen[1].left_s <= 60.0


async def test_cut_connection_is_restored(service: Service) -> None:
    held = asyncio.Event()

    async def stall(request: Any, send: Send, context: Any) -> None:
        await send(**WHOLE[0])
        await held.wait()

    service.handlers = [stall, sends(*WHOLE[1:])]
    texts = []
    async with served(service) as port, cuttable(port) as (address, cut), AsyncClient(address) as client:
        async for one in client.generate("x"):
            texts.append(one.text)
            if len(texts) == 1:
                cut()
        held.set()
    assert "".join(texts) == TEXT
    assert service.requests[1].offset == 2


async def test_slow_server_is_waited_for(service: Service) -> None:
    """A server on a busy machine accepts a connection long before it says something on it."""
    async with served(service) as port, cuttable(port, delay_s=0.5) as (address, _), AsyncClient(address) as client:
        await client.connect()


@asynccontextmanager
async def cuttable(port: int, delay_s: float = 0.0) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Run a TCP proxy to `port` that connects after a delay; yield its address and a function that cuts connections."""
    transports: list[Any] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        transports.extend((writer.transport, far_writer.transport))
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    def cut() -> None:
        for transport in transports:
            transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    finally:
        cut()
        server.close()
        await server.wait_closed()


async def test_repeated_chunks_are_dropped(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE[:3], then=grpc.StatusCode.UNAVAILABLE), sends(*WHOLE)]
    chunks = [one async for one in client.generate("x")]
    assert "".join(one.text for one in chunks) == TEXT
    assert tuple(token for one in chunks for token in one.tokens) == TOKENS


async def test_overlapping_chunk_is_cut_by_token(service: Service, client: AsyncClient) -> None:
    # the server joins rounds 1 to 3 in its replay; the client has round 1
    service.handlers = [sends(*WHOLE[:2], then=grpc.StatusCode.UNAVAILABLE), sends(chunk(1, 3))]
    last = [one async for one in client.generate("x")][-1]
    assert (last.offset, last.tokens, last.text) == (3, (4, 5, 6, 7), " time there was.")
    assert last.pieces == (" time", " there", "", " was.", "")
    assert last.origins == (TokenOrigin.ACCEPTED,) * 3 + (TokenOrigin.BONUS,)


@pytest.mark.parametrize(
    ("again", "what"),
    [
        (chunk(2), "missing"),
        (chunk(0, digest=b"x" * 16), "another digest"),
        (chunk(0, tokens=[1, 8]), "other tokens"),
        (chunk(0, 1, tokens=[1, 8, 3]), "other tokens"),
        (chunk(1, session_id="s-2"), "s-2"),
    ],
)
async def test_contradicting_chunk_is_data_loss(
    service: Service, client: AsyncClient, again: dict[str, Any], what: str
) -> None:
    service.handlers = [sends(WHOLE[0], then=grpc.StatusCode.UNAVAILABLE), sends(again)]
    chunks = client.generate("x")
    assert (await anext(chunks)).text == "Once upon"
    with pytest.raises(specdec.DataLossError, match=what):
        await anext(chunks)


async def test_resume_starts_at_the_offset(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE[1:])]
    stream = client.resume(SESSION, offset=2, digest=digest_at(2))
    assert stream.session_id == SESSION
    assert (await stream.result()).text == " a time there was."
    assert service.requests == [pb.ResumeRequest(session_id=SESSION, offset=2, digest=digest_at(2))]


async def test_resume_drops_tokens_before_offset(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(chunk(0, 3))]
    chunks = [one async for one in client.resume(SESSION, offset=3)]
    assert [one.tokens for one in chunks] == [(4, 5, 6, 7)]


async def test_resumed_stream_survives_a_break(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE[:2], then=grpc.StatusCode.UNAVAILABLE), sends(*WHOLE[2:])]
    assert (await client.resume(SESSION).result()).text == TEXT
    assert service.requests[0].digest == b""
    assert service.requests[1].offset == 3


async def test_resume_with_other_digest_is_data_loss(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(WHOLE[0])]
    with pytest.raises(specdec.DataLossError, match="another digest"):
        await client.resume(SESSION, offset=2, digest=b"x" * 16).result()
