"""The running services: started in order, kept running, ended in order."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.channel import open_channel
from specdec.client import AsyncClient
from specdec.errors import SpecdecError
from specdec.serving.child import Child, OnLine
from specdec.serving.local.commands import Command, coordinator_command, gateway_command, worker_commands
from specdec.serving.local.options import CannotRun, Options
from specdec.serving.local.part import Part
from specdec.serving.local.preflight import check, notices
from specdec.types import SamplingParams

ASK_AGAIN_S = 0.1  # where a service was cut off while it was asked for its health
WARM_UP_S = 120.0  # a first forward may compile


WorkerCommands = Callable[[Options, int], list[Command]]
"""Gives the workers to start on a machine of so many cores, targets first."""


class Stack:
    """The services. Entering returns once a generation succeeded; leaving, however that happens, ends all of them.

    A service that ends by itself during the start ends the others; afterwards it is started again (`part.py`).
    Raises CannotRun.
    """

    def __init__(self, options: Options, on_line: OnLine, commands: WorkerCommands) -> None:
        self.options = options
        self.port = options.port
        self.http_port = options.http_port
        self._commands = commands
        self._on_line = on_line
        self._parts: list[Part] = []
        self._running: list[asyncio.Task[None]] = []  # one a part; ends where the part does for good
        self._death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()  # the first such end

    @property
    def address(self) -> str:
        """Return where clients on this machine find the coordinator."""
        return f"{self._host}:{self.port}"

    @property
    def http_address(self) -> str | None:
        """Return what OpenAI's clients on this machine take as base_url; None: there is no gateway."""
        return None if self.http_port is None else f"http://{self._host}:{self.http_port}/v1"

    @property
    def _host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}.get(self.options.host, self.options.host)

    @property
    def children(self) -> list[Child]:
        """Return the process of each service, the last one where it was replaced."""
        return [part.child for part in self._parts if part.child]

    async def __aenter__(self) -> Self:
        check(self.options, os.environ)
        for name, sentence in notices(self.options):
            self._on_line(name, {"text": sentence})
        try:
            await self._unless_one_ends(self._start())
        except BaseException:
            await self.stop()
            raise
        for part in self._parts:
            part.is_kept = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait(self) -> None:
        """Wait until a service cannot be kept running, which raises CannotRun."""
        await self._unless_one_ends(asyncio.Event().wait())

    async def stop(self) -> None:
        """End the gateway, then the coordinator, then the workers."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        patience_s = self.options.drain_s + 5.0
        for kind in ("gateway", "coordinator"):
            await asyncio.gather(*(part.stop(patience_s) for part in self._parts if part.kind == kind))
        await asyncio.gather(*(part.stop(patience_s) for part in self._parts))

    def kill(self) -> None:
        """End everything, now."""
        for part in self._parts:
            part.kill()

    async def _start(self) -> None:
        workers = [self._launch(command) for command in self._commands(self.options, len(os.sched_getaffinity(0)))]
        ports = {kind: [await part.port for part in workers if part.kind == kind] for kind in ("target", "draft")}
        await asyncio.gather(*(_serving(part.port.result(), part.kind.capitalize()) for part in workers))
        coordinator = self._launch(coordinator_command(self.options, ports["target"], ports["draft"]))
        self.port = await coordinator.port
        await _serving(self.port, "Generation")
        await self._prove()
        if self.options.http_port is not None:
            gateway = self._launch(gateway_command(self.options, self.address))
            self.http_port = await gateway.port
            await gateway.ready.wait()

    def _launch(self, command: Command) -> Part:
        part = Part(command, self._on_line)
        self._parts.append(part)
        task = asyncio.create_task(part.run(), name=f"part {part.name}")
        task.add_done_callback(self._note_end)
        self._running.append(task)
        return part

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and not self._death.done():
            self._death.set_result(task.exception() or AssertionError("a part never ends without an error"))

    async def _prove(self) -> None:
        """Generate one token of token 0, which every vocabulary has."""
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1)
        async with AsyncClient(self.address, timeout_s=WARM_UP_S) as client:
            try:
                await client.complete(prompt_token_ids=[0], sampling=sampling)
            except SpecdecError as error:
                raise CannotRun(f"the services run, but a first token did not come: {error}") from error

    async def _unless_one_ends(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._death], return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                raise self._death.result()
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def running(options: Options, on_line: OnLine, commands: WorkerCommands = worker_commands) -> Stack:
    """Return the services, to be entered; `on_line(name, entry)` gets each line that one of them logs."""
    return Stack(options, on_line, commands)


async def _serving(port: int, service: str) -> None:
    """Return once the service on this port of loopback says that it serves; one that ends is noticed elsewhere."""
    request = health_pb2.HealthCheckRequest(service=f"specdec.v1.{service}Service")
    async with open_channel(f"127.0.0.1:{port}") as channel:
        while True:
            with suppress(grpc.aio.AioRpcError):
                async for answer in health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            await asyncio.sleep(ASK_AGAIN_S)
