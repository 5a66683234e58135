"""What can go wrong in a world, and when: drawn from its seed.

A hazard is a kind of fault, or a way to set the world up, that a run asks for: every world has it. Some kinds are only
drawn where they are asked for.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from tests.simulation.cluster import Cluster
from tests.simulation.loop import virtual_loop
from tests.simulation.network import Network
from tests.simulation.store import SimulatedRedis

Fault = Callable[[Cluster, random.Random], Awaitable[None]]

MAX_STEPS_LATER = 60  # a process dies so many callbacks after a fault's time at most: at any await of its tasks


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault and its time."""

    at_s: float
    name: str
    fault: Fault
    seed: int

    async def happen(self, cluster: Cluster) -> None:
        """Wait for its time, then let it happen, and end."""
        await asyncio.sleep(self.at_s)
        await self.fault(cluster, random.Random(self.seed))


def drawn(chance: random.Random, hazards: frozenset[str]) -> list[Planned]:
    """Return a world's faults. Some worlds have none."""
    kinds = {**FAULTS, **{name: HAZARDS[name] for name in sorted(hazards) if name in HAZARDS}}
    names = chance.choices(list(kinds), [kind.weight for kind in kinds.values()], k=chance.randrange(8))
    names += [name for name in sorted(hazards) if name in kinds]
    return [Planned(chance.expovariate(1 / 0.4), name, kinds[name].fault, chance.getrandbits(32)) for name in names]


def _pause_s(chance: random.Random) -> float:
    """Draw how long something lasts: from a round to a minute."""
    return 0.005 * float(10 ** chance.uniform(0, 4))


async def heal(cluster: Cluster) -> None:
    """Undo what the faults have done, whatever they were about to do."""
    cluster.network.partitioned.clear()
    cluster.network.garbled.clear()
    cluster.network.delay_s = Network.usual_delay_s
    for store in cluster.stores:
        store.is_up, store.paused_until_s, store.lost_replies, store.lost_requests = True, 0.0, 0.0, 0.0
        if store.replica:
            store.replica.is_cut_off = False
            store.replica.follow(store)
    for process in cluster.processes.values():
        process.slowness = 1.0
        process.go_on()
    dead = [name for name, process in cluster.processes.items() if not process.is_alive]
    await asyncio.gather(*map(cluster.start, dead))  # at once: a coordinator is ready when a target is


async def kill(cluster: Cluster, chance: random.Random) -> None:
    """Kill a process at any await, and start it again later."""
    name = chance.choice(cluster.names())
    for _ in range(chance.randrange(MAX_STEPS_LATER)):
        await asyncio.sleep(0)
    if cluster.processes[name].is_alive:
        cluster.kill(name)
        await asyncio.sleep(_pause_s(chance) / 4)
        await cluster.start(name)


async def stop(cluster: Cluster, chance: random.Random) -> None:
    """Stop a process, and let it go on later: a zombie."""
    name = chance.choice(cluster.names())
    process = cluster.processes[name]
    cluster.trace.note(name, "is stopped")
    process.stop()
    await asyncio.sleep(_pause_s(chance))
    cluster.trace.note(name, "goes on")
    process.go_on()


async def slow_down(cluster: Cluster, chance: random.Random) -> None:
    """Make a worker slow for a while."""
    name = chance.choice([*cluster.names("target"), *cluster.names("draft")])
    process = cluster.processes[name]
    process.slowness = 10 ** chance.uniform(0.5, 3.5)
    cluster.trace.note(name, f"is {process.slowness:.0f} times slower")
    await asyncio.sleep(_pause_s(chance))
    process.slowness = 1.0


async def break_call(cluster: Cluster, chance: random.Random) -> None:
    """Break one call, or all between two processes: reset, half open, or silently lost."""
    method = chance.choice(("Score", "Propose", "Generate", "Resume", ""))
    calls = cluster.network.calls(method)
    if not calls:
        return
    chosen = chance.choice(calls)
    how = chance.choice(("reset", "half_open", "lose"))
    cluster.trace.note("network", f"{how}: {chosen}")
    for call in calls if chance.random() < 0.2 else [chosen]:
        getattr(call, how)()


async def partition(cluster: Cluster, chance: random.Random) -> None:
    """Let two processes lose each other for a while."""
    one, other = chance.sample(cluster.names(), 2)
    cluster.trace.note("network", f"{one} and {other} lose each other")
    pair = frozenset((one, other))
    cluster.network.partitioned.add(pair)
    for call in cluster.network.calls():
        if call.is_between(one, other):
            call.lose()
    await asyncio.sleep(_pause_s(chance))
    cluster.network.partitioned.discard(pair)


