"""Rolling updates of pods that are local processes, as Kubernetes makes them.

A Service with an address of its own is a relay: it forwards each new connection to a ready pod, as kube-proxy does, and
leaves open connections where they are. A headless Service is a name with all its pods, those that end too. A pod that
ends leaves its Service's addresses at once; relays hear of it later, so `preStop` has something to wait for.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.manifests import Document, named, of_kind
from tests.support.pods import PAUSE_S, START_TIMEOUT_S, LocalCluster, Pod

HEARD_S = 0.5  # after which a relay knows that a pod ends
FIRST_RELAY = 200  # the last byte of its address; pods count from 1


@dataclass(frozen=True, slots=True)
class Ending:
    """How a pod ended: when it got SIGTERM, its exit status, and the seconds until then."""

    begin_s: float
    status: int
    elapsed_s: float


class RollingCluster(LocalCluster):
    """A local cluster whose Deployments can be rolled while clients use its Services."""

    def __init__(self, documents: Sequence[Document], folder: Path, models: Path) -> None:
        super().__init__(documents, folder, models)
        self._ready: set[str] = set()  # addresses of pods
        self._has_started = False
        self._left_s: dict[str, float] = {}  # when a pod's end began, by address
        self._relays: dict[str, str] = {}  # addresses by Service
        numbers = itertools.count(FIRST_RELAY)
        for service in of_kind(documents, "Service"):
            if service["spec"].get("clusterIP") != "None":
                self._add_relay(service, f"{self.network}.{next(numbers)}")

    def start(self) -> None:
        """Start all pods, and return when all are ready. Raises AssertionError with their logs."""
        super().start()
        self._ready.update(each.address for each in self.pods)
        self._has_started = True

    def service_address(self, name: str) -> str:
        """Return address and port of a Service."""
        return f"{self._relays[name]}:{named(self.documents, 'Service', name)['spec']['ports'][0]['port']}"

    def roll(self, name: str) -> list[Ending]:
        """Replace all pods of a Deployment: one more, and when it is ready one of the old ones ends.

        Returns when all have ended. Raises AssertionError with the log of a pod that does not become ready.
        """
        old = self.of(name)
        rolling = old[0].workload["spec"]["strategy"]["rollingUpdate"]
        assert (rolling["maxSurge"], rolling["maxUnavailable"]) == (1, 0), "only this order is written here"
        with ThreadPoolExecutor(len(old)) as ends:
            endings: list[Future[Ending]] = []
            for each in old:
                self._add(each.workload)
                endings.append(ends.submit(self._end, each))
        return [ending.result() for ending in endings]

    def _add(self, workload: Document) -> None:
        new = self._new_pod(workload)
        self._prepare(new)
        self.pods.append(new)
        self._start(new)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not new.is_ready():
            assert time.monotonic() < deadline, f"{new.name} is not ready\n{new.log}"
            time.sleep(PAUSE_S)
            self._restart_if_ended(new)
        self._ready.add(new.address)

    def _end(self, old: Pod) -> Ending:
        """End a pod as the kubelet does: out of the Service, preStop, SIGTERM, and SIGKILL after the grace period."""
        self._left_s[old.address] = time.monotonic()
        time.sleep(old.pre_stop_s)
        begin_s = time.monotonic()
        ((status, share),) = self.stop([old]).values()
        self.pods.remove(old)
        assert share <= 1
        return Ending(begin_s, status, time.monotonic() - begin_s)

    def _lookup(self, name: str) -> list[str] | None:
        relay = self._relays.get(name.split(".")[0])
        return [relay] if relay else super()._lookup(name)

    def _endpoints(self, service: Document) -> list[Pod]:
        """Return the pods that a relay sends new connections to."""
        now_s = time.monotonic()
        return [
            each
            for each in self._pods_of(service)
            if now_s < self._left_s.get(each.address, now_s) + HEARD_S
            and (each.address in self._ready or self._is_ready_at_the_start(each))
        ]

    def _is_ready_at_the_start(self, each: Pod) -> bool:
        """Return whether a pod is ready while the first ones start: some wait for others."""
        return not self._has_started and bool(each.process) and each.is_ready()

    def _add_relay(self, service: Document, address: str) -> None:
        self._relays[service["metadata"]["name"]] = address
        (port,) = service["spec"]["ports"]
        turns = itertools.count()

        def chosen() -> tuple[str, int] | None:
            found = self._endpoints(service)
            return (found[next(turns) % len(found)].address, port["targetPort"]) if found else None

        self._running.enter_context(relay(address, port["port"], chosen))


@contextmanager
def relay(address: str, port: int, choose: Callable[[], tuple[str, int] | None]) -> Iterator[None]:
    """Forward each connection to what is chosen for it; without a choice it is closed."""
    loop = asyncio.new_event_loop()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            if chosen := await asyncio.to_thread(choose):
                upstream = await asyncio.open_connection(*chosen)
                await asyncio.gather(_copy(reader, upstream[1]), _copy(upstream[0], writer))
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(forward, address, port))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(server.close)
        asyncio.run_coroutine_threadsafe(_cancelled_tasks(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the sender ends, and say so to the receiver."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


async def _cancelled_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
