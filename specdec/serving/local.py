"""All of specdec on this machine, each service a process of its own, on loopback: what `specdec up` runs.

    async with running(Options(target="models/target", draft="models/draft"), print_line) as stack:
        client = AsyncClient(stack.address)

Workers first, on free ports; once they serve, the coordinator; once it serves, one token as proof. They end in the
other order: the coordinator lets its streams finish, then nobody needs the workers.
"""

import asyncio
import os
import re
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.channel import open_channel
from specdec.client import AsyncClient
from specdec.errors import SpecdecError
from specdec.serving.child import Child, OnLine
from specdec.serving.settings import (
    ENV_PREFIX,
    Device,
    Dtype,
    refuse_unknown,
    settings_of,
    variable_names,
)
from specdec.types import SamplingParams

MODULES = ("coordinator", "target_service", "draft_service")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
NO_DRAFT, NGRAM_ONLY = "none", "ngram"
ADDRESS_VARIABLE = "SPECDEC_ADDRESS"  # the command's own, which no service knows
ASK_AGAIN_S = 0.1  # where a service was cut off while it was asked for its health
WARM_UP_S = 120.0  # a first forward may compile


class CannotRun(Exception):
    """The services cannot be started, or one of them ended. The message is for people."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. `draft` is a model, "ngram" for drafts without one, or "none" for plain decoding."""

    target: str
    draft: str = NGRAM_ONLY
    host: str = "127.0.0.1"  # of the coordinator; workers are always on loopback
    port: int = 50051  # 0 takes a free one
    store: str = "embedded"
    dtype: Dtype = "auto"
    device: Device = "auto"
    num_targets: int = 1
    num_drafts: int = 1
    target_threads: int | None = None
    draft_threads: int | None = None
    metrics_ports: int | None = None  # the first of consecutive ones: coordinator, targets, drafts
    drain_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Command:
    """One service to start."""

    name: str
    module: str
    flags: tuple[str, ...]
    num_threads: int = 1


