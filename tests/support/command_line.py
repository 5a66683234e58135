"""The `specdec` command, as a process and in this one."""

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any
from unittest import mock

import pytest

from specdec import cli

COMMAND = (sys.executable, "-m", "specdec.cli")


@dataclass(frozen=True)
class Outcome:
    code: int | None
    out: str
    err: str


async def start(*arguments: str, **streams: Any) -> asyncio.subprocess.Process:
    pipes = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    return await asyncio.create_subprocess_exec(*COMMAND, *arguments, **(pipes | streams))


async def specdec(*arguments: str, text: bytes = b"") -> Outcome:
    """Run the command and wait for its exit."""
    process = await start(*arguments, stdin=asyncio.subprocess.PIPE)
    out, err = await process.communicate(text)
    return Outcome(process.returncode, out.decode(), err.decode())


def run(*arguments: str, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run the command in this process; `environment` holds the only SPECDEC_ variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    out, err = StringIO(), StringIO()
    with (
        mock.patch.dict(os.environ, kept | {**(environment or {})}, clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        cli.main(arguments)
    assert isinstance(end.value.code, int)
    return Outcome(end.value.code, out.getvalue(), err.getvalue())
