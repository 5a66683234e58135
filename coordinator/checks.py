"""Questions to a worker whose round takes long: a round ends early where the worker does not answer them either."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checks:
    """When a round asks whether its worker still answers, and gives up waiting if it does not."""

    after_s: float  # the round's age, and the time from one question to the next
    timeout_s: float  # for the answer
    needs_other: bool = True  # whether giving up is of use only where another worker can be asked


HasStopped = Callable[[Checks], Awaitable[bool]]


@contextmanager
def checking(checks: Checks | None, timer: asyncio.Timeout, has_stopped: HasStopped) -> Iterator[None]:
    """Let the time be up as soon as the worker has stopped, while the context lasts; without `checks` never early."""
    if checks is None:
        yield
        return
    running: list[asyncio.Future[None]] = []  # at most one
    due = asyncio.get_running_loop().call_later(
        checks.after_s, lambda: running.append(asyncio.ensure_future(_check(checks, timer, has_stopped)))
    )
    try:
        yield
    finally:
        due.cancel()
        for check in running:
            check.cancel()


async def _check(checks: Checks, timer: asyncio.Timeout, has_stopped: HasStopped) -> None:
    while not await has_stopped(checks):  # noqa: ASYNC110  # a worker sends no events
        await asyncio.sleep(checks.after_s)
    if not timer.expired():
        timer.reschedule(asyncio.get_running_loop().time())
