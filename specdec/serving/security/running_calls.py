"""Calls that run: they end soon after what let them in would not let them in any more.

A token is withdrawn from its file, expires, or is signed by a key that its issuer publishes no longer. The call ends
with UNAUTHENTICATED, as a new one would. Its session pauses, as when a client leaves, and a token of the same tenant
resumes it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.errors import UnauthenticatedError, UnavailableError
from specdec.serving.telemetry import get_logger

CHECK_PERIOD_S = 1.0


class Credential(Protocol):
    """What let a call in."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

    async def check(self) -> None:
        """Raise UnauthenticatedError if it lets nobody in any more, UnavailableError if that is not known."""


@dataclass(slots=True, eq=False)
class _Call:
    task: "asyncio.Task[Any]"
    credential: Credential
    refusal: UnauthenticatedError | None = None


class RunningCalls:
    """The calls of a server that were let in by a credential."""

    def __init__(self) -> None:
        self._calls: set[_Call] = set()

    def __len__(self) -> int:
        return len(self._calls)

    @asynccontextmanager
    async def during(self, credential: Credential | None) -> AsyncIterator[None]:
        """Cancel this task if the credential fails meanwhile, and raise the reason. None: whoever called may go on."""
        task = asyncio.current_task()
        if credential is None or task is None:
            yield
            return
        call = _Call(task, credential)
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            # as asyncio.timeout does: the caller may have left at the same time
            if call.refusal is None or task.uncancel() > 0:
                raise
            raise call.refusal from None
        finally:
            self._calls.discard(call)

    async def watch(self) -> None:
        """Check all of them, for ever."""
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            await self.check()

    async def check(self) -> None:
        """End those whose credential lets nobody in any more."""
        ended = 0
        for call in list(self._calls):
            try:
                await call.credential.check()
            except UnavailableError:
                continue  # nobody can tell; new calls are refused meanwhile
            except UnauthenticatedError as refusal:
                if call in self._calls and call.refusal is None:  # it may have ended by itself during the check
                    call.refusal = refusal
                    call.task.cancel()
                    ended += 1
        if ended:
            get_logger().info("calls_ended", reason="their tokens are not valid any more", num_calls=ended)
