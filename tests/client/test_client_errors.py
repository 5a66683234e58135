"""Errors that the asynchronous client raises, and those that it tries again after."""

import asyncio
from typing import Any

import grpc
import pytest

import specdec
from specdec import (
    AsyncClient,
)
from specdec.v1 import generation_pb2 as pb
from tests.support.scripted import SESSION, TEXT, WHOLE, Endless, Service, answers, chunk, sends, served

FINAL_ERRORS: list[specdec.SpecdecError] = [
    specdec.InvalidArgumentError({"sampling.top_p": "is 7; give a number in (0, 1], or leave it unset"}),
    specdec.NotFoundError("there is no session s-1"),
    specdec.AlreadyExistsError("request_id r was used with other parameters"),
    specdec.ModelMismatchError("the draft's tokenizer is another"),
    specdec.ContextTooShortError("no worker has room for 73 tokens"),
    specdec.NonFiniteLogitsError("the model gave NaN"),
    specdec.DataLossError("the store went back"),
    specdec.InternalError(),
]


@pytest.mark.parametrize("error", FINAL_ERRORS, ids=lambda error: type(error).__name__)
async def test_permanent_error_is_raised_at_once(
    service: Service, client: AsyncClient, error: specdec.SpecdecError
) -> None:
    service.handlers = [sends(then=error)]
    with pytest.raises(type(error)) as caught:
        await client.complete("x")
    assert str(caught.value) == str(error)
    assert len(service.requests) == 1


async def test_invalid_argument_names_its_fields(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(then=FINAL_ERRORS[0])]
    with pytest.raises(specdec.InvalidArgumentError) as caught:
        await client.complete("x")
    assert list(caught.value.violations) == ["sampling.top_p"]


@pytest.mark.parametrize("kind", [specdec.OverloadedError, specdec.UnavailableError])
async def test_retry_after_is_honoured(
    service: Service, client: AsyncClient, kind: type[specdec.OverloadedError | specdec.UnavailableError]
) -> None:
    service.handlers = [sends(then=kind("later", retry_after_s=0.3)), sends(*WHOLE)]
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await client.complete("x")).text == TEXT
    assert loop.time() - began >= 0.3


async def test_pause_past_deadline_raises_at_once(service: Service, client: AsyncClient) -> None:
    service.handlers = [sends(then=specdec.OverloadedError("the queue is full", retry_after_s=3600))]
    with pytest.raises(specdec.OverloadedError, match="the queue is full"):
        await client.complete("x", timeout_s=100)


async def test_message_too_large_is_not_retried(service: Service, client: AsyncClient) -> None:
    """RESOURCE_EXHAUSTED without RetryInfo comes from grpc itself."""
    service.handlers = [sends(then=grpc.StatusCode.RESOURCE_EXHAUSTED)]
    with pytest.raises(specdec.OverloadedError, match="gone"):
        await client.complete("x")


async def test_max_retries_counts_since_the_last_chunk(service: Service) -> None:
    gone = sends(then=grpc.StatusCode.UNAVAILABLE)
    # repeated chunks do not reset the count
    service.handlers = [gone, gone, sends(WHOLE[0]), gone, sends(WHOLE[1]), gone, sends(WHOLE[1]), gone]
    async with served(service) as port, AsyncClient(f"127.0.0.1:{port}", max_retries=2) as client:
        with pytest.raises(specdec.UnavailableError, match="session s-1 can be resumed from token 3"):
            await client.complete("x")
    assert service.handlers == [gone]


async def test_hanging_server_exceeds_the_deadline(service: Service, client: AsyncClient) -> None:
    service.handlers = [Endless(begins=False)]
    sentence = r"deadline of 0\.5 s exceeded; session s-1 can be resumed from token 2"
    with pytest.raises(specdec.DeadlineExceededError, match=sentence):
        await client.resume(SESSION, offset=2, timeout_s=0.5).result()


async def test_unreachable_address_fails_after_connect_timeout(unused_port: int) -> None:
    async with AsyncClient(f"127.0.0.1:{unused_port}", connect_timeout_s=0.2) as client:
        for call in (client.connect(), client.complete("x"), client.get_model()):
            with pytest.raises(specdec.UnavailableError, match=f"no specdec answers on 127.0.0.1:{unused_port}"):
                await call


async def test_connect_timeout_ends_with_the_first_answer(service: Service) -> None:
    """After the first answer, `connect_timeout_s` no longer limits retries."""
    async with served(service) as port, AsyncClient(f"127.0.0.1:{port}", connect_timeout_s=0.01) as client:
        service.handlers = [answers(pb.GetModelResponse()), sends(then=grpc.StatusCode.UNAVAILABLE), sends(*WHOLE)]
        await client.get_model()
        assert (await client.complete("x")).text == TEXT


async def test_server_of_another_kind_is_reported() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        await client.connect()
        with pytest.raises(specdec.ModelMismatchError, match="not a specdec coordinator"):
            await client.complete("x")
    await server.stop(0)


@pytest.mark.parametrize("changes", [{"origins": [1, 9]}, {"origins": [1]}, {"text_ends": []}])
async def test_unreadable_chunk_is_refused(service: Service, client: AsyncClient, changes: dict[str, Any]) -> None:
    service.handlers = [sends(chunk(0, **changes))]
    with pytest.raises(specdec.ModelMismatchError, match="update"):
        await client.complete("x")
