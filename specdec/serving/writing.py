"""One message of an answer, to a client that may be slow or gone."""

import asyncio
from typing import Any

import grpc
from google.protobuf.message import Message

from specdec.errors import UnavailableError

WRITE_TIMEOUT_S = 60.0  # a client that takes nothing for so long holds memory, and a place that others wait for


class Writer:
    """Sends the messages of one answer."""

    def __init__(self, context: Any, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._has_begun = False

    async def write(self, message: Message) -> None:
        """Send a message. Raises UnavailableError if the client takes nothing, CancelledError if it has left."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._begin()
                await self._context.write(message)
        except TimeoutError:
            raise UnavailableError(f"the client took nothing for {self._timeout_s:g} s; resume the session") from None
        except grpc.aio.InternalError:
            # usually grpc cancels the handler of such a call; during a write the write may fail first
            raise asyncio.CancelledError("the client has left") from None

    async def _begin(self) -> None:
        """Send the metadata apart from the first message: grpc cannot end a call whose metadata is in a late write."""
        if not self._has_begun:
            await self._context.send_initial_metadata(())
            self._has_begun = True