def default_threads(num_cores: int) -> tuple[int, int]:
    """Return threads of the target and of the draft: a core stays for the others, and small models gain little."""
    return max(1, num_cores // 2), max(1, min(4, num_cores // 4))


def worker_commands(options: Options, num_cores: int) -> list[Command]:
    """Return the workers to start, targets first."""
    target_threads, draft_threads = default_threads(num_cores)
    ports = count((options.metrics_ports or 0) + 1)
    return [
        *(
            _worker("target", options, options.target_threads or target_threads, ports, number)
            for number in range(options.num_targets)
        ),
        *(
            _worker("draft", options, options.draft_threads or draft_threads, ports, number)
            for number in range(options.num_drafts if options.draft != NO_DRAFT else 0)
        ),
    ]


def _worker(kind: str, options: Options, num_threads: int, ports: "count[int]", number: int) -> Command:
    model = ("--model", options.target) if kind == "target" else _draft_flags(options.draft)
    flags = (
        *model,
        *("--host", "127.0.0.1", "--port", "0", "--dtype", options.dtype, "--device", options.device),
        *("--num-threads", str(num_threads)),
        *_common_flags(options, next(ports)),
    )
    name = f"{kind} worker {number + 1}" if number else f"{kind} worker"
    return Command(name, f"{kind}_service", flags, num_threads)


def _draft_flags(draft: str) -> tuple[str, ...]:
    """A draft worker with a model offers n-grams too, so that each request can choose."""
    return ("--drafters", "ngram") if draft == NGRAM_ONLY else ("--drafters", "model,ngram", "--model", draft)


def _common_flags(options: Options, metrics_port: int) -> tuple[str, ...]:
    metrics = ("--metrics-port", str(metrics_port)) if options.metrics_ports is not None else ()
    return (*metrics, "--drain-s", str(options.drain_s))


def coordinator_command(options: Options, target_ports: Sequence[int], draft_ports: Sequence[int]) -> Command:
    """Return the coordinator to start before these workers."""
    flags = (
        *("--host", options.host, "--port", str(options.port), "--store", options.store),
        *("--tokenizer", options.target, "--target", _addresses(target_ports), "--draft", _addresses(draft_ports)),
        *_common_flags(options, options.metrics_ports or 0),
    )
    return Command("coordinator", "coordinator", flags)


def _addresses(ports: Sequence[int]) -> str:
    return "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports) if ports else ""


def environment_of(command: Command, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a service: its own settings only, as each refuses what it does not know.

    Threads that wait must not spin: with as many processes as cores they would take each other's.
    """
    mine = variable_names(settings_of(command.module))
    kept = {name: value for name, value in environment.items() if not name.startswith(ENV_PREFIX) or name in mine}
    defaults = {
        "OMP_NUM_THREADS": str(command.num_threads),
        "OMP_WAIT_POLICY": "passive",
        "GRPC_VERBOSITY": "ERROR",
        "PYTHONUNBUFFERED": "1",
        "TQDM_DISABLE": "1",  # its bars are no lines
    }
    return defaults | kept


# ---- before anything is started


def check(options: Options, environment: Mapping[str, str]) -> None:
    """Raise CannotRun for what would stop the services later and less clearly."""
    _check_model("--target", options.target)
    if options.draft not in (NGRAM_ONLY, NO_DRAFT):
        _check_model("--draft", options.draft)
    _check_variables(environment)
    _check_overridden(options, environment)
    _check_port(options.host, options.port)
    _check_store(options.store)


def _check_model(flag: str, name: str) -> None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CannotRun(f"{flag}: the folder {name} holds no model (no config.json)", 2)
    elif not HUB_ID.fullmatch(name) or name.startswith("."):
        raise CannotRun(f"{flag}: there is no folder {name}; give a model's folder, or a hub id like org/name", 2)


def _check_variables(environment: Mapping[str, str]) -> None:
    kinds = [settings_of(module) for module in MODULES]
    known = [ADDRESS_VARIABLE, *(name for kind in kinds for name in variable_names(kind))]
    try:
        refuse_unknown(known, [name for name in environment if name.startswith(ENV_PREFIX)], "variable")
    except ValueError as error:
        raise CannotRun(str(error), 2) from None


def _check_overridden(options: Options, environment: Mapping[str, str]) -> None:
    """Refuse variables that would have no effect: a service's flag, which `up` gives, wins over its variable."""
    commands = [*worker_commands(options, num_cores=1), coordinator_command(options, [], [])]
    flags = {flag for command in commands for flag in command.flags if flag.startswith("--")} | {"--metrics-port"}
    for flag in sorted(flags):
        name = ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
        if name in environment:
            raise CannotRun(f"{name} has no effect here; unset it, and give the command's own flag (--help)", 2)


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host.strip("[]"), port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotRun(
                f"cannot listen on {host}:{port} ({reason}); choose another with --host or --port"
            ) from None


def _check_store(store: str) -> None:
    url = urlsplit(store)
    if url.scheme not in ("redis", "rediss"):
        return  # the coordinator knows the others
    try:
        place = f"{url.hostname or 'localhost'}:{url.port or 6379}"
    except ValueError as error:
        raise CannotRun(f"--store is no address: {error}", 2) from None
    try:
        socket.create_connection((url.hostname or "localhost", url.port or 6379), timeout=5).close()
    except OSError:
        raise CannotRun(f"no Redis answers on {place}; start one there, or leave --store embedded") from None


# ---- running

WorkerCommands = Callable[[Options, int], list[Command]]
"""Gives the workers to start on a machine of so many cores, targets first."""


class Stack:
    """The services. Entering returns once a generation succeeded; leaving, however that happens, ends all of them.

    `death` becomes the first child that ended by itself. Raises CannotRun.
    """

    def __init__(self, options: Options, on_line: OnLine, commands: WorkerCommands) -> None:
        self.options = options
        self._commands = commands
        self.children: list[Child] = []
        self.death: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self.port = options.port
        self._on_line = on_line
        self._stopping = False

    @property
    def address(self) -> str:
        """Return where clients on this machine find the coordinator."""
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}.get(self.options.host, self.options.host)
        return f"{host}:{self.port}"

    async def __aenter__(self) -> Self:
        check(self.options, os.environ)
        try:
            await self._unless_one_ends(self._start())
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait(self) -> None:
        """Wait until a service ends by itself, which raises CannotRun."""
        await self._unless_one_ends(asyncio.Event().wait())

    async def stop(self) -> None:
        """End the coordinator, then the workers."""
        self._stopping = True
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

    async def _launch(self, command: Command) -> Child:
        environment = environment_of(command, os.environ)
        child = await Child.start(command.name, command.module, command.flags, environment, self._on_line)
        child.ended.add_done_callback(lambda _: self._note_death(child))
        self.children.append(child)
        return child

    def _note_death(self, child: Child) -> None:
        if not self._stopping and not self.death.done():
            self.death.set_result(child)

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
