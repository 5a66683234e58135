"""The life of a service's process: logs, tasks that must not end, signals, and the end.

What serves is handed in as a context manager: entering it listens and loads, leaving it drains and closes.
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, TypeVar

from specdec.serving.background import leave
from specdec.serving.event_loop import ServiceLoop
from specdec.serving.settings import ProcessSettings
from specdec.serving.telemetry import configure_logs, get_logger, log_unhandled

T = TypeVar("T")

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
GARBAGE_THRESHOLDS = (700, 10, 50)  # new objects, collections of the youngest ones, of the middle ones


class CannotServe(Exception):
    """The service cannot start, or cannot continue. The message is for the operator."""


class Serving(Protocol):
    """What serves, and how it says that it cannot go on."""

    failure: "asyncio.Future[str]"

    def fail(self, reason: str) -> None:
        """End the process with an error."""


Serve = Callable[[], AbstractAsyncContextManager[Serving]]
"""Gives what serves once it can work; drains and closes it at the end."""


def where(error: BaseException) -> str:
    """Return file and line of the innermost frame: what a bug report needs, and no data."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "unknown"


@asynccontextmanager
async def supervised(server: Serving, name: str, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a task while the context lasts. If it ends by itself the service fails, and with it the process."""

    def note(ended: "asyncio.Task[None]") -> None:
        if not ended.cancelled():
            error = ended.exception()
            facts = {"error": type(error).__name__, "where": where(error)} if error else {}
            get_logger().error("task_ended", task=name, **facts)
            server.fail(f"its task {name} has ended ({facts.get('error', 'without an error')}); start it again")

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(note)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def collect_garbage_again() -> None:
    """End the rest of the collector (`process_start`), without what was imported and loaded, which stays.

    A look at everything takes 15 to 25 ms beside thirty sessions, in which nothing else runs. With Python's own
    thresholds there was one every 0.7 s in a busy coordinator.
    """
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    gc.enable()


async def unless_failed(server: Serving, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; raise CannotServe if the server fails before that."""
    task = asyncio.create_task(work)
    try:
        either: set[asyncio.Future[Any]] = {task, server.failure}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CannotServe(server.failure.result())
        return task.result()
    finally:
        task.cancel()


def yield_to_others(niceness: int) -> None:
    """Let other programs go first, at least so far. On Linux that counts for this thread and those that it starts."""
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))


def run(settings: ProcessSettings, program: str, name: str, serve: Serve, *refusals: type[Exception]) -> None:
    """Run one service as this process until it is told to stop; exit with 1 and one sentence for what it refuses."""
    yield_to_others(settings.niceness)
    expected: tuple[type[Exception], ...] = (CannotServe, OSError, ValueError, *refusals)
    try:
        with asyncio.Runner(loop_factory=ServiceLoop) as runner:
            runner.run(_ending_once(run_until_told(settings, name, serve)))
    except expected as error:
        problem = f"{program}: {error}"
        leave(problem)
        sys.exit(problem)
    leave()


async def _ending_once(service: Coroutine[Any, Any, None]) -> None:
    """Run a service; from its end on the process, which is about to end too, is not killed by another signal."""
    try:
        await service
    finally:
        for number in ENDING_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


async def run_until_told(settings: ProcessSettings, name: str, serve: Serve) -> None:
    """Run one service until SIGTERM or SIGINT, also while it still loads. Raises CannotServe."""
    configure_logs(name, settings.log_level, settings.log_format)
    asyncio.get_running_loop().set_exception_handler(log_unhandled)
    await _run_until_told(serve)
    # what is left is the interpreter's clean-up, which takes seconds with a model loaded
    gc.freeze()


async def _run_until_told(serve: Serve) -> None:
    stopping = asyncio.Event()
    for number in ENDING_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    told = asyncio.create_task(stopping.wait())
    running = asyncio.create_task(_serve_until(told, serve))
    await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        told.cancel()
    await running


async def _serve_until(told: "asyncio.Task[Any]", serve: Serve) -> None:
    """Serve until told to stop; stop loading at once if told during loading."""
    stack = AsyncExitStack()
    entering = asyncio.ensure_future(stack.enter_async_context(serve()))
    await asyncio.wait({entering, told}, return_when=asyncio.FIRST_COMPLETED)
    if not entering.done():
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        return
    async with stack:
        server = entering.result()
        collect_garbage_again()
        await asyncio.wait({server.failure, told}, return_when=asyncio.FIRST_COMPLETED)
    if server.failure.done():
        raise CannotServe(server.failure.result())
