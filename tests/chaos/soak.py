"""Many minutes at a steady load with a fault every few seconds: what the service holds must not grow.

python -m tests.chaos.soak --minutes 15

One process of each kind is never ended, only stopped, cut off and slowed, so that what it holds can be followed.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from redis import RedisError

from tests.chaos.census import census
from tests.chaos.clients import Clients, drawn_behaviour, drawn_texts, undisturbed
from tests.chaos.faults import Fault, Faults, drawn_faults, kinds_of
from tests.chaos.ledger import Ledger, Session, Text
from tests.chaos.models import save_models
from tests.chaos.processes import Nursery, Part, nursery
from tests.chaos.run import AT_ONCE
from tests.chaos.service import Models, Service, Size, running_service

LOAD = 0.7  # of the sessions a second that the service ends without faults
TTL_S = 60  # of a session's keys: the soak is many times as long
MAX_AT_ONCE = 8 * AT_ONCE  # sessions, where faults made them pile up
NUM_TEXTS = 48
ENDING = ("killed", "told to end")
# how much more the last third may have than the middle one: a share, and so much on top
MAY_GROW = {"MB": (0.03, 3.0), "descriptors": (0.05, 10.0), "keys": (0.25, 20.0)}


@dataclass(frozen=True, slots=True)
class Look:
    """What the service held at one moment: by kind of thing, by process."""

    at_s: float
    held: dict[tuple[str, str], float]


def look(service: Service, begin_s: float) -> Look:
    """Return what the processes that are never ended hold, and the store's keys."""
    held = dict[tuple[str, str], float]()
    for part in map(kept, service.parts.values()):
        held["MB", part.name] = _resident_bytes(part) / 2**20
        held["descriptors", part.name] = len(os.listdir(f"/proc/{part.pid}/fd"))
    with service.store.master.client() as client:
        held["keys", "store"] = client.dbsize()
    return Look(time.monotonic() - begin_s, held)


def kept(parts: Sequence[Part]) -> Part:
    """Return the process of a kind that is never ended."""
    return parts[0]


def _resident_bytes(part: Part) -> int:
    pages = int(Path(f"/proc/{part.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def grown(looks: Sequence[Look]) -> list[str]:
    """Return what the last third of the looks has more of than the middle one, beyond what may be chance."""
    third = len(looks) // 3
    problems = []
    for kind, owner in looks[-1].held:
        middle, last = (
            median(each.held[kind, owner] for each in part) for part in (looks[third : 2 * third], looks[2 * third :])
        )
        share, most = MAY_GROW[kind]
        if last > middle * (1 + share) + most:
            problems.append(f"{owner}: {middle:.0f} {kind} in the middle, {last:.0f} in the end")
    return problems


class Load:
    """Sessions that arrive at a rate, whatever becomes of those before."""

    def __init__(self, service: Service, texts: Sequence[Text], chance: random.Random, name: str) -> None:
        self.ledger = Ledger()
        self.num_turned_away = 0  # that found MAX_AT_ONCE others
        self._texts, self._chance = texts, chance
        self._clients = Clients(service, self.ledger)
        self._name, self._numbers = name, count()
        self._running = set[asyncio.Task[None]]()

    async def arrive(self, rate: float) -> None:
        """Let sessions arrive, so many a second, until cancelled."""
        while True:
            await asyncio.sleep(self._chance.expovariate(rate))
            if len(self._running) < MAX_AT_ONCE:
                task = asyncio.create_task(self.follow())
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            else:
                self.num_turned_away += 1

    async def follow(self) -> None:
        """Let one session's clients do what they do, and compare what they got before its keys expire."""
        session = Session(f"{self._name} {next(self._numbers)}", self._chance.choice(self._texts))
        await self._clients.follow(session, drawn_behaviour(self._chance))
        await self._clients.compare(session)

    async def finish(self) -> None:
        """Wait for the sessions that run."""
        await asyncio.gather(*self._running)
        await self._clients.close()


async def capacity(service: Service, texts: Sequence[Text], chance: random.Random, seconds: float) -> float:
    """Return how many sessions a second the service ends without faults, AT_ONCE at once."""
    load = Load(service, texts, chance, "before")
    begin_s = time.monotonic()

    async def one_after_the_other() -> int:
        done = 0
        while time.monotonic() < begin_s + seconds:
            await load.follow()
            done += 1
        return done

    num_done = sum(await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE))))
    elapsed_s = time.monotonic() - begin_s
    await load.finish()
    assert not load.ledger.violations, load.ledger.violations
    return num_done / elapsed_s


