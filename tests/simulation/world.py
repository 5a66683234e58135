"""One world: a cluster, its clients and its faults, all drawn from a seed; run to the end in virtual time."""

import asyncio
import gc
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import structlog

from tests.simulation import faults
from tests.simulation.clients import Client, drawn_clients
from tests.simulation.cluster import OTHER_TARGET, SESSION_TTL_S, Cluster
from tests.simulation.ledger import Ledger, Trace
from tests.simulation.loop import SimulationStuck, VirtualLoop, virtual_loop
from tests.simulation.network import KEEPALIVE_S, Network
from tests.simulation.store import Replica, SimulatedRedis, virtual_wall_clock

MAX_WORLD_S = 1500.0  # virtual; clients give up earlier
MAX_CLOCK_OFFSET_S = 5000.0  # more than clocks jump in one world
FOREVER = (  # tasks of every coordinator
    "capabilities",
    "upkeep",
    "upkeep of sessions",
    "leases",
    "comparisons",
    "predicted wait",
    "target pool",
    "draft pool",
)
PATIENCE = 20  # looks at what is left, half a second apart
QUIET_S = KEEPALIVE_S[1] + 5.0  # after the last client: what was silently lost has been noticed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a world."""

    seed: int
    hazards: frozenset[str]
    violations: tuple[str, ...]
    trace: Trace
    endings: str  # of the clients
    went_back: Mapping[str, int]  # sessions of which a store lost what was shown: healed, or lost
    virtual_s: float
    num_steps: int


def run_world(seed: int, hazards: frozenset[str] = frozenset()) -> Outcome:
    """Run one seed."""
    loop = VirtualLoop()
    trace = Trace(loop.time)
    ledger = Ledger(trace)
    world = World(seed, hazards, ledger)
    with _undisturbed(), virtual_wall_clock(lambda: loop.time() + world.clock_offset_s):
        try:
            loop.run_until_complete(world.run())
        except Exception as error:
            ledger.violated(f"the world broke: {type(error).__name__}: {error}")
            _end_tasks(loop)
        loop.set_exception_handler(lambda _, __: None)
        loop.close()
    endings = ", ".join(f"{count} {name}" for name, count in sorted(ledger.endings.items()))
    return Outcome(
        seed, hazards, tuple(ledger.violations), trace, endings, ledger.went_back(), loop.time(), loop.num_steps
    )


def _end_tasks(loop: VirtualLoop) -> None:
    """Cancel what a broken world has left, while its loop can still run it."""
    loop.num_steps = 0
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    with suppress(SimulationStuck):
        loop.run_until_complete(asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 60.0))


