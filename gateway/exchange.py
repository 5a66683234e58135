"""One HTTP request and its answer: headers checked, the body read within limits, the answer as JSON or as events."""

import asyncio
import hashlib
import json
import re
import uuid
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.problems import HttpProblem, encoded, refused
from gateway.settings import GatewaySettings

T = TypeVar("T")

KEY = re.compile(r"[!-~]{1,8192}")
REQUEST_ID = re.compile(r"[!-~]{1,200}")
SCHEME = "bearer"
ID_HEADER = "x-request-id"
JSON_TYPE = "application/json"
DISCARDED_BODIES = (
    64  # times the maximum: so much of a body that is too large is read, so that its client reads the answer
)
EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies of nginx's kind would collect events
}


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class Exchange:
    """A request and its answer. `status` is None until the answer has begun."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: GatewaySettings) -> None:
        self.headers = Headers(scope=scope)
        self.scope, self._receive, self._send, self._settings = scope, receive, send, settings
        self.status: int | None = None
        self._shown_id = uuid.uuid4().hex

    def key(self) -> str | None:
        """Return the bearer key; None where none is given. Raises HttpProblem."""
        given = self.headers.get("authorization")
        if given is None:
            return None
        scheme, _, key = given.strip().partition(" ")
        if scheme.lower() == SCHEME and not key.strip():
            return None
        if scheme.lower() != SCHEME or not KEY.fullmatch(key.strip()):
            remedy = "send `Authorization: Bearer KEY`"
            raise HttpProblem(
                401,
                f"the header Authorization is not a bearer key; {remedy}",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return key.strip()

    def take_request_id(self) -> str | None:
        """Return the id that the client gave its request, which the answer has too; None: it gave none."""
        given = self.headers.get(ID_HEADER)
        if given is None:
            return None
        if not REQUEST_ID.fullmatch(given):
            raise refused("X-Request-Id", "is not 1 to 200 printable characters of ASCII without spaces")
        self._shown_id = given
        return given

    async def json(self) -> tuple[bytes, Any]:
        """Return the body, and what it means. Raises HttpProblem."""
        self._check_type()
        body = await self._body()
        return body, _parsed(body)

    def _check_type(self) -> None:
        given = self.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
        if given != JSON_TYPE:
            problem = f"the content type is {given[:80]!r}; send JSON with `Content-Type: {JSON_TYPE}`"
            raise HttpProblem(415, problem, code="unsupported_content_type")
        if self.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise HttpProblem(415, "the body is compressed; send it as it is", code="unsupported_content_encoding")

    async def _body(self) -> bytes:
        limit = self._settings.max_body_bytes
        announced = self.headers.get("content-length", "0")
        is_waiting = "expect" in self.headers  # for leave to send the body
        if int(announced) > limit and (is_waiting or int(announced) > DISCARDED_BODIES * limit):
            self._refuse_size(closes=is_waiting)
        try:
            async with asyncio.timeout(self._settings.read_timeout_s):
                return await self._read(limit)
        except TimeoutError:
            problem = f"the body did not arrive within {self._settings.read_timeout_s:g} s"
            raise HttpProblem(408, problem, code="request_timeout", headers={"connection": "close"}) from None

    async def _read(self, limit: int) -> bytes:
        pieces, size, is_complete = [], 0, False
        while not is_complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            size += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if size <= limit:
                pieces.append(message.get("body", b""))
            elif is_complete or size > DISCARDED_BODIES * limit:
                self._refuse_size()
        return b"".join(pieces)

    def _refuse_size(self, *, closes: bool = False) -> NoReturn:
        problem = f"the body is larger than {self._settings.max_body_bytes} bytes; send less"
        headers = {"connection": "close"} if closes else None
        raise HttpProblem(413, problem, code="request_too_large", headers=headers)

    async def unless_client_leaves(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns; cancel it and raise ClientLeft if the client leaves meanwhile."""
        task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self._left())
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientLeft
            return task.result()
        finally:
            task.cancel()
            leaving.cancel()
            await asyncio.gather(task, leaving, return_exceptions=True)

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """Send an answer of JSON."""
        body = encoded(content)
        mine = {"content-type": JSON_TYPE, "content-length": str(len(body))}
        await self.send_bytes(status, body, mine | dict(headers or {}))

    async def send_bytes(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send an answer as it is."""
        await self._begin(status, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def begin_events(self) -> None:
        """Begin an answer of server-sent events."""
        await self._begin(200, EVENT_HEADERS)

    async def event(self, content: Mapping[str, Any]) -> None:
        """Send one event."""
        await self._send_more(b"data: " + encoded(content) + b"\n\n")

    async def comment(self) -> None:
        """Send a sign of life, which clients pass over."""
        await self._send_more(b": keep-alive\n\n")

    async def end_events(self, *, is_whole: bool) -> None:
        """End the events; those that are whole say so."""
        body = b"data: [DONE]\n\n" if is_whole else b""
        await self._send({"type": "http.response.body", "body": body})

    async def _send_more(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        pairs = {**headers, ID_HEADER: self._shown_id}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def request_name(key: str | None, request_id: str | None, path: str, body: bytes) -> str:
    """Return the name of a request to coordinators: 32 hexadecimal digits.

    A client's id makes a repeated request the same one, which attaches to its sessions. The name is a hash of it with
    the key and the body, so that nobody attaches by an id that somebody else gave, nor to another request's text.
    """
    if request_id is None:
        return uuid.uuid4().hex
    digest = hashlib.blake2b(digest_size=16)
    for part in ((key or "").encode(), request_id.encode(), path.encode(), body):
        digest.update(len(part).to_bytes(8) + part)
    return digest.hexdigest()


def _parsed(body: bytes) -> Any:
    """Return what JSON means; NaN and infinity, which JSON does not have, are refused. Raises HttpProblem."""
    try:
        return json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        problem = "is not UTF-8"
    except RecursionError:
        problem = "is nested too deeply"
    except ValueError as error:
        problem = f"is not JSON: {error}"
    raise HttpProblem(400, f"the body {problem}", code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
