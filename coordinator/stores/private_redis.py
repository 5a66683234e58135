"""A redis-server of this process alone: sessions outlive every process of the service.

It listens on a socket in its folder, where its append-only file is too. Every write is on the disk before it is
answered. The server is killed when this process dies, and it holds the folder's lock until it has ended, so that the
next one never writes beside it. A server that ends by itself is started again, until it has done so too often.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from redis.exceptions import RedisError

from coordinator.stores.node import Node
from coordinator.stores.opening import server_pool
from specdec.retry import RetryPolicy
from specdec.serving.restarts import Restarts
from specdec.serving.state_folder import REMEDY, FolderInUse, FolderLock
from specdec.serving.telemetry import get_logger

LOCK_PATIENCE_S = 5.0  # a predecessor that was killed has ended by then
START_TIMEOUT_S = 300.0  # it reads the whole file first
STOP_TIMEOUT_S = 10.0
ASK_AGAIN_S = 0.02
RESTART = RetryPolicy(first_s=0.1, maximum_s=10.0)  # it starts at once, and every commit waits for it
MAX_SOCKET_BYTES = 100  # the kernel's limit is 108, on some systems 104


@asynccontextmanager
async def private_redis(
    folder: Path, executable: str, fail: Callable[[str], None], restarts: Restarts | None = None
) -> AsyncIterator[str]:
    """Run a server while the context lasts; yield its address. Raises ValueError, with one sentence, if it cannot.

    `fail` is called, with one sentence, when it cannot be kept running.
    """
    socket = folder / "redis.sock"
    if len(os.fsencode(socket)) > MAX_SOCKET_BYTES:
        raise ValueError(f"the state folder {folder} has too long a name for a socket in it; {REMEDY}")
    lock = await _locked(folder)
    server = _Server(folder, socket, executable, lock)
    try:
        await server.start()
        keeping = server.keep_running(restarts or Restarts(policy=RESTART), fail)
        task = asyncio.create_task(keeping, name="embedded store")
        try:
            yield f"unix://{socket}"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    finally:
        await server.stop()
        lock.release()


async def _locked(folder: Path) -> FolderLock:
    """Lock the folder, also if its former owner is just about to end."""
    for _ in range(int(LOCK_PATIENCE_S / ASK_AGAIN_S)):
        with suppress(FolderInUse):
            return FolderLock(folder)
        await asyncio.sleep(ASK_AGAIN_S)
    return FolderLock(folder)


class _Server:
    """The process."""

    def __init__(self, folder: Path, socket: Path, executable: str, lock: FolderLock) -> None:
        self._folder, self._socket, self._executable, self._lock = folder, socket, executable, lock
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and return once it answers. Raises ValueError."""
        self._socket.unlink(missing_ok=True)  # of a server that was killed
        self._log.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specdec.serving.tied", str(os.getpid()), *self._command()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            process_group=0,  # a Ctrl-C is for the coordinator, which needs its store until its streams have ended
            pass_fds=(self._lock.descriptor,),
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._answers():
                    if self._process.returncode is not None:
                        raise ValueError(f"the embedded store did not start; see {self._log}, or {REMEDY}")
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            raise ValueError(f"the embedded store does not get ready; see {self._log}, or {REMEDY}") from None

    async def keep_running(self, restarts: Restarts, fail: Callable[[str], None]) -> None:
        """Start it again whenever it ends, until it has ended too often."""
        while True:
            assert self._process is not None
            if self._process.returncode is None:
                restarts.ready()
            code = await self._process.wait()
            pause_s = restarts.pause_s()
            get_logger().error("embedded_store_ended", exit_code=code, log=str(self._log), restart_in_s=pause_s)
            if pause_s is None:
                fail(f"the embedded store ended {restarts.num_deaths} times in a row; see {self._log}, or {REMEDY}")
                return
            await asyncio.sleep(pause_s)
            with suppress(ValueError, OSError):
                await self.start()

    async def stop(self) -> None:
        """End it; kill it if it does not end."""
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    @property
    def _log(self) -> Path:
        return self._folder / "redis.log"

    async def _answers(self) -> bool:
        if not self._socket.exists():
            return False
        node = Node(server_pool(f"unix://{self._socket}"))
        try:
            return (await node.execute([("PING",)])) == [b"PONG"]
        except (RedisError, OSError):
            return False
        finally:
            await node.close()

    def _command(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "logfile": str(self._log),
            "loglevel": "warning",
        }
        return [self._executable, *(word for name, value in settings.items() for word in (f"--{name}", value))]
