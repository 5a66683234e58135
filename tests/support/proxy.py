"""A TCP proxy that drops or delays replies, or cuts connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """A TCP proxy to a port of this machine. Faults apply to what the server sends."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_to_lose = 0
        self.num_lost = 0
        self.latency_s = 0.0  # added to each piece
        self.held = asyncio.Event()  # set once a reply waits for `release`
        self.port = 0

    @property
    def url(self) -> str:
        """Return the address as that of a Redis."""
        return f"redis://127.0.0.1:{self.port}/0"

    def lose_reply(self, count: int = 1) -> None:
        """Let the server execute the next command, and cut the connection instead of forwarding the reply."""
        self.num_to_lose = count

    def hold(self) -> None:
        """Delay replies until `release`."""
        self.held.clear()
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """Cut all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        self._writers.add(writer)
        ends = [writer]
        with suppress(OSError, asyncio.CancelledError):
            upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            ends.append(upstream[1])
            self._writers.add(upstream[1])
            await _first_of(_carry(reader, upstream[1]), self._replies(upstream[0], writer))
        for end in ends:
            end.transport.abort()
            self._writers.discard(end)
        self._tasks.discard(task)

    async def close(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.num_to_lose:
                self.num_to_lose -= 1
                self.num_lost += 1
                return
            if not self._open.is_set():
                self.held.set()
                await self._open.wait()
            if self.latency_s:
                await asyncio.sleep(self.latency_s)
            writer.write(data)
            await writer.drain()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def _first_of(*ways: object) -> None:
    tasks = [asyncio.ensure_future(way) for way in ways]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def running_proxy(upstream_port: int) -> AsyncIterator[Proxy]:
    """Run a proxy to a server's port."""
    proxy = Proxy(upstream_port)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.close()
