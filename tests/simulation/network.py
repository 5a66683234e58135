"""The simulated network: servers, channels to them, and everything that can happen to a call under way.

`Channel` has the interface of grpc.aio.Channel as far as the generated stubs use it, `Server` that of grpc.aio.Server.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import grpc

from coordinator.pool.resolving import Resolve
from specdec.serving.security.gate import Gate
from specdec.serving.server import StatusInterceptor
from tests.simulation.calls import ClientCall, Pipe, ServerCall
from tests.simulation.loop import CURRENT, Process, outside_of_processes, virtual_loop

KEEPALIVE_S = (3.0, 12.0)  # until the ends of a connection that is silently lost notice it
CONNECT_S = 0.005
MAX_DELAY_S = 3.0


class Server:
    """What one process serves; handlers are added by the generated functions."""

    def __init__(self, address: str, process: Process) -> None:
        self.address, self.process = address, process
        self.is_ready = False
        self.calls: dict[Connection, None] = {}
        self._interceptor = StatusInterceptor(Gate())
        self._interceptor.ready = True
        self._handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: the registered methods are enough."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add a service."""
        for method, handler in handlers.items():
            self._handlers[f"/{service}/{method}"] = handler

    @property
    def own_address(self) -> str:
        """The address of this server alone."""
        return f"{self.address}/{self.process.name}"

    async def handler(self, method: str) -> Any:
        """Return a method's handler, wrapped as production wraps it."""

        async def found(_: Any) -> Any:
            return self._handlers[method]

        return await self._interceptor.intercept_service(found, _Method(method))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Method:
    method: str


class Connection:
    """A call between two processes."""

    def __init__(self, network: "Network", caller: Process | None, server: Server, method: str) -> None:
        self._network, self._server = network, server
        self.caller, self.method = caller, method
        self.client: ClientCall
        self.answering: ServerCall
        self.pipes: list[Pipe] = []

    def __str__(self) -> str:
        caller = self.caller.name if self.caller else "world"
        return f"{self.method.rpartition('/')[2]} of {caller} at {self._server.process.name}"

    def is_between(self, one: str, other: str) -> bool:
        """Whether it connects these two processes, in either direction."""
        return {one, other} == {self.caller.name if self.caller else "", self._server.process.name}

    def reset(self) -> None:
        """Break it; both ends notice at once."""
        self._cut()
        self._lose_client(0.0)
        self._lose_server(0.0)

    def half_open(self) -> None:
        """Break it for the caller alone: what it has sent still arrives, and the server notices only later."""
        self.pipes[1].is_cut = True
        self._lose_client(0.0)
        self.pipes[0].is_closed = True
        self._lose_server(self._network.keepalive_s())

    def lose(self) -> None:
        """Drop everything from here on; both ends notice only later."""
        self._cut()
        self._lose_client(self._network.keepalive_s())
        self._lose_server(self._network.keepalive_s())

    def _cut(self) -> None:
        for pipe in self.pipes:
            pipe.is_cut = True

    def _lose_client(self, after_s: float) -> None:
        virtual_loop().call_later(
            after_s, self.client.end, grpc.StatusCode.UNAVAILABLE, "connection lost", context=outside_of_processes()
        )

    def _lose_server(self, after_s: float) -> None:
        virtual_loop().call_later(after_s, self.answering.deliver, "cancel", None, context=outside_of_processes())


