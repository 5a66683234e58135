"""The services of `specdec up` as a child process that sends its spans here."""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from specdec.timeline.errors import TraceError

READY = "specdec ready on "
SEND_EVERY_MS = 200  # instead of 5 s: somebody waits
END_S = 15.0
MAX_LINES = 50


@asynccontextmanager
async def local_services(flags: Sequence[str], endpoint: str) -> AsyncIterator[str]:
    """Run `specdec up FLAGS` on a free port while the context lasts; give its address. Raises TraceError."""
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "specdec.serving.tied",
            str(os.getpid()),
        ),  # they end with this process, however it ends
        *(sys.executable, "-m", "specdec", "up", *flags, "--port", "0", "--store", "memory"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(endpoint),
        process_group=0,
    )
    lines: deque[str] = deque(maxlen=MAX_LINES)
    assert process.stdout
    assert process.stderr
    reading = asyncio.create_task(_keep(process.stderr, lines))
    try:
        while not (line := (await process.stdout.readline()).decode()).startswith(READY):
            if not line:
                await process.wait()
                await asyncio.wait([reading], timeout=1.0)
                raise TraceError(f"the services did not start: {lines[-1] if lines else 'they said nothing'}")
        yield line.removeprefix(READY).strip()
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
        if process.returncode is None:
            process.kill()
        await asyncio.gather(reading, process.wait())


def _environment(endpoint: str) -> dict[str, str]:
    """Return the environment: what the user's own says about traces is about other services."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return kept | {"SPECDEC_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": str(SEND_EVERY_MS)}


async def _keep(stream: asyncio.StreamReader, lines: deque[str]) -> None:
    async for line in stream:
        lines.append(line.decode(errors="replace").strip())
