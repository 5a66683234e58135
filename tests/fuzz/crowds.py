"""A crowd of clients that send the largest requests that are taken, and larger ones; what others notice of it."""

import asyncio
import json
import statistics
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from tests.fuzz.crowd_clients import NUM_CLIENTS
from tests.fuzz.neighbour import neighbouring
from tests.fuzz.report import Report
from tests.fuzz.services import Services

PAUSE_S = 0.02  # its waits are compared: many of them
NUM_CALM = 20  # sessions of the neighbour before the crowd comes
MAX_LATER_S = 0.05  # that the neighbour's 99th percentile may be
MAX_GROWTH_BYTES = 100 << 20
METRONOME_S = 0.005
REFUSALS = tuple(  # too long, or too many at once
    f"{prompt} {code}" for prompt in ("text", "tokens", "chat") for code in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
)


async def crowd(services: Services, num_messages: int, seed: int) -> Report:
    """Let a crowd send a hundredth of so many requests, of the largest size."""
    report = Report("crowd", max(4 * NUM_CLIENTS, num_messages // 100))
    services.errors.clear()
    async with _clients(services, report.num_messages, seed) as send, neighbouring(services, PAUSE_S) as neighbour:
        with _metronome() as calm_late_s:
            while neighbour.num_sessions < NUM_CALM:  # noqa: ASYNC110  # another task counts
                await asyncio.sleep(METRONOME_S)
        calm_s, neighbour.gaps_s = neighbour.gaps_s, []
        began_s, before = time.monotonic(), services.rss_bytes()
        async with _peak(services) as peak:
            with _metronome() as late_s:
                report.codes.update(await send())
        report.elapsed_s = time.monotonic() - began_s
    if sum(report.codes[ending] for ending in REFUSALS) < report.num_messages:
        report.wrong.append("not all of the largest requests were refused as they should")
    report.growth_bytes = {name: peak[name] - size for name, size in before.items()}
    report.wrong += [f"{name} grew" for name, size in report.growth_bytes.items() if size > MAX_GROWTH_BYTES]
    _compare(report, calm_s, neighbour.gaps_s, _p99(late_s) - _p99(calm_late_s))
    report.wrong += [*neighbour.wrong, *services.errors, *services.crashed()]
    return report


def _compare(report: Report, calm_s: list[float], gaps_s: list[float], machine_s: float) -> None:
    """Compare the neighbour's waits. What this process waits longer by for its own timers is the machine's part."""
    later_s = _p99(gaps_s) - _p99(calm_s)
    report.neighbour = (
        f"p50 {1e3 * statistics.median(calm_s):.1f} ms alone, {1e3 * statistics.median(gaps_s):.1f} ms in the crowd; "
        f"p99 {1e3 * _p99(calm_s):.1f} and {1e3 * _p99(gaps_s):.1f} ms; timers here are {1e3 * machine_s:.1f} ms later"
    )
    if later_s - max(0.0, machine_s) > MAX_LATER_S:
        report.late.append(f"the neighbour's p99 is {1e3 * later_s:.0f} ms more than alone")


@asynccontextmanager
async def _clients(
    services: Services, num_messages: int, seed: int
) -> AsyncIterator[Callable[[], Awaitable[Counter[str]]]]:
    """Start the crowd's process; yield what lets it send, and returns how its requests ended."""
    words = ("-m", "tests.fuzz.crowd_clients", services.address, str(num_messages), str(seed))
    clients = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=PIPE, stdout=PIPE)
    assert clients.stdout
    await clients.stdout.readline()  # it is ready

    async def send() -> Counter[str]:
        said, _ = await clients.communicate(b"\n")
        return Counter(json.loads(said or "{}"))

    try:
        yield send
    finally:
        with suppress(ProcessLookupError):
            clients.kill()


@contextmanager
def _metronome() -> Iterator[list[float]]:
    """Yield by how much timers of this process are late."""
    late_s: list[float] = [0.0]

    async def tick() -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(METRONOME_S)
            late_s.append(time.monotonic() - began_s - METRONOME_S)

    ticking = asyncio.ensure_future(tick())
    try:
        yield late_s
    finally:
        ticking.cancel()


@asynccontextmanager
async def _peak(services: Services) -> AsyncIterator[dict[str, int]]:
    """Yield the largest memory of each service while the context lasts."""
    peak = services.rss_bytes()

    async def look() -> None:
        while True:
            peak.update(_larger(peak, services.rss_bytes()))
            await asyncio.sleep(0.02)

    looking = asyncio.ensure_future(look())
    try:
        yield peak
    finally:
        looking.cancel()


def _larger(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: max(size, other[name]) for name, size in one.items()}


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