@dataclass
class Network:
    """All servers and all calls under way."""

    usual_delay_s: ClassVar[float] = 0.001

    random: random.Random
    delay_s: float = usual_delay_s  # the mean of a message's; drawn exponentially
    servers: list[Server] = field(default_factory=list)
    partitioned: set[frozenset[str]] = field(default_factory=set)  # pairs of processes that cannot reach each other
    garbled: dict[str, float] = field(default_factory=dict)  # the share of a process's answers that are garbage
    on_bug: Callable[[str], None] = lambda what: None  # called where a handler raises what is no SpecdecError

    def keepalive_s(self) -> float:
        """Draw how long a silent loss stays unnoticed."""
        return self.random.uniform(*KEEPALIVE_S)

    def serve(self, address: str, process: Process) -> Any:
        """Return a server, not ready yet: a Server, for functions that expect grpc's."""
        server = Server(address, process)
        self.servers.append(server)
        process.on_death.append(lambda: self._remove(server))
        return server

    def calls(self, method: str = "") -> list[Connection]:
        """Return the calls under way whose method has this in its name."""
        return [call for server in self.servers for call in server.calls if method in call.method]

    def channel(self, address: str) -> Any:
        """Return a channel to an address, or to all servers of a name: a Channel, for stubs that expect grpc's."""
        return Channel(self, address)

    def resolver(self, name: str) -> Resolve:
        """Return how to look a name up: the addresses of all servers that live, ready or not."""

        async def resolve() -> list[str]:
            await asyncio.sleep(self.delay())
            return sorted(server.own_address for server in self.servers if server.address == name)

        return resolve

    def delay(self) -> float:
        """Draw a message's delay: mostly short, sometimes long."""
        factor = 1000.0 if self.random.random() < 0.002 else 1.0
        return min(MAX_DELAY_S, self.random.expovariate(1.0 / self.delay_s) * factor)

    def pick(self, address: str, caller: Process | None) -> Server | None:
        """Return any server of an address that is ready."""
        name = caller.name if caller else ""
        found = [
            server
            for server in self.servers
            if address in (server.address, server.own_address)
            and server.is_ready
            and frozenset((name, server.process.name)) not in self.partitioned
        ]
        return self.random.choice(found) if found else None

    def connect(self, call: ClientCall, address: str, method: str, metadata: Any) -> Process | None:
        """Find a server for a call and begin it there; return its process."""
        caller = CURRENT.get()
        server = self.pick(address, caller)
        if server is None or (caller is not None and not caller.is_alive):
            virtual_loop().call_later(
                CONNECT_S, call.end, grpc.StatusCode.UNAVAILABLE, "no server", context=outside_of_processes()
            )
            return None
        connection = Connection(self, caller, server, method)
        name = server.process.name

        def deliver(kind: str, value: Any) -> None:
            call.deliver(kind, self._garbled(name, value) if kind == "message" else value)

        to_client = Pipe(self.delay, deliver)
        connection.client = call
        connection.answering = ServerCall(metadata, to_client, cancels_handler=self.random.random() < 0.5)
        to_server = call.to_server = Pipe(self.delay, connection.answering.deliver)
        connection.pipes = [to_server, to_client]
        server.calls[connection] = None
        server.process.spawn(self._answer(connection, server, method), name=f"handler of {connection}")
        return server.process

    async def _answer(self, connection: Connection, server: Server, method: str) -> None:
        try:
            await connection.answering.run(await server.handler(method))
        finally:
            server.calls.pop(connection, None)
        if connection.answering.has_failed_inside:
            self.on_bug(f"{connection} ended with INTERNAL")

    def _garbled(self, name: str, message: bytes) -> bytes:
        """Return what a process's answer has become."""
        if self.random.random() >= self.garbled.get(name, 0.0):
            return message
        length = self.random.choice((0, 1 + len(message) // 2))  # an empty message is a valid one
        return bytes(self.random.getrandbits(8) for _ in range(length))

    def join(self, process: Process) -> None:
        """Let a process's death be noticed by those that it has called."""
        process.on_death.append(lambda: self._hang_up(process))

    def _hang_up(self, process: Process) -> None:
        for connection in self.calls():
            if connection.caller is process:
                to_server, to_client = connection.pipes
                to_server.send("cancel")
                to_server.is_closed = to_client.is_cut = True

    def _remove(self, server: Server) -> None:
        """Take a dead process's server away; some of its callers notice only later."""
        self.servers.remove(server)
        for connection in list(server.calls):
            if self.random.random() < 0.8:
                connection.reset()
            else:
                connection.lose()


class Channel:
    """A channel, as the generated stubs use it."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address
        self.server: Process | None = None  # that answers the call that was begun last

    async def close(self) -> None:
        """Do nothing: there is no connection without a call."""

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return the function that begins a bidirectional stream."""

        def begin(*, metadata: Any = (), timeout: float | None = None) -> ClientCall:
            call = ClientCall(request_serializer, response_deserializer)
            self.server = self._network.connect(call, self._address, method, metadata)
            if timeout is not None:
                call.expire_after(timeout)
            return call

        return begin

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return the function that begins a call with many answers."""
        begin = self.stream_stream(method, request_serializer, response_deserializer)

        def call(request: Any, *, metadata: Any = (), timeout: float | None = None) -> ClientCall:
            stream: ClientCall = begin(metadata=metadata, timeout=timeout)
            if stream.to_server:
                stream.to_server.send("message", request_serializer(request))
                stream.to_server.send("half close")
            return stream

        return call

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return the function that makes a call with one answer."""
        begin = self.unary_stream(method, request_serializer, response_deserializer)

        async def call(  # the stubs name its arguments
            request: Any,
            *,
            metadata: Any = (),
            timeout: float | None = None,  # noqa: ASYNC109
        ) -> Any:
            stream: ClientCall = begin(request, metadata=metadata, timeout=timeout)
            try:
                answer = await stream.read()
                await stream.read()  # the status
                return answer
            finally:
                stream.cancel()

        return call
