"""The gateway as a process: when it is ready, how it ends, and what it says where it cannot start."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.gateway import COMPLETION, OFFER, asked, connected, request
from tests.support.ports import free_port
from tests.support.scripted import WHOLE, Send, Service, sends, served


class Named(Service):
    """A service that says which model it has, however often it is asked."""

    async def GetModel(self, request: Any, context: Any) -> Any:
        return OFFER


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running process."""

    process: asyncio.subprocess.Process

    async def logged(self, event: str) -> Any:
        """Read its log up to this event; return it."""
        assert self.process.stderr
        while line := await self.process.stderr.readline():
            entry = json.loads(line)
            if entry["event"] == event:
                return entry
        raise AssertionError(f"it ended without {event}")


@asynccontextmanager
async def started(*flags: str) -> AsyncIterator[Gateway]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "--port", "0", *flags), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield Gateway(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_gateway_is_ready_once_a_coordinator_answers() -> None:
    port, service = free_port(), Named()
    async with started("--coordinator", f"127.0.0.1:{port}") as gateway:
        own = (await gateway.logged("listening"))["port"]
        answer = await asked(own, "/readyz", None, "GET")
        assert (answer.status, answer.json["error"]["code"]) == (503, "not_ready")
        assert (await asked(own, "/healthz", None, "GET")).status == 200
        async with served(service, port):
            await gateway.logged("ready")
            assert (await asked(own, "/readyz", None, "GET")).status == 200
        gateway.process.send_signal(signal.SIGTERM)
        assert await gateway.process.wait() == 0


async def test_streams_end_before_the_gateway_does() -> None:
    service, go_on = Named(), asyncio.Event()

    async def slow(given: Any, send: Send, context: Any) -> None:
        await send(**WHOLE[0])
        await go_on.wait()
        await sends(*WHOLE[1:])(given, send, context)

    service.handlers = [slow]
    async with served(service) as port, started("--coordinator", f"127.0.0.1:{port}") as gateway:
        own = (await gateway.logged("ready"))["port"]
        async with connected(own) as connection:
            await connection.send(request("/v1/completions", COMPLETION | {"stream": True}))
            await connection.until(b"Once upon")
            gateway.process.send_signal(signal.SIGTERM)
            await gateway.logged("draining")
            go_on.set()
            await connection.until(b"data: [DONE]")
        assert await gateway.process.wait() == 0


async def test_taken_port_gives_one_sentence() -> None:
    service = Service()
    async with served(service) as port:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "--port", str(port)), stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
    assert process.returncode == 1
    assert said.decode().startswith(f"gateway: cannot listen on 127.0.0.1:{port} (")
    assert said.decode().endswith("); choose another port\n")