@asynccontextmanager
async def doing(*works: asyncio.Task[None]) -> AsyncIterator[None]:
    """Run tasks beside the context, and cancel them in the end; an error of theirs is raised there."""
    try:
        yield
    finally:
        for work in works:
            work.cancel()
        for result in await asyncio.gather(*works, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


def spared(fault: Fault, service: Service) -> Fault:
    """Return the same fault, at another process if it would end one that is never ended."""
    kind, _, how = fault.kind.partition(" ")
    if how not in ENDING or kind not in service.parts:
        return fault
    num_others = len(service.parts[kind]) - 1
    return Fault(fault.kind, 1 + fault.which % num_others, fault.duration_s)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a soak runs; times in seconds."""

    num_faults: int
    seed: int = 1
    fault_s: float = 10.0  # between two faults
    longest_fault_s: float = 4.0
    calibration_s: float = 20.0
    look_s: float = 5.0


async def soak(plan: Plan, forks: Nursery) -> list[str]:
    """Run the service at LOAD until all faults are made; print a line a minute; return what was wrong."""
    with tempfile.TemporaryDirectory(prefix="specdec-soak-") as name:
        models = Models(*await asyncio.to_thread(save_models, Path(name)))
        async with running_service(forks, Path(name), models, Size(ttl_s=TTL_S)) as service:
            return await _soaked(service, plan, random.Random(plan.seed))


async def _soaked(service: Service, plan: Plan, chance: random.Random) -> list[str]:
    texts = await undisturbed(service, drawn_texts(chance, NUM_TEXTS))
    rate = LOAD * await capacity(service, texts, chance, plan.calibration_s)
    print(f"{rate:.2f} sessions a second, {LOAD:.0%} of what it ends; a fault every {plan.fault_s:g} s", flush=True)
    load, looks = Load(service, texts, chance, "session"), list[Look]()
    faults = Faults(service, load.ledger)
    planned = drawn_faults(chance, plan.num_faults, plan.longest_fault_s, kinds_of(is_durable=False))
    beside = (load.arrive(rate), _look(service, load.ledger, looks, plan.look_s))
    async with doing(*map(asyncio.create_task, beside)):
        for fault in planned:
            begin_s = time.monotonic()
            await faults.make(spared(fault, service))
            await asyncio.sleep(max(0.0, plan.fault_s - (time.monotonic() - begin_s)))
    await load.finish()
    print(_summary(load, len(faults.done)), flush=True)
    ended = [f"{part.name} ended by itself" for part in service.all_parts if part.ended_by_itself]
    return [*load.ledger.violations, *ended, *await census(service, TTL_S), *grown(looks)]


async def _look(service: Service, ledger: Ledger, looks: list[Look], look_s: float) -> None:
    begin_s = time.monotonic()
    for number in count():
        await asyncio.sleep(look_s)
        try:
            looks.append(await asyncio.to_thread(look, service, begin_s))
        except (OSError, RedisError):  # the store is away
            continue
        if number % round(60 / look_s) == 0:
            held = ", ".join(f"{owner} {value:.0f} {kind}" for (kind, owner), value in looks[-1].held.items())
            print(f"{looks[-1].at_s:5.0f} s  {ledger.num_tokens} tokens; {held}", flush=True)


def _summary(load: Load, num_faults: int) -> str:
    ledger = load.ledger
    endings = ", ".join(f"{how} {number}" for how, number in sorted(ledger.endings.items()))
    return (
        f"{num_faults} faults, {len(ledger.sessions)} sessions, {ledger.num_tokens} tokens, "
        f"{ledger.num_compared} compared with a run without faults; {load.num_turned_away} did not arrive as "
        f"{MAX_AT_ONCE} others ran; streams ended: {endings}"
    )


async def _run(plan: Plan) -> list[str]:
    async with nursery() as forks:
        return await soak(plan, forks)


def main() -> None:
    """Soak; exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="decides what goes wrong, and where (default: %(default)s)")
    flags = parser.parse_args()
    plan = Plan(int(6 * flags.minutes), flags.seed)
    if plan.num_faults < 6:
        parser.error("--minutes needs 1 or more")
    problems = asyncio.run(_run(plan))
    print(f"wrong {len(problems)}", *problems[:20], sep="\n  ")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
