"""Programs of Node, where this machine has it and `make clients` has installed their packages."""

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

LEAST_VERSION = (20, 11)


def missing(folder: Path) -> str | None:
    """Return why programs of a folder with a package.json cannot run here, and the remedy; None if they can."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        return "node and npm are not on PATH"
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers < LEAST_VERSION:
        return f"node is {version or 'broken'}; the clients need {LEAST_VERSION[0]}.{LEAST_VERSION[1]}"
    if not (folder / "node_modules").is_dir():
        return f"{folder.name} has no node_modules; `make clients` installs them from the npm registry"
    return None


async def output_of(
    *command: str, folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command in a folder; return its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


class Follower:
    """A running test/programs/follow.ts: a line for each call goes in, lines of JSON come out."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, **command: Any) -> None:
        """Begin a call."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        await self._process.stdin.drain()

    async def line(self) -> dict[str, Any]:
        """Return the next line."""
        assert self._process.stdout
        text = await self._process.stdout.readline()
        assert text, "the program ended; its errors are above"
        line: dict[str, Any] = json.loads(text)
        return line

    async def rest(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the lines before the call's last one, and that one: its completion or its error."""
        lines = [await self.line()]
        while not {"completion", "error"} & set(lines[-1]):
            lines.append(await self.line())
        return lines[:-1], lines[-1]


@asynccontextmanager
async def following(folder: Path, address: str, **options: Any) -> AsyncIterator[Follower]:
    """Run such a program with a client of an address."""
    process = await asyncio.create_subprocess_exec(
        *("node", "dist/test/programs/follow.js", address, json.dumps(options)),
        cwd=folder,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Follower(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
