"""A real redis-server for tests."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

from tests.support.ports import free_port

START_TIMEOUT_S = 60.0  # a limit for a hanging machine; it starts in milliseconds
COMMAND = "redis-server"
AOF_FOLDER = "appendonlydir"


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

    def snapshot(self, folder: Path) -> None:
        """Copy the append-only file as it is now; what is being written is left out by the next start."""
        shutil.copytree(self._folder / AOF_FOLDER, folder)

    def go_back(self, folder: Path) -> None:
        """Replace the append-only file of a server that has ended by an older copy."""
        shutil.rmtree(self._folder / AOF_FOLDER)
        shutil.copytree(folder, self._folder / AOF_FOLDER)

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
