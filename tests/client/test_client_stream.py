"""The stream object of the asynchronous client: results, leaving it, closing it."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from specdec import (
    AsyncClient,
    FinishReason,
)
from specdec.v1 import generation_pb2 as pb
from tests.support.scripted import SESSION, TEXT, WHOLE, Endless, Send, Service, digest_at, sends


async def test_result_includes_chunks_already_read(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(*WHOLE)]
    async with client.generate("x") as stream:
        assert stream.session_id is None
        await anext(stream)
        assert stream.session_id == SESSION
        assert (await stream.result()).text == TEXT
        assert (await stream.result()).text == TEXT


async def test_closed_stream_has_no_result(service: Service, client: AsyncClient) -> None:
    service.handlers = [Endless()]
    async with client.generate("x") as stream:
        await anext(stream)
    with pytest.raises(ValueError, match="the session has not finished"):
        await stream.result()


async def leave_by_closing(client: AsyncClient) -> None:
    async with client.generate("x") as stream:
        async for _ in stream:
            break


async def leave_by_error(client: AsyncClient) -> None:
    with suppress(KeyError):
        async with client.generate("x") as stream:
            await anext(stream)
            raise KeyError


async def leave_by_garbage_collection(client: AsyncClient) -> None:
    async for _ in client.generate("x"):
        break
    gc.collect()


async def leave_by_cancellation(client: AsyncClient) -> None:
    begun = asyncio.Event()

    async def consume() -> None:
        async for _ in client.generate("x"):
            begun.set()

    task = asyncio.create_task(consume())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "leave", [leave_by_closing, leave_by_error, leave_by_garbage_collection, leave_by_cancellation]
)
async def test_leaving_the_stream_cancels_the_call(
    service: Service, client: AsyncClient, leave: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    service.handlers = [endless := Endless()]
    await leave(client)
    await endless.cancelled.wait()


@pytest.mark.parametrize("begins", [True, False])
async def test_close_ends_iteration_in_another_task(service: Service, client: AsyncClient, begins: bool) -> None:
    service.handlers = [endless := Endless(begins=begins)]
    stream = client.generate("x")

    async def read() -> int:
        return len([one async for one in stream])

    reading = asyncio.create_task(read())
    await endless.arrived.wait()
    await stream.close()
    assert await reading <= begins
    await endless.cancelled.wait()


async def test_stream_has_one_reader(service: Service, client: AsyncClient) -> None:
    service.handlers = [endless := Endless(begins=False)]
    async with client.generate("x") as stream:
        first = asyncio.ensure_future(anext(stream))
        await endless.arrived.wait()
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        first.cancel()


async def test_cancel_ends_the_session(service: Service, client: AsyncClient) -> None:
    ended = asyncio.Event()
    finish = pb.Finish(reason=pb.FINISH_REASON_CANCELLED)
    last = {"session_id": SESSION, "offset": 2, "digest": digest_at(2), "finish": finish}

    async def until_cancelled(request: Any, send: Send, context: Any) -> None:
        await send(**WHOLE[0])
        await ended.wait()
        await send(**last)

    async def cancel(request: Any, send: Send, context: Any) -> None:
        await send(pb.CancelSessionResponse(status=pb.SESSION_STATUS_CANCELLED))
        ended.set()

    service.handlers = [until_cancelled, cancel]
    async with client.generate("x") as stream:
        await anext(stream)
        await stream.cancel()
        completion = await stream.result()
    assert (completion.text, completion.finish_reason) == ("Once upon", FinishReason.CANCELLED)
    assert service.requests[1] == pb.CancelSessionRequest(session_id=SESSION)


async def test_cancel_before_the_session_closes(service: Service, client: AsyncClient) -> None:
    service.handlers = [endless := Endless(begins=False)]
    stream = client.generate("x")
    reading = asyncio.ensure_future(anext(stream, None))
    await endless.arrived.wait()
    await stream.cancel()
    assert await reading is None
    await endless.cancelled.wait()
