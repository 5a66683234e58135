"""Servers: ports, readiness, failure, shutdown."""

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import copy_context
from itertools import pairwise
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.channel import open_channel
from specdec.errors import InvalidArgumentError
from specdec.serving.event_loop import Priority, ServiceLoop
from specdec.serving.large_messages import QUICK_BYTES, LargeMessages
from specdec.serving.process import CannotServe, supervised
from specdec.serving.server import Server, run_process, run_service, serving
from specdec.v1 import target_pb2, target_pb2_grpc
from target_service.settings import TargetSettings

SERVICE = "specdec.v1.TargetService"


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """`run_service` configures the whole process."""
    hooks, handlers, level = (sys.excepthook, threading.excepthook), logging.root.handlers[:], logging.root.level
    before = structlog.get_config()
    yield
    sys.excepthook, threading.excepthook = hooks
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    logging.captureWarnings(False)
    structlog.configure(**before)


SETTINGS = TargetSettings(model="none", port=0, drain_s=0)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Answers(target_pb2_grpc.TargetServiceServicer):
    """A target worker without a model."""

    async def GetTarget(self, request: target_pb2.GetTargetRequest, context: object) -> target_pb2.GetTargetResponse:
        """Answer with an empty description."""
        return target_pb2.GetTargetResponse()

    def Score(self, requests: object, context: object) -> AsyncIterator[target_pb2.ScoreResponse]:
        """Refuse: no test here scores."""
        raise NotImplementedError


async def health(port: int, service: str) -> int:
    """Return the health service's answer."""
    async with open_channel(f"127.0.0.1:{port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


async def code_of_a_call(port: int) -> grpc.StatusCode:
    """Return how a call ends."""
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).GetTarget(target_pb2.GetTargetRequest())
        code: grpc.StatusCode = await call.code()
        return code


async def test_health_tells_loading_from_ready() -> None:
    """Calls before the service is ready are UNAVAILABLE, and health distinguishes the two."""
    seen = []

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        seen.append((await health(server.port, ""), await health(server.port, SERVICE)))
        assert await code_of_a_call(server.port) == grpc.StatusCode.UNAVAILABLE
        async with open_channel(f"127.0.0.1:{server.port}") as channel:  # also one that sends nothing
            silent = target_pb2_grpc.TargetServiceStub(channel).Score()
            assert await asyncio.wait_for(silent.code(), 10.0) == grpc.StatusCode.UNAVAILABLE
        target_pb2_grpc.add_TargetServiceServicer_to_server(Answers(), server.grpc)
        yield

    async with serving(SETTINGS, SERVICE, build) as server:
        assert await code_of_a_call(server.port) == grpc.StatusCode.OK
        seen.append((await health(server.port, ""), await health(server.port, SERVICE)))
        await server.set_ready(False)
        assert await code_of_a_call(server.port) == grpc.StatusCode.UNAVAILABLE
        seen.append((await health(server.port, ""), await health(server.port, SERVICE)))
    assert seen == [(SERVING, NOT_SERVING), (SERVING, SERVING), (SERVING, NOT_SERVING)]


@asynccontextmanager
async def nothing(server: Server) -> AsyncIterator[None]:
    """Serve nothing."""
    yield


async def test_a_port_in_use_is_named() -> None:
    async with serving(SETTINGS, SERVICE, nothing) as server:
        taken = TargetSettings(model="none", port=server.port)
        with pytest.raises(CannotServe, match=rf"127\.0\.0\.1:{server.port}.*choose another"):
            async with serving(taken, SERVICE, nothing):
                pass


async def never_ends() -> None:
    await asyncio.Event().wait()


async def ends() -> None:
    pass


async def breaks() -> None:
    raise KeyError("a table without its entry")


@pytest.mark.parametrize(("work", "words"), [(ends, "without an error"), (breaks, "KeyError")])
async def test_a_task_that_ends_ends_the_service(work: Callable[[], Coroutine[Any, Any, None]], words: str) -> None:
    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        async with supervised(server, "other", never_ends()), supervised(server, "watch", work()):
            yield

    with pytest.raises(CannotServe, match=f"its task watch has ended .{words}"):
        await run_service(SETTINGS, "target", SERVICE, build)


async def test_a_service_that_fails_ends() -> None:
    """A failure that the service cannot repair ends the process, so that its supervisor restarts it."""
    ended = []

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        asyncio.get_running_loop().call_soon(server.fail, "the engine hangs")
        yield
        ended.append(True)

    with pytest.raises(CannotServe, match="the engine hangs"):
        await run_service(SETTINGS, "target", SERVICE, build)
    assert ended


async def test_a_service_that_fails_cuts_its_calls_at_once() -> None:
    """Its callers go on elsewhere; a drain would keep them here for a minute."""

    class Silent(Answers):
        def Score(self, requests: object, context: object) -> Any:
            return asyncio.Event().wait()

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        target_pb2_grpc.add_TargetServiceServicer_to_server(Silent(), server.grpc)
        yield

    settings = TargetSettings(model="none", port=0, drain_s=60)
    async with asyncio.timeout(20), AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(settings, SERVICE, build))
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{server.port}"))
        stream = target_pb2_grpc.TargetServiceStub(channel).Score()
        await stream.write(target_pb2.ScoreRequest())
        server.fail("the engine hangs")
        assert await code_of_a_call(server.port) == grpc.StatusCode.UNAVAILABLE
        await server.stop()
        assert await stream.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Request:
    """A parsed request, which unlike a protobuf message can have weak references."""

    def __init__(self, data: bytes) -> None:
        requests.append(weakref.ref(self))


