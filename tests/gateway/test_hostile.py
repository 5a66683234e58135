"""Requests that no client should send: each gets a clean error in OpenAI's form, and the next good one its answer."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway import CHAT, COMPLETION, MODEL, Answer, asked, connected, request, serving_gateway
from tests.support.scripted import TEXT, WHOLE, Service, sends

LIMITS = {"max_body_bytes": 4096, "max_header_bytes": 4096, "read_timeout_s": 0.3}
DEEP = b"[" * 2000 + b"]" * 2000
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def body(words: str) -> bytes:
    """Return a request whose body has these words in place of a temperature."""
    return request("/v1/completions", json.dumps(COMPLETION | {"temperature": 0}).replace("0}", f"{words}}}").encode())


HOSTILE = {
    "no JSON": (request("/v1/completions", b"{"), 400, "invalid_json"),
    "no UTF-8": (request("/v1/completions", b'{"model": "\xff"}'), 400, "invalid_json"),
    "NaN": (body("NaN"), 400, "invalid_json"),
    "Infinity": (body("-Infinity"), 400, "invalid_json"),
    "a number without end": (body("1e999"), 400, None),
    "a number of many digits": (body("1" * 3000), 400, None),
    "negative": (body("-1"), 400, None),
    "deep nesting": (request("/v1/completions", b'{"model": ' + DEEP[:1900] + b"}"), 400, "invalid_json"),
    "deep nesting in a field": (body("[" * 300 + "]" * 300), 400, None),
    "a huge body": (request("/v1/completions", b" " * 100_000), 413, "request_too_large"),
    "a huge announced body": (HEAD + b"content-length: 99999999999\r\n\r\n", 413, "request_too_large"),
    "half of a surrogate pair": (
        request("/v1/completions", b'{"model": "toy", "prompt": "\\ud800"}'),
        400,
        None,
    ),
    "half of a surrogate pair as a model": (
        request("/v1/completions", b'{"model": "\\udfff", "prompt": "x"}'),
        404,
        "model_not_found",
    ),
    "no object": (request("/v1/chat/completions", b'"hello"'), 400, None),
    "an empty body": (request("/v1/chat/completions", b""), 400, "invalid_json"),
    "a wrong type": (request("/v1/chat/completions", CHAT | {"messages": {"role": "user"}}), 400, None),
    "a form": (
        request("/v1/completions", b"model=toy", content_type="application/x-www-form-urlencoded"),
        415,
        "unsupported_content_type",
    ),
    "a compressed body": (
        request("/v1/completions", COMPLETION, content_encoding="gzip"),
        415,
        "unsupported_content_encoding",
    ),
    "an unknown route": (request("/v1/embeddings", {"input": "x"}), 404, "unknown_url"),
    "a route above the root": (request("/v1/../../etc/passwd", None, "GET"), 404, "unknown_url"),
    "a wrong method": (request("/v1/completions", None, "GET"), 405, "method_not_allowed"),
    "an unknown method": (request("/v1/models", None, "BREW"), 405, "method_not_allowed"),
    "no bearer key": (request("/v1/completions", COMPLETION, authorization="Basic eDp5"), 401, "invalid_api_key"),
    "a key that is no header": (
        request("/v1/completions", COMPLETION, authorization="Bearer a b"),
        401,
        "invalid_api_key",
    ),
    "an id that is none": (request("/v1/completions", COMPLETION, x_request_id="a b"), 400, None),
    "a flood of headers": (
        HEAD + b"".join(b"x-%d: %s\r\n" % (number, b"y" * 100) for number in range(1000)) + b"\r\n",
        431,
        "headers_too_large",
    ),
    "a long path": (request(f"/{'x' * 100_000}", None, "GET"), 431, "headers_too_large"),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_http"),
    "no version": (b"GET /v1/models\r\n\r\n", 400, "invalid_http"),
    "a header without a name": (b"GET /v1/models HTTP/1.1\r\nhost: x\r\n: y\r\n\r\n", 400, "invalid_http"),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    "two lengths": (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!", 400, "invalid_http"),
    "a negative length": (HEAD + b"content-length: -5\r\n\r\n", 400, "invalid_http"),
    "a strange transfer encoding": (HEAD + b"transfer-encoding: gzip\r\n\r\n", 501, None),
    "chunks that are none": (HEAD + b"transfer-encoding: chunked\r\n\r\nzzz\r\n", 400, "invalid_http"),
    "a body that never comes": (HEAD + b"content-length: 50\r\n\r\n{", 408, "request_timeout"),
    "a head that never ends": (HEAD, 408, "request_timeout"),
    "nothing at all": (b"", 408, "request_timeout"),
}


@pytest.fixture
async def limited(service: Service, coordinator: str) -> AsyncIterator[int]:
    """The port of a gateway with low limits, which knows the model."""
    service.handlers = [MODEL, sends(*WHOLE)]
    async with serving_gateway(coordinator, **LIMITS) as port:
        assert (await asked(port, "/v1/completions", COMPLETION)).status == 200
        yield port


async def assert_next_is_answered(service: Service, port: int) -> None:
    service.handlers = [sends(*WHOLE)]
    answer = await asked(port, "/v1/completions", COMPLETION)
    assert answer.json["choices"][0]["text"] == TEXT


def assert_clean(answer: Answer, status: int, code: str | None) -> None:
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert 10 < len(error["message"]) < 700


@pytest.mark.parametrize(("sent", "status", "code"), HOSTILE.values(), ids=HOSTILE)
async def test_hostile_request_gets_a_clean_error(
    service: Service, limited: int, sent: bytes, status: int, code: str | None
) -> None:
    async with connected(limited) as connection:
        await connection.send(sent)
        assert_clean(await connection.answer(), status, code)
    await assert_next_is_answered(service, limited)


async def test_connection_goes_on_after_a_refusal(service: Service, limited: int) -> None:
    service.handlers = [sends(*WHOLE)]
    async with connected(limited) as connection:
        for wrong in (request("/v1/completions", b"{"), request("/v1/completions", {})):
            await connection.send(wrong)
            assert_clean(await connection.answer(), 400, (await _code(wrong)))
        await connection.send(request("/v1/completions", COMPLETION))
        assert (await connection.answer()).json["choices"][0]["text"] == TEXT


async def _code(wrong: bytes) -> str:
    return "invalid_json" if wrong.endswith(b"{") else "missing_required_parameter"


async def test_requests_may_follow_without_waiting(service: Service, limited: int) -> None:
    service.handlers = [sends(*WHOLE), sends(*WHOLE)]
    async with connected(limited) as connection:
        await connection.send(2 * request("/v1/completions", COMPLETION))
        texts = [(await connection.answer()).json["choices"][0]["text"] for _ in range(2)]
    assert texts == [TEXT, TEXT]


async def test_http_1_0_gets_its_answer(service: Service, limited: int) -> None:
    service.handlers = [sends(*WHOLE), sends(*WHOLE)]
    for content in (COMPLETION, COMPLETION | {"stream": True}):
        async with connected(limited) as connection:
            await connection.send(request("/v1/completions", content).replace(b"HTTP/1.1", b"HTTP/1.0"))
            answer = await connection.answer()
        assert answer.status == 200
        assert b" was." in answer.body


async def test_body_in_many_pieces_is_read(service: Service, limited: int) -> None:
    service.handlers = [sends(*WHOLE)]
    async with connected(limited) as connection:
        for byte in request("/v1/completions", COMPLETION):
            await connection.send(bytes([byte]))
        assert (await connection.answer()).status == 200


async def test_chunked_body_is_read(service: Service, limited: int) -> None:
    service.handlers = [sends(*WHOLE)]
    content = json.dumps(COMPLETION).encode()
    async with connected(limited) as connection:
        await connection.send(
            HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)
        )
        assert (await connection.answer()).status == 200


async def test_garbage_after_a_stream_has_begun_ends_it(service: Service, limited: int) -> None:
    service.handlers = [sends(*WHOLE)]
    async with connected(limited) as connection:
        await connection.send(request("/v1/completions", COMPLETION | {"stream": True}) + b"\x00garbage\r\n\r\n")
        assert (await connection.answer()).status == 200
        assert_clean(await connection.answer(), 400, "invalid_http")
    await assert_next_is_answered(service, limited)


async def test_too_many_connections_are_refused(service: Service, coordinator: str) -> None:
    service.handlers = [MODEL, MODEL]
    async with serving_gateway(coordinator, max_connections=1) as port:
        async with connected(port) as first:
            await first.send(request("/healthz", None, "GET"))
            assert (await first.answer()).status == 200
            async with connected(port) as second:
                answer = await second.answer()
        assert (answer.status, answer.json["error"]["code"]) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"
        assert (await asked_again(port)).status == 200


async def asked_again(port: int) -> Answer:
    """Ask until the connections before are closed on the gateway's side too."""
    while (answer := await asked(port, "/v1/models", None, "GET")).status == 503:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return answer


async def test_health_and_readiness(service: Service, limited: int) -> None:
    for path, word in (("/healthz", "ok"), ("/readyz", "ready")):
        assert (await asked(limited, path, None, "GET")).json == {"status": word}
    head = request("/healthz", None, "HEAD")
    async with connected(limited) as connection:
        await connection.send(head)
        assert b"200 OK" in await connection.line()
