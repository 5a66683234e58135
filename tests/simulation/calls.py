"""Both ends of one simulated gRPC call, and the two ordered channels between them.

The client's end has the interface of grpc.aio's calls as far as specdec uses it; the server's end that of its handlers'
contexts. Messages cross as bytes.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from tests.simulation.loop import outside_of_processes, virtual_loop

Delay = Callable[[], float]


class Pipe:
    """One direction of a call: in order, delayed, until it is cut."""

    def __init__(self, delay_s: Delay, deliver: Callable[[str, Any], None]) -> None:
        self._delay_s, self._deliver = delay_s, deliver
        self._last_s = 0.0
        self.is_closed = False  # nothing more can be sent; what is under way arrives
        self.is_cut = False  # nothing arrives any more

    def send(self, kind: str, value: Any = None) -> None:
        """Let a message arrive later, after those that were sent before."""
        if not self.is_closed and not self.is_cut:
            loop = virtual_loop()
            self._last_s = max(self._last_s, loop.time() + self._delay_s())
            loop.call_at(self._last_s, self._arrive, kind, value, context=outside_of_processes())

    def _arrive(self, kind: str, value: Any) -> None:
        if not self.is_cut:
            self._deliver(kind, value)


class Inbox:
    """What has arrived at one end, and has not been read."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, message: Any) -> None:
        """Add a message and wake the reader."""
        self._messages.append(message)
        if self._waiting and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> Any:
        """Return the next message."""
        while not self._messages:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._messages.popleft()


END = object()  # nothing more comes


class ClientCall:
    """The caller's end: grpc.aio's StreamStreamCall and UnaryStreamCall."""

    def __init__(self, serialize: Callable[[Any], bytes], parse: Callable[[bytes], Any]) -> None:
        self._serialize, self._parse = serialize, parse
        self._inbox = Inbox()
        self._status: asyncio.Future[tuple[grpc.StatusCode, str, Any]] = asyncio.get_running_loop().create_future()
        self._deadline: asyncio.TimerHandle | None = None
        self.to_server: Pipe | None = None  # None: no server was found
        self.on_end: Callable[[], None] = lambda: None

    @property
    def is_done(self) -> bool:
        """Whether the status is known here."""
        return self._status.done()

    def expire_after(self, seconds: float) -> None:
        """Set the deadline."""
        self._deadline = virtual_loop().call_later(seconds, self._expire, context=outside_of_processes())

    def deliver(self, kind: str, value: Any) -> None:
        """Take what the server sent."""
        if self.is_done:
            return
        if kind == "message":
            self._inbox.put(value)
        else:
            self.end(*value)

    def end(self, code: grpc.StatusCode, details: str = "", trailers: Any = ()) -> None:
        """Set the status, once."""
        if not self.is_done:
            self._status.set_result((code, details, trailers))
            self._inbox.put(END)
            if self._deadline:
                self._deadline.cancel()
            self.on_end()

    async def write(self, message: Any) -> None:
        """Send a message. Raises as grpc.aio where the call has ended."""
        if self.is_done:
            self._raise_for_status()
            raise asyncio.InvalidStateError("RPC already finished.")
        if self.to_server:
            self.to_server.send("message", self._serialize(message))
        await asyncio.sleep(0)

    async def done_writing(self) -> None:
        """Say that nothing more comes."""
        if self.to_server and not self.is_done:
            self.to_server.send("half close")
        await asyncio.sleep(0)

    async def read(self) -> Any:
        """Return the next message, EOF at the end; raise AioRpcError for a status that is not OK.

        A message that cannot be parsed is None, as in grpc.aio.
        """
        message = await self._inbox.take()
        if message is END:
            self._inbox.put(END)
            self._raise_for_status()
            return grpc.aio.EOF
        try:
            return self._parse(message)
        except Exception:
            return None

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def cancel(self) -> bool:
        """End the call; the server learns of it later, if the network lets it."""
        if self.is_done:
            return False
        if self.to_server:
            self.to_server.send("cancel")
        self.end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    async def code(self) -> grpc.StatusCode:
        """Return the status code, once it is known."""
        return (await asyncio.shield(self._status))[0]

    async def details(self) -> str:
        """Return the status message."""
        return (await asyncio.shield(self._status))[1]

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """Return no metadata."""
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        """Return the status details."""
        return grpc.aio.Metadata(*(await asyncio.shield(self._status))[2])

    def _expire(self) -> None:
        if not self.is_done:
            if self.to_server:
                self.to_server.send("cancel")
            self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _raise_for_status(self) -> None:
        code, details, trailers = self._status.result()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details)


class ServerCall:
    """The handler's end, and the context that it is given."""

    def __init__(self, metadata: Any, to_client: Pipe, cancels_handler: bool) -> None:
        self._metadata = metadata
        self._to_client = to_client
        self._cancels_handler = cancels_handler  # else the handler sees a bare end of the requests
        self._inbox = Inbox()
        self.is_cancelled = False
        self._code, self._details, self._trailers = grpc.StatusCode.OK, "", ()
        self.task: asyncio.Task[None] | None = None

    def deliver(self, kind: str, value: Any) -> None:
        """Take what the client sent, or what the network noticed."""
        if kind == "message":
            self._inbox.put(value)
        else:
            self._inbox.put(END)
        if kind == "cancel":
            self.is_cancelled = True
            if self.task and self._cancels_handler:
                self.task.cancel()

    async def run(self, handler: Any) -> None:
        """Run a method's handler, and send its status."""
        self.task = asyncio.current_task()
        await handler.stream_stream(self._requests(), self)
        self._to_client.send("status", (self._code, self._details, self._trailers))

    async def read(self) -> Any:
        """Return the next message, or EOF."""
        message = await self._inbox.take()
        return grpc.aio.EOF if message is END else message

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def write(self, message: Any) -> None:
        """Send an answer. Raises InternalError where the client has left."""
        if self.is_cancelled:
            raise grpc.aio.InternalError("Unable to write: the call was cancelled")
        self._to_client.send("message", message.SerializeToString())
        await asyncio.sleep(0)

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Do nothing: specdec's have no contents."""

    def time_remaining(self) -> float | None:
        """Return None: clients of the simulation have deadlines of their own."""
        return None

    def invocation_metadata(self) -> Any:
        """Return the client's metadata."""
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the code that the call ends with."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Set the message that the call ends with."""
        self._details = details

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Set the status details that the call ends with."""
        self._trailers = metadata or ()

    @property
    def has_failed_inside(self) -> bool:
        """Whether a bug ended it."""
        return self._code is grpc.StatusCode.INTERNAL
