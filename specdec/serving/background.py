"""Work on a thread that the end of the process does not wait for: loading a model may take minutes."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
THREAD_NAME = "background work"
ENGINE_NAME = "engine"  # its thread is joined before the end, except where it hangs in a forward


async def in_background(work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises. Cancelling the caller does not stop the thread."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is None:
            result.set_result(value)  # type: ignore[arg-type]
        else:
            result.set_exception(error)

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, value, failure)

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return await result


def leave(problem: str = "") -> None:
    """End the process at once if such a thread, or an engine, still runs: the interpreter's clean-up might crash it.

    A problem is printed, and makes the exit code 1.
    """
    if any(thread.name in (THREAD_NAME, ENGINE_NAME) for thread in threading.enumerate()):
        if problem:
            print(problem, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if problem else 0)
