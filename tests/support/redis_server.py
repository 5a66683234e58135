"""A real redis-server for tests, and a proxy that drops or delays its replies or cuts connections."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import redis

START_TIMEOUT_S = 60.0  # a limit for a hanging machine; it starts in milliseconds
COMMAND = "redis-server"


class RedisServer:
    """One redis-server on a loopback port, its data in a temporary folder."""

    def __init__(self, folder: Path, *, append_only: bool, **settings: object) -> None:
        self._folder = folder
        self._settings = {name.replace("_", "-"): value for name, value in settings.items()}
        self._append_only = append_only
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start, and return once it answers; with append-only persistence, earlier writes are restored."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{COMMAND} did not start: {(self._folder / 'log').read_text()}")
            time.sleep(0.01)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the process: it does not answer, its connections stay open."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process
        self._process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def client(self) -> redis.Redis:
        """Return a separate client that bypasses the store; the caller closes it."""
        return redis.Redis(port=self.port)

    def _end(self, number: signal.Signals) -> None:
        if self._process:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())
        return False

    def _command(self) -> list[str]:
        settings = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": self._folder,
            "save": "",
            "appendonly": "yes" if self._append_only else "no",
            "appendfsync": "always",
            "loglevel": "warning",
            **self._settings,
        }
        pairs = [(name, str(value).split() or [""]) for name, value in settings.items()]
        return [executable(), *(word for name, words in pairs for word in (f"--{name}", *words))]


def executable() -> str:
    """Return the path of redis-server. Fails the test, with what to install, where there is none."""
    path = shutil.which(COMMAND, path=os.environ.get("PATH", ""))
    if path is None:
        raise AssertionError(
            f"{COMMAND} is not on PATH, and the tests of the store need it; install it "
            "(apt-get install redis-server, dnf install redis, brew install redis)"
        )
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running_redis(*, append_only: bool = False) -> Iterator[RedisServer]:
    """Run a separate redis-server."""
    with tempfile.TemporaryDirectory(prefix="specdec-redis-") as folder:
        server = RedisServer(Path(folder), append_only=append_only)
        try:
            server.start()
            yield server
        finally:
            server.kill()


class Proxy:
    """A TCP proxy to the server. Faults apply to the next replies only."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_to_lose = 0
        self.num_lost = 0
        self.held = asyncio.Event()  # set once a reply waits for `release`
        self.port = 0

    @property
    def url(self) -> str:
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

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        self._writers.add(writer)
        with suppress(OSError, asyncio.CancelledError):
            upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            self._writers.add(upstream[1])
            await _first_of(_carry(reader, upstream[1]), self._replies(upstream[0], writer))
            upstream[1].transport.abort()
        writer.transport.abort()
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
async def running_proxy(server: RedisServer) -> AsyncIterator[Proxy]:
    """Run a proxy to a server."""
    proxy = Proxy(server.port)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.close()
