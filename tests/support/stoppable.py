"""Servers as processes of their own, which a test can stop as SIGSTOP does; production's server options.

`python -m tests.support.stoppable` answers the first round of text and then nothing, and a resumed session at once.
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from specdec.serving.server import Server, serving
from specdec.v1 import generation_pb2_grpc
from target_service.settings import TargetSettings
from tests.support.scripted import WHOLE, Send, Service, sends


async def first_chunk_alone(request: Any, send: Send, context: Any) -> None:
    """Send one chunk, then nothing, for ever."""
    await send(**WHOLE[0])
    await asyncio.Event().wait()


class BeginsOrEnds(Service):
    """Begins every session and goes on with none; ends the sessions that it is to resume."""

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # writes by itself
        """Send the first chunk alone."""
        self.handlers = [first_chunk_alone]
        await super().Generate(request, context)

    async def Resume(self, request: Any, context: Any) -> None:  # type: ignore[override]  # writes by itself
        """Send the other chunks."""
        self.handlers = [sends(*WHOLE[1:])]
        await super().Resume(request, context)


@asynccontextmanager
async def _build(server: Server) -> AsyncIterator[None]:
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(BeginsOrEnds(), server.grpc)
    yield


async def _serve() -> None:
    async with serving(TargetSettings(model="none", port=0), "specdec.v1.GenerationService", _build) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def stoppable_server() -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Run such a server; yield its process and port."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.stoppable"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        while not (line := await process.stdout.readline()).strip().isdigit():
            assert line, "the server ended before it listened"
        yield process, int(line)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(_serve())
