"""A target worker as a process of its own, which a test can stop, kill, or make sick.

`python -m tests.support.target_process NUM_FORWARDS FLAGS...` is the worker; its forwards fail after so many.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

NEVER = 1 << 60


@asynccontextmanager
async def target_process(
    model: Path, port: int = 0, num_forwards: int = NEVER
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Run a target worker in float32; yield its process and port once it is ready."""
    flags = ["--model", str(model), "--port", str(port), "--dtype", "float32", "--kv-cache-bytes", str(8 << 20)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.target_process", str(num_forwards), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    reading = None
    try:
        port = await _ready_port(process)
        reading = asyncio.create_task(_drain(process))
        yield process, port
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()
        if reading:
            await reading


async def _ready_port(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    seen = []
    while line := await process.stdout.readline():
        seen.append(line.decode())
        if line.startswith(b"{") and (entry := json.loads(line)).get("event") == "ready":
            return int(entry["port"])
    raise AssertionError("".join(seen))


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while await process.stdout.readline():
        pass


def main() -> None:
    """Run the worker."""
    from specdec.engine import LanguageModel  # not in the test's process
    from target_service.__main__ import main as run_worker

    num_left = int(sys.argv.pop(1))
    forward = LanguageModel.forward

    def fail_later(self: LanguageModel, feeds: Any, *more: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return forward(self, feeds, *more)

    with mock.patch.object(LanguageModel, "forward", fail_later):
        run_worker()


if __name__ == "__main__":
    main()
