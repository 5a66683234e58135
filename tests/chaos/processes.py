"""The service's processes: started, watched, killed, stopped, and started again on their former ports."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

LOOK_S = 0.02  # between two looks into a log
START_TIMEOUT_S = 120.0  # a limit for a hanging machine


class Nursery:
    """Starts processes by `forking.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = count()
        self._started: dict[int, asyncio.Future[int]] = {}
        self.ended: dict[int, asyncio.Future[int]] = {}
        self.ready = asyncio.Event()
        self.reading = asyncio.create_task(self._read(), name="nursery")

    async def start(self, module: str, flags: Sequence[str], log: Path, mistake: str) -> int:
        """Start `python -m module FLAGS`, its output in a file; return the process's number."""
        number = next(self._numbers)
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._started[number] = started
        order = {"number": number, "module": module, "flags": flags, "log": str(log), "mistake": mistake}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return await started

    async def _read(self) -> None:
        assert self._process.stdout
        async for line in self._process.stdout:
            fact = json.loads(line)
            if fact["event"] == "ready":
                self.ready.set()
            elif fact["event"] == "started":
                self.ended[fact["pid"]] = asyncio.get_running_loop().create_future()
                self._started.pop(fact["number"]).set_result(fact["pid"])
            else:
                self.ended[fact["pid"]].set_result(fact["code"])


@asynccontextmanager
async def nursery() -> AsyncIterator[Nursery]:
    """Run a nursery; all that it started ends with the context."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.forking"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"},
    )
    made = Nursery(process)
    waiting = asyncio.create_task(made.ready.wait())
    try:
        await asyncio.wait([waiting, made.reading], return_when=asyncio.FIRST_COMPLETED)
        assert made.ready.is_set(), "the nursery ended before it was ready; what it said is above"
        yield made
    finally:
        waiting.cancel()
        assert process.stdin
        process.stdin.close()
        await process.wait()
        await made.reading


class Part:
    """One service process, and those that follow it on its port."""

    def __init__(self, nursery: Nursery, name: str, module: str, flags: Sequence[str], folder: Path) -> None:
        self.name, self.module = name, module
        self.mistake = ""  # that its next process makes
        self.log = folder / f"{name.replace(' ', '-')}.log"
        self.port, self._hold = held_port()
        self.metrics_port, self._metrics_hold = held_port()
        self._flags = (*flags, "--port", str(self.port), "--metrics-port", str(self.metrics_port))
        self._nursery = nursery
        self.began_at = 0  # where the present process's lines begin in the log, in bytes
        self.pid: int | None = None
        self.busy = asyncio.Lock()  # held by a fault

    async def start(self) -> None:
        """Start it, and return once it serves."""
        self.began_at = self.log.stat().st_size if self.log.exists() else 0
        self.pid = await self._nursery.start(self.module, self._flags, self.log, self.mistake)
        ended = self._nursery.ended[self.pid]
        async with asyncio.timeout(START_TIMEOUT_S):
            while not any(entry.get("event") == "ready" for entry in self.entries()):
                if ended.done():
                    raise AssertionError(f"{self.name} did not start:\n{self.log.read_text()[-2000:]}")
                await asyncio.sleep(LOOK_S)

    async def end(self, number: signal.Signals) -> None:
        """End the process by a signal."""
        pid, self.pid = self.pid, None
        assert pid is not None
        os.kill(pid, number)
        await self._nursery.ended[pid]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.pid is not None
        os.kill(self.pid, number)

    @property
    def ended_by_itself(self) -> bool:
        """Whether a process that nobody ended is gone."""
        return self.pid is not None and self._nursery.ended[self.pid].done()

    def entries(self, *, all_processes: bool = False) -> list[dict[str, Any]]:
        """Return what the present process, or all of them, logged as events."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as lines:
            lines.seek(0 if all_processes else self.began_at)
            return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]

    def close(self) -> None:
        """Give its ports back."""
        self._hold.close()
        self._metrics_hold.close()


def held_port() -> tuple[int, socket.socket]:
    """Return a port that outgoing connections do not take while the socket is open, and servers can."""
    hold = socket.socket()
    hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    hold.bind(("127.0.0.1", 0))
    return hold.getsockname()[1], hold
