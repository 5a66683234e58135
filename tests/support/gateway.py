"""A gateway in the test's process, requests written byte by byte, and the answers that they get."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai

from gateway.__main__ import serving
from gateway.settings import GatewaySettings
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import types_pb2
from tests.support.scripted import Handler, answers

NAME = "toy"
OFFER = pb.GetModelResponse(
    target=types_pb2.ModelInfo(name=NAME, fingerprint="ab" * 16),
    drafters=["ngram"],
    context_length=64,
    max_draft_tokens=8,
)
MODEL: Handler = answers(OFFER)
CANCELLED: Handler = answers(pb.CancelSessionResponse(status=pb.SESSION_STATUS_CANCELLED))
CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Tell me."}]}
COMPLETION: dict[str, Any] = {"model": NAME, "prompt": "Tell me."}


@asynccontextmanager
async def serving_gateway(coordinator: str, **settings: object) -> AsyncIterator[int]:
    """Serve a gateway in front of a coordinator; yield its port."""
    own = GatewaySettings.model_validate({"port": 0, "drain_s": 0, "coordinator": coordinator} | settings)
    async with serving(own) as server:
        yield server.port


@asynccontextmanager
async def openai_client(port: int, key: str = "none") -> AsyncIterator[Any]:
    """Give OpenAI's own client, which does not try again by itself. Any: its overloads want literal arguments."""
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as client:
        yield client


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Return the events of a stream, without the last one, which says that it is whole."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line.startswith("data: ")]


class Connection:
    """A connection on which a test says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def line(self) -> bytes:
        return await self._reader.readline()

    async def until(self, words: bytes) -> bytes:
        return await self._reader.readuntil(words)

    async def rest(self) -> bytes:
        return await self._reader.read()

    async def answer(self) -> Answer:
        """Read one answer, to the end of its body."""
        first = (await self.line()).decode().split()
        assert first[0] == "HTTP/1.1"
        headers = {}
        while line := (await self.line()).decode().strip():
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        status = int(first[1])
        return Answer(status, headers, b"" if status == 304 else await self._body(headers))

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self._reader.read()
        body = b""
        while size := int(await self.line(), 16):
            body += await self._reader.readexactly(size)
            await self.line()
        await self.line()
        return body

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    """Connect to a gateway."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


def request(path: str, content: Any = None, method: str = "POST", **headers: str) -> bytes:
    """Return a request as it goes over the wire; `content` is JSON, or bytes as they are."""
    body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
    given = {"host": "gateway", "content-type": "application/json", "content-length": str(len(body))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def asked(port: int, path: str, content: Any = None, method: str = "POST", **headers: str) -> Answer:
    """Send a request on a connection of its own; return the answer."""
    async with connected(port) as connection:
        await connection.send(request(path, content, method, **headers))
        return await connection.answer()
