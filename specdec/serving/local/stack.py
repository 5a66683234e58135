"""The running services: started in order, watched, ended in order."""

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
from specdec.serving.child import Child, LogLine, OnLine
from specdec.serving.local.commands import Command, coordinator_command, environment_of, worker_commands
from specdec.serving.local.options import CannotRun, Options
from specdec.serving.local.preflight import check, notices
from specdec.serving.local.restarts import Restarts
from specdec.types import SamplingParams

ASK_AGAIN_S = 0.1  # where a service was cut off while it was asked for its health
WARM_UP_S = 120.0  # a first forward may compile


WorkerCommands = Callable[[Options, int], list[Command]]
"""Gives the workers to start on a machine of so many cores, targets first."""


class Stack:
    """The services. Entering returns once a generation succeeded; leaving, however that happens, ends all of them.

    `death` becomes the first child that ended by itself. After the start a draft worker that ends is started again
    instead: the coordinator decodes without it. Raises CannotRun.
    """

    def __init__(self, options: Options, on_line: OnLine, commands: WorkerCommands) -> None:
        self.options = options
        self._commands = commands
        self.children: list[Child] = []
        self.death: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self.port = options.port
        self._on_line = on_line
        self._started = False
        self._stopping = False
        self._restarting: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Return where clients on this machine find the coordinator."""
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}.get(self.options.host, self.options.host)
        return f"{host}:{self.port}"

    async def __aenter__(self) -> Self:
        check(self.options, os.environ)
        for name, sentence in notices(self.options):
            self._on_line(name, {"text": sentence})
        try:
            await self._unless_one_ends(self._start())
        except BaseException:
            await self.stop()
            raise
        self._started = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait(self) -> None:
        """Wait until a service that cannot be spared ends by itself, which raises CannotRun."""
        await self._unless_one_ends(asyncio.Event().wait())

    async def stop(self) -> None:
        """End the coordinator, then the workers."""
        self._stopping = True
        for task in self._restarting:
            task.cancel()
        await asyncio.gather(*self._restarting, return_exceptions=True)
        patience_s = self.options.drain_s + 5.0
        for child in [child for child in self.children if child.name == "coordinator"]:
            await child.stop(patience_s)
        await asyncio.gather(*(child.stop(patience_s) for child in self.children))

    def kill(self) -> None:
        """End everything, now."""
        for child in self.children:
            child.kill()

    async def _start(self) -> None:
        commands = self._commands(self.options, len(os.sched_getaffinity(0)))
        workers = [await self._launch(command) for command in commands]
        ports = [await child.port for child in workers]
        services = ["Target" if command.name.startswith("target") else "Draft" for command in commands]
        await asyncio.gather(*map(_serving, ports, services))
        by_kind = {kind: [port for port, own in zip(ports, services, strict=True) if own == kind] for kind in services}
        command = coordinator_command(self.options, by_kind["Target"], by_kind.get("Draft", []))
        self.port = await (await self._launch(command)).port
        await _serving(self.port, "Generation")
        await self._prove()

    async def _launch(self, command: Command, restarts: Restarts | None = None) -> Child:
        restarts = restarts or Restarts()
        environment = environment_of(command, os.environ)
        child = await Child.start(command.name, command.module, command.flags, environment, self._on_line)
        child.ended.add_done_callback(lambda _: self._note_death(child, command, restarts))
        self.children.append(child)
        return child

    def _note_death(self, child: Child, command: Command, restarts: Restarts) -> None:
        if self._stopping:
            return
        if self._started and command.is_draft:
            task = asyncio.create_task(self._restart(child, command, restarts), name=f"restart {child.name}")
            self._restarting.add(task)
            task.add_done_callback(self._restarting.discard)
        elif not self.death.done():
            self.death.set_result(child)

    async def _restart(self, child: Child, command: Command, restarts: Restarts) -> None:
        """Start a draft worker again after a pause, on its old port: the coordinator has the address."""
        self.children.remove(child)
        pause_s = restarts.pause_s()
        self._on_line(child.name, _lost(child, pause_s))
        await asyncio.sleep(pause_s)
        restarts.started()
        if child.port.done():
            command = command.at_port(child.port.result())
        await self._launch(command, restarts)

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
            await asyncio.wait([task, self.death], return_when=asyncio.FIRST_COMPLETED)
            if self.death.done():
                raise CannotRun(self.death.result().describe_end())
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _lost(child: Child, pause_s: float) -> LogLine:
    """Return the log line of a draft worker that ended. An error, so that benchmarks print it too."""
    return {
        "event": "draft_worker_lost",
        "level": "error",
        "cause": child.describe_end(),
        "effect": "generations go on without its drafts, slower",
        "restart_in_s": round(pause_s, 1),
    }


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
