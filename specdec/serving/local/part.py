"""One service of the stack, and its processes: the one that runs, and those that take its place."""

import asyncio
import os

from specdec.serving.child import Child, LogLine, OnLine
from specdec.serving.local.commands import Command, environment_of
from specdec.serving.local.options import CannotRun
from specdec.serving.restarts import MAX_DEATHS, STABLE_S, Restarts

EFFECTS = {
    "coordinator": "clients resume when it is back",
    "target": "generations wait for it, or continue at another one",
    "draft": "generations continue without its drafts, slower",
    "gateway": "HTTP clients connect again when it is back",
}


class Part:
    """A service. Once `is_kept`, a process that ends is replaced, on the same port: others have the address.

    A draft worker is replaced without end, as the others can do without it.
    """

    def __init__(self, command: Command, on_line: OnLine, restarts: Restarts | None = None) -> None:
        self.name, self.kind = command.name, command.kind
        self.child: Child | None = None  # the last one
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.ready = asyncio.Event()  # a process of it has been so
        self.is_kept = False
        self._command, self._on_line = command, on_line
        self._restarts = restarts or Restarts(max_deaths=None if command.kind == "draft" else MAX_DEATHS)

    async def run(self) -> None:
        """Run the service until it ends and is not to be started again, which raises CannotRun."""
        while True:
            child = await self._start()
            await asyncio.wait([child.ended])
            if not self.is_kept:
                raise CannotRun(child.describe_end())
            pause_s = self._restarts.pause_s()
            if pause_s is None:
                raise CannotRun(self._given_up(child))
            self._on_line(self.name, self._lost(child, pause_s))
            await asyncio.sleep(pause_s)

    async def stop(self, patience_s: float) -> None:
        """End the process, which `run` must not replace any more."""
        if self.child:
            await self.child.stop(patience_s)

    def kill(self) -> None:
        """End the process, now."""
        if self.child:
            self.child.kill()

    async def _start(self) -> Child:
        command = self._command.at_port(self.port.result()) if self.port.done() else self._command
        environment = environment_of(command, os.environ)
        self.child = await Child.start(command.name, command.module, command.flags, environment, self._take)
        return self.child

    def _take(self, name: str, entry: LogLine) -> None:
        """Take note of what a log line says, and pass it on."""
        if entry.get("event") == "listening" and not self.port.done():
            self.port.set_result(int(entry["port"]))
        if entry.get("event") == "ready":
            self._restarts.ready()
            self.ready.set()
        self._on_line(name, entry)

    def _lost(self, child: Child, pause_s: float) -> LogLine:
        """Return the log line of a process that is replaced. An error, so that benchmarks print it too."""
        return {
            "event": "service_lost",
            "level": "error",
            "cause": child.describe_end(),
            "effect": EFFECTS[self.kind],
            "restart_in_s": round(pause_s, 1),
        }

    def _given_up(self, child: Child) -> str:
        lines = "".join(f"\n  {line}" for line in child.last_lines)
        how_often = f"{self._restarts.num_deaths} times in a row, each within {STABLE_S:.0f} s of being ready"
        return f"the {self.name} ended {how_often}; at last {child.describe_end()}" + (lines and f"; it said:{lines}")
