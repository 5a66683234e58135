"""What is tried, one phase after the other, and what must hold after each."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.fuzz import victims
from tests.fuzz.calls import MakeScript, call_all
from tests.fuzz.crowds import crowd
from tests.fuzz.neighbour import Neighbour, neighbouring
from tests.fuzz.report import Report
from tests.fuzz.scripts import coordinator_script, draft_script, target_script
from tests.fuzz.services import Services

# A service keeps nothing of a call that has ended, but for tables with a bound: the sessions that a worker remembers
# (200 bytes each, up to 100,000), what a coordinator has shown within a minute, caches that grow to their size. What is
# left is the allocators' slack.
MAX_GROWTH_BYTES = 64 << 20
WARM_UP = 0.1  # of a phase's messages, before memory is first read
TARGET_LIES, DRAFT_LIES = 0.5, 0.7  # how often an answer is a lie


Work = Callable[[int], Awaitable[tuple[Counter[str], list[str]]]]
"""Sends so many messages; returns how they ended, and what was wrong."""


async def _phase(services: Services, name: str, num_messages: int, work: Work) -> Report:
    report, began_s = Report(name, num_messages), time.monotonic()
    async with _watched(services, report):
        warm_up = int(WARM_UP * num_messages)
        for part in (warm_up, num_messages - warm_up):
            before = services.rss_bytes()
            codes, wrong = await work(part)
            report.codes += codes
            report.wrong += wrong
            if services.crashed():
                return report
    report.elapsed_s = time.monotonic() - began_s
    report.growth_bytes = {name: size - before[name] for name, size in services.rss_bytes().items()}
    report.wrong += [f"{name} grew" for name, size in report.growth_bytes.items() if size > MAX_GROWTH_BYTES]
    return report


@asynccontextmanager
async def _watched(services: Services, report: Report) -> AsyncIterator[Neighbour]:
    services.errors.clear()
    async with neighbouring(services) as neighbour:
        yield neighbour
    report.neighbour = neighbour.describe()
    report.wrong += [*neighbour.wrong, *services.errors, *services.crashed()]


def _calling(address: str, make: MakeScript, seed: int) -> Work:
    async def work(num_messages: int) -> tuple[Counter[str], list[str]]:
        endings = await call_all(address, make, num_messages, seed)
        return endings.codes, endings.wrong

    return work


async def fuzz_coordinator(services: Services, num_messages: int, seed: int) -> Report:
    """Send mutated requests to the coordinator."""
    return await _phase(services, "coordinator", num_messages, _calling(services.address, coordinator_script, seed))


async def fuzz_target(services: Services, num_messages: int, seed: int) -> Report:
    """Send mutated streams to the target worker."""
    return await _phase(services, "target", num_messages, _calling(services.target_address, target_script, seed))


async def fuzz_draft(services: Services, num_messages: int, seed: int) -> Report:
    """Send mutated streams to the draft worker."""
    return await _phase(services, "draft", num_messages, _calling(services.draft_address, draft_script, seed))


async def lying_draft(services: Services, num_messages: int, seed: int) -> Report:
    """Let the draft worker lie: no text changes."""
    texts = await victims.expected_texts(services)

    async def work(num_lies: int) -> tuple[Counter[str], list[str]]:
        services.draft_liar.chance = DRAFT_LIES
        sessions = await victims.use(services, services.draft_liar, num_lies, seed, texts)
        services.draft_liar.chance = 0.0
        return sessions.codes, sessions.wrong

    return await _phase(services, "lying draft", num_messages, work)


async def lying_target(services: Services, num_messages: int, seed: int) -> Report:
    """Let the target worker lie: whatever it says, sessions end in order, and those that it spares do not notice."""

    async def work(num_lies: int) -> tuple[Counter[str], list[str]]:
        services.target_liar.chance = TARGET_LIES
        sessions = await victims.use(services, services.target_liar, num_lies, seed, None)
        services.target_liar.chance = 0.0
        return sessions.codes, sessions.wrong

    return await _phase(services, "lying target", num_messages, work)


PHASES = {
    "coordinator": fuzz_coordinator,
    "target": fuzz_target,
    "draft": fuzz_draft,
    "lying-draft": lying_draft,
    "lying-target": lying_target,
    "crowd": crowd,
}
