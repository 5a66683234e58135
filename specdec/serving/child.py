"""One service as a child process: its log lines, its port, its last error, and its end with the parent.

`python -m specdec.serving.child PARENT_PID MODULE FLAGS...` ties its life to its parent's (specdec/serving/tied.py),
and then becomes the service.
"""

import asyncio
import atexit
import gc
import json
import os
import re
import runpy
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from specdec.serving.tied import die_with

MAX_LINE_BYTES = 1 << 20
NUM_LAST_LINES = 5  # kept of what a service says
# how long a pipe may outlive its process: its children may still hold it
LAST_LINES_S = 0.5
_GRPC_CHATTER = re.compile(
    r"[IW]\d{4} \d\d:\d\d:\d\d"
)  # the C core's own log; its lines do not explain why a process ended

LogLine = dict[str, Any]
OnLine = Callable[[str, LogLine], None]


def parse_line(text: str) -> LogLine:
    """Return the event that a service logged; any other line becomes one with only `text`."""
    with suppress(ValueError):
        entry = json.loads(text)
        if isinstance(entry, dict) and "event" in entry:
            return entry
    return {"text": text}


class Child:
    """A running service. `ended` becomes its exit code, negative for the signal that killed it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, on_line: OnLine) -> None:
        self.name = name
        self.pid = process.pid
        self.last_error_line = ""
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process = process
        self._on_line = on_line
        self.ended = asyncio.create_task(self._follow(), name=f"child {name}")

    @classmethod
    async def start(
        cls, name: str, module: str, flags: Sequence[str], environment: Mapping[str, str], on_line: OnLine
    ) -> "Child":
        """Start `python -m module` with its standard error and output read line by line.

        It gets a process group of its own: a Ctrl-C reaches only the parent, which ends its children in order.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specdec.serving.child", str(os.getpid()), module, *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_BYTES,
            env=environment,
            process_group=0,
        )
        return cls(name, process, on_line)

    async def stop(self, patience_s: float) -> None:
        """Send SIGTERM; kill it and its own children if it has not ended within `patience_s`."""
        self.signal(signal.SIGTERM)
        await asyncio.wait([self.ended], timeout=patience_s)
        self.kill()
        await asyncio.wait([self.ended])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the service."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """End the service and its own children, now."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def describe_end(self) -> str:
        """Say in one sentence how it ended, with its last error."""
        code = self.ended.result()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.name} {how}" + (f": {self.last_error_line}" if self.last_error_line else "")

    async def _follow(self) -> int:
        reading = asyncio.create_task(self._read())
        code = await self._process.wait()
        await asyncio.wait([reading], timeout=LAST_LINES_S)
        reading.cancel()
        return code

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            entry = parse_line(line.decode(errors="replace").rstrip())
            self._note(entry)
            self._on_line(self.name, entry)

    def _note(self, entry: LogLine) -> None:
        if entry.get("event") == "listening" and not self.port.done():
            self.port.set_result(int(entry["port"]))
        self.last_lines.append(format_event(entry) if "event" in entry else entry["text"])
        if entry.get("level") in ("error", "critical"):
            self.last_error_line = format_event(entry)
        elif entry.get("text", "").strip() and not _GRPC_CHATTER.match(entry["text"]):
            self.last_error_line = entry["text"].strip()


def format_event(entry: LogLine) -> str:
    """Return an event as one readable line: what happened, then its fields."""
    common = ("event", "service", "level", "timestamp", "logger", "frames")
    facts = [f"{name}={value}" for name, value in entry.items() if name not in common and value is not None]
    return " ".join([str(entry["event"]), *facts])


def print_errors(name: str, entry: LogLine) -> None:
    """Print a service's errors to standard error, with their frames; leave out its other lines."""
    if entry.get("level") in ("error", "critical"):
        print(f"{name}: {format_event(entry)}", *entry.get("frames", ()), sep="\n  ", file=sys.stderr, flush=True)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    atexit.register(gc.freeze)  # else the interpreter spends seconds on collecting torch's modules before it ends
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