class World:
    """A cluster with clients and faults."""

    def __init__(self, seed: int, hazards: frozenset[str], ledger: Ledger) -> None:
        self._chance = random.Random(f"{seed} world")
        self._hazards, self._ledger = hazards, ledger
        self._faults = faults.drawn(random.Random(f"{seed} faults"), hazards)
        has_two_stores = "two stores" in hazards or self._chance.random() < 0.1
        names = ["store", "other store"] if has_two_stores else ["store"]
        stores = [
            SimulatedRedis(random.Random(f"{seed} {name}"), name, on_change=ledger.store_changed) for name in names
        ]
        self._cluster = Cluster(
            random.Random(f"{seed} outside"),
            Network(random.Random(f"{seed} network"), on_bug=ledger.violated),
            ledger.trace,
            ledger,
            stores,
        )
        if "failover" in hazards:
            self._cluster.num_replicas = 1
            for store in stores:
                store.replica = Replica()
        if "sick target" in hazards or self._chance.random() < 0.1:
            self._cluster.network.garbled["target-1"] = 0.3
        self._clients: list[Client] = []

    @property
    def clock_offset_s(self) -> float:
        """How far the stores' wall clock is off."""
        return self._cluster.clock_offset_s

    async def run(self) -> None:
        """Build, run until the clients have ended, heal, and take the census."""
        self._build()
        cluster = self._cluster
        await asyncio.gather(*(cluster.start(name) for name in cluster.names()))
        self._clients = drawn_clients(self._chance, cluster, self._ledger, self._hazards)
        planned = [asyncio.create_task(fault.happen(cluster)) for fault in self._faults]
        async with asyncio.timeout(MAX_WORLD_S):
            await asyncio.gather(*(client.run() for client in self._clients))
        for fault in planned:
            fault.cancel()
        for process in cluster.processes.values():
            process.go_on()  # faults may be waiting for it
        for error in await asyncio.gather(*planned, return_exceptions=True):
            if isinstance(error, Exception):
                raise error
        await faults.heal(cluster)
        await asyncio.sleep(QUIET_S)
        await self._take_census()
        self._ledger.close()
        await self._tear_down()

    def _build(self) -> None:
        cluster, chance = self._cluster, self._chance
        cluster.num_blocks = chance.choice((1000, 24, 12))  # room for all sessions, for some, or for one
        num_drafts = chance.choice((0, 1, 1, 2))
        cluster.has_drafts = num_drafts > 0
        for store in cluster.stores:
            address = f"coordinators of {store.name}"
            for number in range(chance.choice((2, 2, 3)) if len(cluster.stores) == 1 else 1):
                name = f"coordinator-{number + 1}" + ("'" if store is not cluster.stores[0] else "")
                cluster.add(name, cluster.coordinator(store, address))
        for number in range(chance.choice((1, 2))):
            cluster.add(f"target-{number + 1}", cluster.target())
        if "two models" in self._hazards or chance.random() < 0.1:
            self._ledger.accepted_failures = ("MODEL_MISMATCH",)  # of a session whose only worker is away for long
            cluster.add("target-other", cluster.target(OTHER_TARGET, "other target model"))
        for number in range(num_drafts):
            cluster.add(f"draft-{number + 1}", cluster.draft())

    async def _take_census(self) -> None:
        """Nothing may be left but what runs for ever, and what ends by itself in some seconds."""
        for _ in range(PATIENCE):
            left = self._left()
            if not left:
                return
            await asyncio.sleep(0.5)
        for what in left:
            self._ledger.violated(f"in the end {what}")

    def _left(self) -> list[str]:
        cluster = self._cluster
        left = [f"{name} runs {len(running)} sessions" for name, running in cluster.running.items() if len(running)]
        left += [f"there is a call: {call}" for call in cluster.network.calls()]
        for name, pools in cluster.pools.items():
            counts = {worker.address: worker.num_streams for pool in pools for worker in pool.workers.values()}
            left += [f"{name} counts {count} streams at {address}" for address, count in counts.items() if count]
        for name, process in cluster.processes.items():
            own = (task.get_coro() for task in process.tasks if task.get_name() not in FOREVER)
            left += [f"{name} has a task: {getattr(work, '__qualname__', work)}" for work in own]
        # a session whose owner gave up stays with its workers for the next one, which may not draft
        has_moved = any(log.epoch > 1 for log in self._ledger.logs.values())
        was_given_up = any(name != "finished" for name in self._ledger.endings)
        if not (self._faults or has_moved or was_given_up or any(client.visits for client in self._clients)):
            held = {name: model.cache.sequences for name, model in cluster.models.items()}
            left += [f"{name} holds {len(sequences)} sessions" for name, sequences in held.items() if sequences]
        return left

    async def _tear_down(self) -> None:
        """End all processes; then no key may outlive its time."""
        for process in self._cluster.processes.values():
            process.kill()
        await asyncio.sleep(SESSION_TTL_S + MAX_CLOCK_OFFSET_S)
        for store in self._cluster.stores:
            await store.touch()
            if store.contents:
                self._ledger.violated(f"{len(store.contents)} keys outlive their time")
        left = asyncio.all_tasks(virtual_loop()) - {asyncio.current_task()}
        if left:
            self._ledger.violated(f"{len(left)} tasks are left")


QUIET = structlog.make_filtering_bound_logger(logging.CRITICAL)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Run without logs, and without garbage collections, which would end forgotten generators at any moment."""
    configured = structlog.get_config()
    structlog.configure(wrapper_class=QUIET)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        structlog.configure(**configured)
