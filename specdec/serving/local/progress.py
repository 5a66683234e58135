"""What the services are doing until they are ready, as one line of a terminal that is drawn again and again."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

from specdec.serving.child import LogLine, OnLine

REDRAW_S = 0.5
ERASE = "\r\x1b[K"
BUSY_EVENTS = ("loading", "downloading")


class Progress:
    """Takes the services' log lines, passes them on, and keeps a line with each unfinished one's state below them."""

    def __init__(self, on_line: OnLine, out: TextIO) -> None:
        self._on_line = on_line
        self._out = out
        self._states: dict[str, tuple[str, float]] = {}  # by service: what it does, and since when

    def __call__(self, name: str, entry: LogLine) -> None:
        """Take a line."""
        self.note(name, entry, time.monotonic())
        self._out.write(ERASE)
        self._out.flush()
        self._on_line(name, entry)
        self._draw()

    def note(self, name: str, entry: LogLine, now_s: float) -> None:
        """Take a line's event for the service's state."""
        event = entry.get("event")
        if event == "listening":
            self._states[name] = "starting", now_s
        elif event in BUSY_EVENTS:
            self._states[name] = f"{event} {entry.get('model', '')}", now_s
        elif event in ("ready", "draining"):
            self._states.pop(name, None)

    def line(self, now_s: float) -> str:
        """Return the states of the services that are not ready; empty where all are."""
        return "; ".join(f"{name}: {state}, {now_s - since_s:.0f} s" for name, (state, since_s) in self._states.items())

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Draw the line until the context ends."""
        drawing = asyncio.create_task(self._keep_drawing())
        try:
            yield
        finally:
            drawing.cancel()
            self._states.clear()
            self._draw()

    async def _keep_drawing(self) -> None:
        while True:
            await asyncio.sleep(REDRAW_S)
            self._draw()

    def _draw(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._out.write(ERASE + self.line(time.monotonic())[:width])
        self._out.flush()
