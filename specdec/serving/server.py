"""Servers: TLS, the gate, health, reflection, errors to status codes, limits, drain.

A server's life: listen (health "" SERVING, its services NOT_SERVING, every call UNAVAILABLE), load, ready, then at
SIGTERM: not serving, drain, close. A server that fails does not drain: its callers go on elsewhere at once.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specdec.channel import MAX_MESSAGE_BYTES, MIN_PING_PERIOD_S, PATIENT_PINGS
from specdec.errors import InternalError, InvalidArgumentError, SpecdecError, UnavailableError
from specdec.serving.event_loop import Priority, set_priority
from specdec.serving.large_messages import LargeMessages
from specdec.serving.process import CannotServe, run, run_until_told, supervised, where
from specdec.serving.security.caller import current_tenant
from specdec.serving.security.gate import Gate, gate_of
from specdec.serving.security.running_calls import RunningCalls
from specdec.serving.security.tls import server_credentials
from specdec.serving.settings import ServiceSettings
from specdec.serving.status import to_status
from specdec.serving.telemetry import get_logger, serve_metrics
from specdec.serving.tracing.start import traced
from specdec.serving.writing import Writer

STATUS_SERVICE = "specdec.v1.StatusService"
MAX_METADATA_BYTES = 16 << 10
WINDOW_BYTES = 256 << 10  # of a message that may be under way: over 100 ms of network, 2.5 MB a second

_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second server on the same port silently takes half of the connections
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a few compressed bytes could become a large message
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    # the limit above alone refuses by chance what is a little larger
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * MIN_PING_PERIOD_S)),
    ("grpc.keepalive_permit_without_calls", 1),
    *PATIENT_PINGS.options(),
    # a fixed window for each stream: grpc's own measuring lets it grow to megabytes, for each of a crowd of clients
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    # clients look for new servers only when a connection ends; running streams get an hour
    ("grpc.max_connection_age_ms", 300_000),
    ("grpc.max_connection_age_grace_ms", 3_600_000),
)


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions into status codes, the same way for every call, and refuses calls until the server is ready.

    The gate is asked first, before a message is parsed. Where every caller is admitted, health and reflection stay as
    they are.
    """

    def __init__(self, gate: Gate) -> None:
        self.ready = False
        self.calls = RunningCalls()
        self._gate = gate
        self._large_messages = LargeMessages()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method's handler."""
        is_standard = handler_call_details.method.startswith("/grpc.")
        if is_standard and self._gate.is_open:
            return await continuation(handler_call_details)
        if not self.ready and not is_standard:
            return self._wrapped(grpc.stream_stream_rpc_method_handler(_refuse))
        handler = await continuation(handler_call_details)
        return handler and self._wrapped(handler)

    def _wrapped(self, handler: Any) -> Any:
        """Return a handler that lets a call in, and parses it then.

        It takes a stream of messages also where there is one: for a call that ends without its message grpc would
        neither call a handler nor end the call.
        """

        async def call(requests: Any, context: Any) -> None:
            try:
                async with self.calls.during(await self._gate.admit(context)):
                    await self._served(handler, requests, context)
                    return
            except SpecdecError as error:
                failure = error
            except grpc.aio.AbortError:
                raise  # by a handler of grpc's own
            except Exception as error:
                # the type alone: a message could quote a prompt
                get_logger().error("call_failed", error=type(error).__name__, where=where(error))
                failure = InternalError()
            status = to_status(failure)
            del failure  # its traceback has this frame, and all others of the call: a message of megabytes
            # `abort` would raise, and grpc keep that traceback until a garbage collection
            context.set_code(status.code)
            context.set_details(status.details)
            context.set_trailing_metadata(status.trailing_metadata)

        return grpc.stream_stream_rpc_method_handler(call, bytes, handler.response_serializer)

    async def _served(self, handler: Any, requests: AsyncIterator[bytes], context: Any) -> None:
        """Call a handler; write the answer of one that does not write itself, or all of one that yields (reflection).

        It keeps no message: one may have megabytes, and the call may take minutes.
        """
        behavior = handler.stream_stream or handler.unary_stream or handler.unary_unary
        parse = handler.request_deserializer or bytes
        if handler.request_streaming or not handler.response_streaming:
            set_priority(Priority.IN_TURN)  # the others, which may be refused for want of room, once they are admitted
        if handler.request_streaming:
            answer = behavior(_parsed_stream(requests, parse), context)
        else:
            answer = behavior(_parsed(await self._only(context), parse), context)
        writer = Writer(context)
        if hasattr(answer, "__aiter__"):
            async for message in answer:
                await writer.write(message)
        elif handler.response_streaming:
            await answer
        else:
            await writer.write(await answer)

    async def _only(self, context: Any) -> bytes:
        """Return the message of a call that has one. Raises InvalidArgumentError, OverloadedError."""
        request = await context.read()  # the iterator over requests would keep it as long as the call lasts
        if request is grpc.aio.EOF:
            raise InvalidArgumentError({"request": "is missing: the call ended without its message"})
        await self._large_messages.wait(current_tenant(), len(request))
        return bytes(request)  # the same object


