"""A running `specdec up`, and the processes that it started."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.support.command_line import start


class Up:
    """A running `specdec up`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.errors: list[str] = []
        self._new_line = asyncio.Condition()
        self._reading = asyncio.create_task(self._read_errors())

    async def ready(self) -> str:
        """Return the address that it announces."""
        assert self.process.stdout
        line = (await self.process.stdout.readline()).decode()
        assert line.startswith("specdec ready on "), "".join(self.errors)
        return line.removeprefix("specdec ready on ").strip()

    async def http(self) -> str:
        """Return what OpenAI's clients take as base_url; it is announced after the address."""
        assert self.process.stdout
        line = (await self.process.stdout.readline()).decode()
        assert line.startswith("OpenAI's interface is at "), "".join(self.errors)
        return line.removeprefix("OpenAI's interface is at ").strip()

    async def logged(self, pattern: str, times: int = 1) -> None:
        """Wait until so many log lines match."""
        async with self._new_line:
            await self._new_line.wait_for(lambda: len(self.matching(pattern)) >= times)

    def matching(self, pattern: str) -> list[str]:
        return [line for line in self.errors if re.search(pattern, line)]

    async def ended(self) -> int:
        await self._reading
        return await self.process.wait()

    @property
    def children(self) -> dict[str, int]:
        """Return the services' process ids by module: python -m specdec.serving.child PARENT MODULE FLAGS..."""
        mine = children_of(self.process.pid)
        return {Path(f"/proc/{number}/cmdline").read_text().split("\0")[4]: number for number in mine}

    async def _read_errors(self) -> None:
        assert self.process.stderr
        async for line in self.process.stderr:
            async with self._new_line:
                self.errors.append(line.decode())
                self._new_line.notify_all()


@asynccontextmanager
async def up(*arguments: str) -> AsyncIterator[Up]:
    running = Up(await start("up", "--port", "0", *arguments))
    try:
        yield running
    finally:
        if running.process.returncode is None:
            running.process.kill()
        await running.ended()


def status_of(number: int) -> list[str]:
    """Return the fields of /proc/NUMBER/stat from the process state on; empty if the process is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return []


def children_of(parent: int) -> list[int]:
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [number for number in numbers if parent_of(number) == parent]


def parent_of(number: int) -> int | None:
    status = status_of(number)
    return int(status[1]) if status else None


def is_alive(number: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    return status_of(number)[:1] not in ([], ["Z"])


async def all_gone(numbers: Sequence[int]) -> None:
    """Wait until all processes are gone; only the test's timeout limits the wait."""
    while any(map(is_alive, numbers)):  # noqa: ASYNC110  # the kernel notifies only the parent
        await asyncio.sleep(0.01)