async def delay(cluster: Cluster, chance: random.Random) -> None:
    """Make the network slow for a while."""
    cluster.network.delay_s = Network.usual_delay_s * 10 ** chance.uniform(1, 2.5)
    cluster.trace.note("network", f"delays of {cluster.network.delay_s:.3f} s")
    await asyncio.sleep(_pause_s(chance))
    cluster.network.delay_s = Network.usual_delay_s


def _store(cluster: Cluster, chance: random.Random) -> SimulatedRedis:
    return chance.choice(cluster.stores)


async def lose_replies(cluster: Cluster, chance: random.Random) -> None:
    """Lose a share of the store's replies after their effect, and of the requests."""
    store = _store(cluster, chance)
    store.lost_replies, store.lost_requests = chance.choice(((0.5, 0.0), (0.0, 0.5), (0.2, 0.2), (0.9, 0.0)))
    cluster.trace.note(store.name, f"loses {store.lost_requests:.0%} of requests, {store.lost_replies:.0%} of replies")
    await asyncio.sleep(_pause_s(chance) / 2)
    store.lost_replies = store.lost_requests = 0.0
    store.note_disturbed()


async def pause_store(cluster: Cluster, chance: random.Random) -> None:
    """Pause the store; what arrives meanwhile is executed afterwards."""
    store = _store(cluster, chance)
    store.paused_until_s = virtual_loop().time() + _pause_s(chance) / 2
    cluster.trace.note(store.name, f"is paused until {store.paused_until_s:.3f}")


async def restart_store(cluster: Cluster, chance: random.Random) -> None:
    """Restart the store; it keeps what it holds."""
    store = _store(cluster, chance)
    cluster.trace.note(store.name, "goes down")
    store.is_up = False
    store.restart()
    await asyncio.sleep(_pause_s(chance) / 4)
    store.is_up = True
    store.note_disturbed()
    cluster.trace.note(store.name, "is back")


async def jump_clock(cluster: Cluster, chance: random.Random) -> None:
    """Let the stores' clock jump, by less than what a session is kept for."""
    cluster.clock_offset_s += chance.uniform(-400, 400)
    for store in cluster.stores:
        store.note_disturbed()
    cluster.trace.note("clock", f"of the stores is {cluster.clock_offset_s:.0f} s off")


async def garble(cluster: Cluster, chance: random.Random) -> None:
    """Let a worker answer with garbage for a while."""
    name = chance.choice([*cluster.names("target"), *cluster.names("draft")])
    cluster.trace.note(name, "answers with garbage")
    cluster.network.garbled[name] = chance.choice((0.1, 0.5, 1.0))
    await asyncio.sleep(_pause_s(chance) / 4)
    cluster.network.garbled.pop(name, None)


async def roll_back(cluster: Cluster, chance: random.Random) -> None:
    """Let the store fail over to a copy that lacks its latest commits."""
    store = _store(cluster, chance)
    store.keep_snapshot()
    await asyncio.sleep(_pause_s(chance) / 20)
    cluster.trace.note(store.name, "goes back in time")
    store.roll_back()
    cluster.ledger.store_lost(store)


async def fail_over(cluster: Cluster, chance: random.Random) -> None:
    """Let a store's replica take its place: what it lacks was acknowledged to nobody."""
    store = _store(cluster, chance)
    assert store.replica
    store.replica.is_cut_off = chance.random() < 0.8
    cluster.trace.note(store.name, "loses its replica" if store.replica.is_cut_off else "will fail over")
    await asyncio.sleep(chance.uniform(0, 4))
    cluster.trace.note(store.name, "fails over")
    store.fail_over()
    cluster.ledger.store_failed_over(store)
    store.replica.is_cut_off = False
    store.replica.follow(store)


async def empty_store(cluster: Cluster, chance: random.Random) -> None:
    """Let the store restart empty."""
    store = _store(cluster, chance)
    cluster.trace.note(store.name, "restarts empty")
    store.lose_everything()
    cluster.ledger.store_lost(store)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault, and how often it is drawn among the others."""

    fault: Fault
    weight: float = 1.0


FAULTS: Mapping[str, Kind] = {
    "kill": Kind(kill, 3.0),
    "stop": Kind(stop, 2.0),
    "slow down": Kind(slow_down),
    "break call": Kind(break_call, 3.0),
    "partition": Kind(partition),
    "delay": Kind(delay),
    "lose replies": Kind(lose_replies, 2.0),
    "pause store": Kind(pause_store),
    "restart store": Kind(restart_store),
    "jump clock": Kind(jump_clock, 0.5),
    "garble": Kind(garble),
    "rollback": Kind(roll_back),
    "empty store": Kind(empty_store, 0.2),
}

HAZARDS: Mapping[str, Kind] = {"failover": Kind(fail_over)}
# ways to set a world up, which some worlds have without being asked for
SETTINGS = ("two stores", "two models", "sick target")