async def _refuse(requests: AsyncIterator[bytes], context: Any) -> None:
    raise UnavailableError("the server is loading or shutting down; try again soon")


def _parsed(request: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Return the request; raise InvalidArgumentError for one that cannot be parsed."""
    try:
        return parse(request)
    except DecodeError:
        problem = "is not a valid message; check field types and that strings are UTF-8"
        raise InvalidArgumentError({"request": problem}) from None


async def _parsed_stream(requests: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _parsed(request, parse)


class Server:
    """One gRPC server with health; handlers are added to `grpc` before `set_ready`. Raises WatchedError."""

    def __init__(self, settings: ServiceSettings, service: str) -> None:
        self._settings = settings
        self._service = service
        self._statuses = StatusInterceptor(gate_of(settings))
        self._health = health.aio.HealthServicer()
        options = (
            *_SERVER_OPTIONS,
            ("grpc.max_receive_message_length", settings.message_limit_bytes),
            ("grpc.max_concurrent_streams", settings.max_streams),
        )
        self.grpc = grpc.aio.server(interceptors=[self._statuses], options=options)
        self._probes = grpc.aio.server(options=_SERVER_OPTIONS) if settings.health_port is not None else None
        self.port = self.health_port = 0
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def listen(self) -> None:
        """Open the ports. Raises CannotServe if one is taken, or if the settings are refused."""
        for problem in self._settings.problems():
            raise CannotServe(problem)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if self._settings.reflection:
            names = (self._service, STATUS_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.grpc)
        self.port = self._opened(self.grpc, self._settings.port, server_credentials(self._settings))
        await self._health.set(self._service, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        if self._probes is not None:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
            self.health_port = self._opened(self._probes, self._settings.health_port or 0, None)
            await self._probes.start()
        set_priority(Priority.FIRST)  # what accepts calls, and their handlers until they end it
        await self.grpc.start()
        set_priority(Priority.IN_TURN)

    def _opened(self, server: grpc.aio.Server, port: int, credentials: grpc.ServerCredentials | None) -> int:
        address = f"{self._settings.host}:{port}"
        try:
            return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        except RuntimeError:
            problem = "the port is in use or not allowed; choose another"
            raise CannotServe(f"cannot listen on {address}: {problem}") from None

    @property
    def calls(self) -> RunningCalls:
        """The calls that were let in by a token, and run."""
        return self._statuses.calls

    async def set_ready(self, ready: bool) -> None:
        """Let calls in, or keep new ones out."""
        ready = ready and not self.failure.done()
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        self._statuses.ready = ready
        await self._health.set(self._service, status)

    @property
    def drain_s(self) -> float:
        """Seconds that running calls get to end."""
        return 0.0 if self.failure.done() else self._settings.drain_s

    def fail(self, reason: str) -> None:
        """End the process with an error, from now on without new calls: what serves cannot be mended from inside."""
        self._statuses.ready = False
        if not self.failure.done():
            self.failure.set_result(reason)

    async def stop(self) -> None:
        """Refuse new calls, let running ones end within the drain time, close."""
        self._statuses.ready = False
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(self.drain_s)

    async def close(self) -> None:
        """Close all ports, now."""
        await self.grpc.stop(0)
        if self._probes is not None:
            await self._probes.stop(0)


Build = Callable[[Server], AbstractAsyncContextManager[None]]
"""Adds the handlers, loads what they need, yields when the service can work, and tidies up after the last call."""


@asynccontextmanager
async def serving(settings: ServiceSettings, service: str, build: Build) -> AsyncIterator[Server]:
    """Give a server that is ready; drain and close it at the end. Raises CannotServe if a port is taken."""
    server = Server(settings, service)
    await server.listen()
    facts = {"health_port": server.health_port} if server.health_port else {}
    get_logger().info("listening", port=server.port, metrics_port=serve_metrics(settings), **facts)
    try:
        async with supervised(server, "running calls", server.calls.watch()), build(server):
            await server.set_ready(True)
            get_logger().info("ready", port=server.port)
            yield server
            get_logger().info("draining", drain_s=server.drain_s)
            await server.stop()
    finally:
        await server.close()


def run_process(
    settings: ServiceSettings, program: str, name: str, service: str, build: Build, *refusals: type[Exception]
) -> None:
    """Run one service as this process until it is told to stop; exit with 1 and one sentence for what it refuses."""
    run(settings, program, name, lambda: _traced_serving(settings, name, service, build), *refusals)


async def run_service(settings: ServiceSettings, name: str, service: str, build: Build) -> None:
    """Run one service until SIGTERM or SIGINT, also while it still loads. Raises CannotServe."""
    await run_until_told(settings, name, lambda: _traced_serving(settings, name, service, build))


@asynccontextmanager
async def _traced_serving(settings: ServiceSettings, name: str, service: str, build: Build) -> AsyncIterator[Server]:
    async with traced(name, settings.otlp_endpoint, settings.trace_rounds), serving(settings, service, build) as server:
        yield server
