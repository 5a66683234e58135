"""Streams and their clients: signs of life, clients that leave, ids, several choices, broken connections."""

import asyncio
from typing import Any

import grpc
import openai
import pytest
from prometheus_client import REGISTRY

from specdec import errors
from specdec.v1 import generation_pb2 as pb
from tests.support.gateway import (
    CANCELLED,
    CHAT,
    COMPLETION,
    MODEL,
    asked,
    connected,
    openai_client,
    request,
    serving_gateway,
)
from tests.support.scripted import SESSION, TEXT, WHOLE, Endless, Send, Service, chunk, sends, served

STREAM = COMPLETION | {"stream": True}


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def first_tokens() -> float | None:
    """Return how often the gateway has seen the first tokens of an answer."""
    return REGISTRY.get_sample_value("specdec_gateway_time_to_first_token_seconds_count")


async def session_ended(service: Service) -> None:
    """Wait until the service was asked to end the session."""
    while not any(isinstance(each, pb.CancelSessionRequest) for each in service.requests):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert service.requests[-1].session_id == SESSION


async def test_broken_stream_is_resumed(service: Service, port: int) -> None:
    service.handlers = [sends(WHOLE[0], then=grpc.StatusCode.UNAVAILABLE), sends(*WHOLE[1:])]
    answer = await asked(port, "/v1/completions", STREAM)
    assert text_of(answer.events) == TEXT
    assert (service.requests[1].session_id, service.requests[1].offset) == (SESSION, 2)


async def test_request_is_repeated_before_the_first_token(service: Service, port: int) -> None:
    service.handlers = [sends(then=errors.UnavailableError("draining", 0.01)), sends(*WHOLE)]
    assert (await asked(port, "/v1/completions", COMPLETION)).json["choices"][0]["text"] == TEXT
    first, second = service.requests
    assert first.request_id == second.request_id


