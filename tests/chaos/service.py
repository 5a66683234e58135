"""The service under test: coordinators, workers and a store, each connection through a proxy."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from specdec.client import AsyncClient
from tests.chaos.processes import Nursery, Part
from tests.support.proxy import Proxy, running_proxy
from tests.support.redis_sentinel import NUM_REPLICAS, Failover, running_failover
from tests.support.redis_server import RedisServer, running_redis

KV_CACHE_BYTES = 8 << 20
TTL_S = 3600
PATIENCE_S = 15.0  # of coordinators, so that clients wait too


@dataclass(frozen=True, slots=True)
class Size:
    """How many processes of each kind, and which store."""

    num_coordinators: int = 3
    num_targets: int = 2
    num_drafts: int = 2
    is_durable: bool = False  # Sentinels and replicas instead of one Redis
    ttl_s: int = TTL_S  # of a session's keys


@dataclass(frozen=True, slots=True)
class Models:
    """The models' folders."""

    target: Path
    draft: Path
    other: Path  # of mistakes: another target


class Store:
    """The store's servers."""

    def __init__(self, redis: RedisServer | None, failover: Failover | None, folder: Path) -> None:
        self.redis, self.failover, self._folder = redis, failover, folder

    @property
    def master(self) -> RedisServer:
        """The server that takes writes."""
        if self.failover:
            return self.failover.master
        assert self.redis
        return self.redis

    def snapshot(self) -> None:
        """Keep the present state for `go_back`."""
        assert self.redis
        self.redis.snapshot(self._folder)

    def go_back(self) -> None:
        """Kill the server, and start it with the state that was kept."""
        assert self.redis
        self.redis.kill()
        self.redis.go_back(self._folder)
        shutil.rmtree(self._folder)
        self.redis.start()


@contextmanager
def running_store(folder: Path, *, is_durable: bool) -> Iterator[Store]:
    """Run the store's servers."""
    if is_durable:
        with running_failover() as failover:
            yield Store(None, failover, folder)
    else:
        with running_redis(append_only=True) as server:
            yield Store(server, None, folder)


class Service:
    """The parts and the proxies between them. `links` are the proxies by name: those of "store 1" have its replies."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.parts: dict[str, list[Part]] = {
            "target": [],
            "draft": [],
            "coordinator": [],
        }
        self.links: dict[str, Proxy] = {}
        self.coordinator_ports: list[int] = []  # as clients know them

    @property
    def all_parts(self) -> list[Part]:
        """All of them."""
        return [part for parts in self.parts.values() for part in parts]

    def client(self, number: int, timeout_s: float, **options: object) -> AsyncClient:
        """Return a client that knows all coordinators, and asks first the one of this number."""
        first = number % len(self.coordinator_ports)
        ports = [*self.coordinator_ports[first:], *self.coordinator_ports[:first]]
        address = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        return AsyncClient(address, timeout_s=timeout_s, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def running_service(
    forks: Nursery, folder: Path, models: Models, size: Size, mistake: str = ""
) -> AsyncIterator[Service]:
    """Run the service, by processes that make a mistake if one is named."""
    async with AsyncExitStack() as stack:
        store = stack.enter_context(running_store(folder / "snapshot", is_durable=size.is_durable))
        service = Service(store)
        adder = _Adder(service, stack, forks, folder, mistake)
        for number in range(size.num_targets):
            model = models.other if mistake and "weights" in mistake and number else models.target
            await adder.add_worker("target", ("--model", str(model)))
        drafting = ("--model", str(models.draft), "--drafters", "model,ngram,recycle")
        for _ in range(size.num_drafts):
            await adder.add_worker("draft", drafting)
        for _ in range(size.num_coordinators):
            await adder.add_coordinator(models, size)
        await asyncio.gather(*(part.start() for part in service.all_parts))
        yield service


class _Adder:
    """Adds parts to a service, and the proxies to them."""

    def __init__(self, service: Service, stack: AsyncExitStack, forks: Nursery, folder: Path, mistake: str) -> None:
        self._service, self._stack, self._forks = service, stack, forks
        self._folder, self._mistake = folder, mistake

    async def add_worker(self, kind: str, flags: tuple[str, ...]) -> None:
        """Add a worker, which coordinators reach by a proxy."""
        model = ("--dtype", "float32", "--device", "cpu", "--kv-cache-bytes", str(KV_CACHE_BYTES))
        part = self._add(kind, f"{kind}_service", (*flags, *model, "--drain-s", "0.5"))
        await self._link(part.name, part.port)

    async def add_coordinator(self, models: Models, size: Size) -> None:
        """Add a coordinator, with a proxy of its own to the store, and one between it and clients."""
        number, store = len(self._service.parts["coordinator"]) + 1, self._service.store
        if store.failover:
            store_flags: tuple[str, ...] = ("--store", store.failover.url, "--store-replicas", str(NUM_REPLICAS))
        else:
            store_flags = ("--store", (await self._link(f"store {number}", store.master.port)).url)
        addresses = {kind: self._addresses(kind) for kind in ("target", "draft")}
        flags = (
            *("--tokenizer", str(models.target), "--target", addresses["target"], "--draft", addresses["draft"]),
            *store_flags,
            *("--session-ttl-s", str(size.ttl_s), "--drain-s", "0.5"),
            *("--store-patience-s", str(PATIENCE_S), "--target-patience-s", str(PATIENCE_S)),
        )
        part = self._add("coordinator", "coordinator", flags)
        self._service.coordinator_ports.append((await self._link(part.name, part.port)).port)

    def _addresses(self, kind: str) -> str:
        ports = [self._service.links[part.name].port for part in self._service.parts[kind]]
        return "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports) if ports else ""

    def _add(self, kind: str, module: str, flags: tuple[str, ...]) -> Part:
        parts = self._service.parts[kind]
        part = Part(self._forks, f"{kind} {len(parts) + 1}", module, flags, self._folder)
        part.mistake = self._mistake if kind in self._mistake.split() else ""
        self._stack.callback(part.close)
        parts.append(part)
        return part

    async def _link(self, name: str, port: int) -> Proxy:
        proxy = await self._stack.enter_async_context(running_proxy(port))
        self._service.links[name] = proxy
        return proxy
