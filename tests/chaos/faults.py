"""What goes wrong: drawn from a seed, each at a share of the work, and each undone in the end."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from tests.chaos.ledger import Ledger
from tests.chaos.processes import Part
from tests.chaos.service import Service
from tests.support.proxy import Proxy

SETTLING_S = 4.0  # after a store went back in time: longer than coordinators take to compare what they have shown
PARTS = ("coordinator", "target", "draft")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its kind, which of several parts it meets, and for how long."""

    kind: str
    which: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """When a fault began and ended."""

    kind: str
    begin_s: float
    end_s: float


Act = Callable[["Faults", Fault], Awaitable[None]]


class Faults:
    """Makes faults. One at a time at each part; none beside a store that goes back in time."""

    def __init__(self, service: Service, ledger: Ledger) -> None:
        self.done: list[Done] = []
        self._service, self._ledger = service, ledger
        self._store_busy = asyncio.Lock()
        self._num_running = 0
        self._alone = asyncio.Lock()
        self._none_running = asyncio.Event()
        self._none_running.set()

    async def make(self, fault: Fault) -> None:
        """Make a fault and undo it."""
        if fault.kind == "store goes back in time":
            async with self._alone:
                await self._none_running.wait()
                await self._timed(fault)
            return
        async with self._alone:
            self._num_running += 1
            self._none_running.clear()
        try:
            await self._timed(fault)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._none_running.set()

    async def _timed(self, fault: Fault) -> None:
        begin_s = time.monotonic()
        await KINDS[fault.kind][1](self, fault)
        self.done.append(Done(fault.kind, begin_s, time.monotonic()))

    # ---- processes

    async def end_part(self, fault: Fault, number: signal.Signals) -> None:
        """End a process by a signal, and start another in its place."""
        part = self._part(fault)
        async with part.busy:
            await part.end(number)
            await asyncio.sleep(fault.duration_s / 4)
            await part.start()

    async def stop_part(self, fault: Fault) -> None:
        """Suspend a process: its connections stay, and it goes on later as if nothing had been."""
        part = self._part(fault)
        async with part.busy:
            part.send(signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.duration_s)
            finally:
                part.send(signal.SIGCONT)

    def _part(self, fault: Fault) -> Part:
        parts = self._service.parts[fault.kind.split()[0]]
        return parts[fault.which % len(parts)]

    # ---- the store

    async def kill_store(self, fault: Fault) -> None:
        """Kill the store's server, and start it again with its append-only file."""
        async with self._store_busy:
            server = self._service.store.master
            server.kill()
            await asyncio.sleep(fault.duration_s / 4)
            await asyncio.to_thread(server.start)

    async def stop_store(self, fault: Fault) -> None:
        """Suspend the store's server."""
        async with self._store_busy:
            with self._service.store.master.paused():
                await asyncio.sleep(fault.duration_s)

    async def pause_store(self, fault: Fault) -> None:
        """Let the store's server answer nobody for some time."""
        async with self._store_busy:
            with self._service.store.master.client() as client:
                client.client_pause(round(1000 * fault.duration_s))
            await asyncio.sleep(fault.duration_s)

    async def roll_store_back(self, fault: Fault) -> None:
        """Restart the store's server with what it had some time ago."""
        async with self._store_busy:
            store = self._service.store
            await asyncio.to_thread(store.snapshot)
            await asyncio.sleep(fault.duration_s / 2)
            self._ledger.went_back()
            await asyncio.to_thread(store.go_back)
            self._ledger.went_back()
            await asyncio.sleep(SETTLING_S)
            self._ledger.went_back()  # also what began while it had not settled

    async def fail_store_over(self, fault: Fault) -> None:
        """Kill the master, or have it demoted; Sentinels promote a replica."""
        async with self._store_busy:
            failover = self._service.store.failover
            assert failover
            former = failover.master
            if fault.which % 2:
                former.kill()
                await asyncio.to_thread(failover.await_master_other_than, former)
                await asyncio.to_thread(former.start)
            else:
                await asyncio.to_thread(failover.fail_over)
            await asyncio.to_thread(failover.await_replicas)

    # ---- connections

    async def cut_link(self, fault: Fault) -> None:
        """Cut the connections of a proxy."""
        self._link(fault).cut()

    async def lose_replies(self, fault: Fault) -> None:
        """Let the store execute commands of a coordinator, and cut the connection instead of replying."""
        links = [link for name, link in self._service.links.items() if name.startswith("store")]
        links[fault.which % len(links)].lose_reply(1 + fault.which % 3)

    async def hold_link(self, fault: Fault) -> None:
        """Let nothing through for some time, from the server to its callers."""
        link = self._link(fault)
        link.hold()
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            link.release()

    async def slow_link(self, fault: Fault) -> None:
        """Delay what comes through."""
        link = self._link(fault)
        link.latency_s = 0.01 * (1 + fault.which % 10)
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            link.latency_s = 0.0

    def _link(self, fault: Fault) -> Proxy:
        links = list(self._service.links.values())
        return links[fault.which % len(links)]


def _ended_by(number: signal.Signals) -> Act:
    return lambda faults, fault: faults.end_part(fault, number)


# how often, in proportion to the others, and what is done
ON_ANY_STORE: dict[str, tuple[int, Act]] = {
    **{f"{part} killed": (3, _ended_by(signal.SIGKILL)) for part in PARTS},
    **{f"{part} told to end": (1, _ended_by(signal.SIGTERM)) for part in PARTS},
    **{f"{part} stopped": (3, Faults.stop_part) for part in PARTS},
    "connections cut": (4, Faults.cut_link),
    "replies held": (3, Faults.hold_link),
    "latency": (2, Faults.slow_link),
}
ON_ONE_REDIS: dict[str, tuple[int, Act]] = {
    "store killed": (3, Faults.kill_store),
    "store stopped": (2, Faults.stop_store),
    "store paused": (2, Faults.pause_store),
    "store goes back in time": (2, Faults.roll_store_back),
    "store's reply lost": (3, Faults.lose_replies),
}
ON_SENTINELS: dict[str, tuple[int, Act]] = {"store fails over": (4, Faults.fail_store_over)}
KINDS = ON_ANY_STORE | ON_ONE_REDIS | ON_SENTINELS


def kinds_of(*, is_durable: bool, only: Collection[str] = ()) -> list[str]:
    """Return the kinds of fault that there are for a store; of these only some, if any are named."""
    kinds = ON_ANY_STORE | (ON_SENTINELS if is_durable else ON_ONE_REDIS)
    return [kind for kind in kinds if not only or kind in only]


def drawn_faults(chance: random.Random, count: int, longest_s: float, kinds: Sequence[str]) -> list[Fault]:
    """Return so many faults: each kind once, in any order, then as often as its weight says."""
    weights = [KINDS[kind][0] for kind in kinds]
    drawn = chance.sample(kinds, min(count, len(kinds))) + chance.choices(kinds, weights, k=max(0, count - len(kinds)))
    return [Fault(kind, chance.randrange(1 << 16), chance.uniform(0.3, longest_s)) for kind in drawn]