async def test_silence_has_signs_of_life(service: Service, coordinator: str) -> None:
    go_on = asyncio.Event()

    async def silent(given: Any, send: Send, context: Any) -> None:
        await go_on.wait()
        await sends(*WHOLE)(given, send, context)

    service.handlers = [MODEL, silent]
    async with serving_gateway(coordinator, keep_alive_s=0.02) as port, connected(port) as connection:
        await connection.send(request("/v1/chat/completions", CHAT | {"stream": True}))
        head = await connection.until(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"text/event-stream" in head
        await connection.until(b'"role":"assistant"')
        for _ in range(3):
            await connection.until(b": keep-alive\n\n")
        go_on.set()
        await connection.until(b'"content":" was."')
        await connection.until(b"data: [DONE]")


async def test_openai_client_passes_over_signs_of_life(service: Service, coordinator: str) -> None:
    async def slow(given: Any, send: Send, context: Any) -> None:
        for fields in WHOLE:
            await asyncio.sleep(0.05)
            await send(**fields)

    service.handlers = [MODEL, slow]
    async with serving_gateway(coordinator, keep_alive_s=0.01) as port, openai_client(port) as client:
        stream = await client.completions.create(**STREAM)
        assert "".join([event.choices[0].text async for event in stream]) == TEXT


@pytest.mark.parametrize("streamed", [True, False])
async def test_client_that_leaves_ends_its_session(service: Service, port: int, streamed: bool) -> None:
    endless, before = Endless(), first_tokens()
    service.handlers = [endless, CANCELLED]
    async with connected(port) as connection:
        await connection.send(request("/v1/completions", COMPLETION | {"stream": streamed}))
        if streamed:
            await connection.until(b"Once upon")
        else:
            while first_tokens() == before:  # noqa: ASYNC110  # a metric sends no events
                await asyncio.sleep(0.005)
    await endless.cancelled.wait()
    await session_ended(service)
    assert service.requests[0].when_detached == pb.DETACHED_POLICY_CANCEL


async def test_openai_client_cancels(service: Service, client: Any) -> None:
    endless = Endless()
    service.handlers = [endless, CANCELLED]
    stream = await client.completions.create(**STREAM)
    assert (await anext(aiter(stream))).choices[0].text == "Once upon"
    await stream.close()
    await endless.cancelled.wait()
    await session_ended(service)


async def test_client_that_may_return_only_detaches(service: Service, port: int) -> None:
    endless = Endless()
    service.handlers = [endless, sends(*WHOLE)]
    async with connected(port) as connection:
        await connection.send(request("/v1/completions", STREAM, x_request_id="mine"))
        await connection.until(b"Once upon")
    await endless.cancelled.wait()
    answer = await asked(port, "/v1/completions", STREAM, x_request_id="mine")
    assert text_of(answer.events) == TEXT
    assert answer.headers["x-request-id"] == "mine"
    first, second = service.requests
    assert first.request_id == second.request_id


async def names_of(service: Service, port: int, *requests: tuple[dict[str, Any], dict[str, str]]) -> list[str]:
    """Return the names under which requests with these bodies and headers are made at the coordinator."""
    service.handlers = [sends(*WHOLE) for _ in requests]
    for content, headers in requests:
        assert (await asked(port, "/v1/completions", content, **headers)).status == 200
    return [each.request_id for each in service.requests]


async def test_ids_count_with_key_and_body(service: Service, port: int) -> None:
    mine = {"x_request_id": "r-1", "authorization": "Bearer a"}
    names = await names_of(
        service,
        port,
        (COMPLETION, mine),
        (COMPLETION, mine),
        (COMPLETION, mine | {"authorization": "Bearer b"}),
        (COMPLETION, mine | {"authorization": ""}),
        (COMPLETION | {"seed": 1}, mine),
        (COMPLETION, mine | {"x_request_id": "r-2"}),
        (COMPLETION, {}),
        (COMPLETION, {}),
    )
    assert names[0] == names[1]
    assert len(set(names)) == 7
    assert not any("r-1" in name for name in names)


async def test_answers_have_an_id(service: Service, port: int) -> None:
    service.handlers = [sends(*WHOLE)]
    answer = await asked(port, "/v1/completions", COMPLETION)
    assert len(answer.headers["x-request-id"]) == 32
    refused = await asked(port, "/v1/completions", {}, x_request_id="mine")
    assert (refused.status, refused.headers["x-request-id"]) == (400, "mine")


async def test_choices_are_sessions_of_their_own(service: Service, client: Any) -> None:
    service.handlers = [sends(*[fields | {"session_id": f"s-{number}"} for fields in WHOLE]) for number in range(3)]
    answer = await client.chat.completions.create(**CHAT, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {TEXT}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 21)
    assert len({each.request_id for each in service.requests}) == 3
    assert len({each.sampling.seed for each in service.requests}) == 3


async def test_streams_of_choices_are_mixed(service: Service, client: Any) -> None:
    service.handlers = [sends(*[fields | {"session_id": f"s-{number}"} for fields in WHOLE]) for number in range(2)]
    stream = await client.chat.completions.create(**CHAT, n=2, stream=True)
    texts: dict[int, str] = {0: "", 1: ""}
    reasons = []
    async for event in stream:
        [choice] = event.choices
        texts[choice.index] += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == {0: TEXT, 1: TEXT}
    assert reasons == ["stop", "stop"]


async def test_choice_that_fails_ends_the_others(service: Service, client: Any) -> None:
    endless = Endless()
    service.handlers = [endless, sends(then=errors.OverloadedError("no room", 1.0)), CANCELLED]
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(**CHAT, n=2)
    await endless.cancelled.wait()


async def test_deadline_is_a_timeout(service: Service, coordinator: str) -> None:
    service.handlers = [MODEL, Endless(), CANCELLED]
    async with serving_gateway(coordinator, timeout_s=0.5) as port:
        answer = await asked(port, "/v1/completions", COMPLETION)
    assert (answer.status, answer.json["error"]["code"]) == (504, "timeout")
    assert "deadline of 0.5 s exceeded" in answer.json["error"]["message"]


async def test_unfinished_characters_make_no_event(service: Service, port: int) -> None:
    half = chunk(0) | {"text": "", "text_ends": [0, 0]}
    service.handlers = [sends(half, *WHOLE[1:])]
    events = (await asked(port, "/v1/completions", STREAM)).events
    assert [event["choices"][0]["text"] for event in events] == [" a", " time there", " was.", ""]


async def test_requests_take_coordinators_in_turns() -> None:
    services = [Service(), Service()]
    for service in services:
        service.handlers = [MODEL, *[sends(*WHOLE)] * 20]
    async with served(services[0]) as first, served(services[1]) as second:
        address = f"ipv4:127.0.0.1:{first},127.0.0.1:{second}"
        async with serving_gateway(address) as port:
            while not all(any(isinstance(each, pb.GenerateRequest) for each in one.requests) for one in services):
                for service in services:
                    service.handlers = [sends(*WHOLE)]
                assert (await asked(port, "/v1/completions", COMPLETION)).status == 200