requests: list[weakref.ref[Request]] = []


async def refuse(request: Request, context: object) -> None:
    raise InvalidArgumentError({"request": "is refused"})


@asynccontextmanager
async def no_garbage_collection() -> AsyncIterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_a_refused_request_is_freed_at_once() -> None:
    """Not by the garbage collector, which may come long after many large requests."""

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        handlers: dict[str, Any] = {"GetTarget": grpc.unary_unary_rpc_method_handler(refuse, Request)}
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        yield

    requests.clear()
    async with serving(SETTINGS, SERVICE, build) as server, no_garbage_collection():
        for _ in range(3):
            assert await code_of_a_call(server.port) == grpc.StatusCode.INVALID_ARGUMENT
        async with asyncio.timeout(5):
            while any(request() for request in requests):  # noqa: ASYNC110  # grpc's tasks must have ended
                await asyncio.sleep(0.01)
        assert len(requests) == 3


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_messages_are_refused(compression: grpc.Compression) -> None:
    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        target_pb2_grpc.add_TargetServiceServicer_to_server(Answers(), server.grpc)
        yield

    async with serving(SETTINGS, SERVICE, build) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        get_target = target_pb2_grpc.TargetServiceStub(channel).GetTarget
        call = get_target(target_pb2.GetTargetRequest(), compression=compression)
        assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
        assert await get_target(target_pb2.GetTargetRequest())


def test_a_process_lets_others_go_first_as_far_as_it_was_told() -> None:
    """At least so far: who started it may have said more."""
    code = (
        "import os; from specdec.serving.process import yield_to_others as go; "
        "print([(go(number), os.getpriority(os.PRIO_PROCESS, 0))[1] for number in (0, 3, 1)])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert said.strip() == str([before, max(before, 3), max(before, 3)])


LARGE, SMALL = b"x" * (QUICK_BYTES + 1), b"x"


@pytest.mark.parametrize(
    ("kind", "request_bytes", "expected"),
    [
        ("unary_stream", SMALL, Priority.FIRST),  # it may be refused, until it is admitted
        ("unary_stream", LARGE, Priority.FIRST),  # it has waited in its line
        ("unary_unary", SMALL, Priority.IN_TURN),
        ("stream_stream", SMALL, Priority.IN_TURN),
    ],
)
async def test_what_goes_before_running_sessions(kind: str, request_bytes: bytes, expected: Priority) -> None:
    seen = list[Any]()

    async def handle(request: Any, context: Any) -> bytes | None:
        seen.extend(value for variable, value in copy_context().items() if variable.name == "priority")
        return b"" if kind == "unary_unary" else None

    handler: Any = getattr(grpc, f"{kind}_rpc_method_handler")(handle)

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", {"Call": handler}),))
        yield

    async with serving(SETTINGS, SERVICE, build) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        request: Any = iter([request_bytes]) if kind == "stream_stream" else request_bytes
        call = getattr(channel, kind)("/a.Service/Call")(request)
        assert await call.code() is grpc.StatusCode.OK
    assert seen == [expected]


async def test_the_line_of_large_messages_is_the_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[tuple[str, int]]()

    async def wait(_: LargeMessages, tenant: str, num_bytes: int) -> None:
        waited.append((tenant, num_bytes))

    monkeypatch.setattr(LargeMessages, "wait", wait)
    monkeypatch.setattr("specdec.serving.server.current_tenant", lambda: "acme")

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        target_pb2_grpc.add_TargetServiceServicer_to_server(Answers(), server.grpc)
        yield

    async with serving(SETTINGS, SERVICE, build) as server:
        assert await code_of_a_call(server.port) == grpc.StatusCode.OK
    assert waited == [("acme", 0)]


async def test_a_handler_of_grpcs_own_may_abort() -> None:
    async def handle(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        raise AssertionError("not reached")

    handlers: dict[str, Any] = {"GetTarget": grpc.unary_unary_rpc_method_handler(handle)}

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        yield

    with structlog.testing.capture_logs() as logs:
        async with serving(SETTINGS, SERVICE, build) as server:
            assert await code_of_a_call(server.port) == grpc.StatusCode.NOT_FOUND
    assert not [entry for entry in logs if entry["log_level"] == "error"]


async def test_large_messages_wait_and_small_ones_pass_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.serving.large_messages.BYTES_A_SECOND", len(LARGE) / 0.2)
    came_s = list[tuple[bool, float]]()

    async def handle(request: bytes, context: Any) -> None:
        came_s.append((request == LARGE, asyncio.get_running_loop().time()))

    handler: Any = grpc.unary_stream_rpc_method_handler(handle)

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", {"Call": handler}),))
        yield

    async with serving(SETTINGS, SERVICE, build) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        call: Any = channel.unary_stream("/a.Service/Call")
        calls = [call(LARGE) for _ in range(3)]
        await asyncio.sleep(0.05)  # they have arrived
        calls += [call(SMALL) for _ in range(3)]
        assert {await each.code() for each in calls} == {grpc.StatusCode.OK}
    assert [is_large for is_large, _ in came_s] == [False] * 3 + [True] * 3
    large_s = [at_s for is_large, at_s in came_s if is_large]
    assert all(later - sooner > 0.15 for sooner, later in pairwise(large_s))


def test_a_service_runs_on_the_loop_that_listens_often() -> None:
    loops = list[object]()

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        loops.append(asyncio.get_running_loop())
        server.fail("enough")
        yield

    with pytest.raises(SystemExit, match="enough"):
        run_process(SETTINGS, "target_service", "target", SERVICE, build)
    assert [type(loop) for loop in loops] == [ServiceLoop]
