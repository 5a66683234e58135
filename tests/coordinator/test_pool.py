"""Which worker a session goes to, and how a pool learns of workers."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from coordinator.pool.breaker import WorkerState
from coordinator.pool.pool import WorkerPool
from coordinator.pool.resolving import host_of, resolver
from coordinator.pool.watching import PoolWatch
from coordinator.pool.worker import Worker
from specdec.errors import InternalError, UnavailableError

KEYS = [f"session {number}" for number in range(300)]
FAILED = InternalError()


@dataclass
class World:
    """Workers by address that answer probes or not, and the name that lists them."""

    listed: list[str]
    answers: dict[str, str] = field(default_factory=dict)  # what each says about itself; absent: nothing
    closed: list[str] = field(default_factory=list)  # channels
    num_lookups: int = 0
    is_name_known: bool = True

    async def resolve(self) -> list[str]:
        self.num_lookups += 1
        if not self.is_name_known:
            raise socket.gaierror("Name or service not known")
        return self.listed

    async def describe(self, channel: "Channel") -> str:
        if channel.address not in self.answers:
            raise UnavailableError("connection refused")
        return self.answers[channel.address]


@dataclass
class Channel:
    """A channel to one address."""

    address: str
    world: World

    async def close(self) -> None:
        self.world.closed.append(self.address)


@asynccontextmanager
async def watched(world: World) -> AsyncIterator[WorkerPool[str]]:
    watch: PoolWatch[str] = PoolWatch("toy", world.resolve, lambda address: Channel(address, world), world.describe)
    task = asyncio.create_task(watch.run())
    try:
        await until(lambda: watch.pool.was_asked)
        yield watch.pool
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> float:
    """Wait until a condition holds; return how long it took."""
    began_s = asyncio.get_running_loop().time()
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  # the state of another task
            await asyncio.sleep(0.005)
    return asyncio.get_running_loop().time() - began_s


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look names up more often than in production."""
    monkeypatch.setattr("coordinator.pool.watching.RESOLVE_S", 0.05)


def picks(pool: WorkerPool[str]) -> list[str]:
    picked = [pool.pick(key) for key in KEYS]
    return [worker.address if worker else "" for worker in picked]


async def pool_of(*addresses: str) -> WorkerPool[str]:
    """Return a pool whose workers have all answered; it is not watched."""
    world = World(list(addresses), dict.fromkeys(addresses, "model"))
    pool: WorkerPool[str] = WorkerPool()
    for address in addresses:
        pool.workers[address] = worker = Worker(address, Channel(address, world), world.describe)
        await worker.probe()
    return pool


# ---- picking


async def test_sessions_spread_and_stay() -> None:
    pool = await pool_of("a", "b", "c")
    first = picks(pool)
    assert picks(pool) == first
    assert all(70 < count < 130 for count in Counter(first).values())


async def test_a_lost_worker_moves_its_own_sessions_only() -> None:
    pool = await pool_of("a", "b", "c")
    before = picks(pool)
    pool.workers["b"].lost(UnavailableError("gone"))
    for was, now in zip(before, picks(pool), strict=True):
        assert now == was if was != "b" else now in ("a", "c")
    await pool.workers["b"].probe()
    assert picks(pool) == before


async def test_sessions_go_where_their_model_is() -> None:
    pool = await pool_of("a", "b")
    pool.workers["b"].description = "other model"
    for key in KEYS:
        found = pool.pick(key, fits=lambda description: description == "other model")
        assert found is pool.workers["b"]
    assert pool.pick("key", fits=lambda description: False), "a worker that does not fit says why"


async def test_a_model_on_trial_is_asked_before_another_model() -> None:
    """Its worker may have recovered; one of another model refuses for certain."""
    pool = await pool_of("a", "b")
    pool.workers["b"].round_failed(FAILED)
    pool.workers["b"].try_now()
    await pool.workers["b"].probe()
    pool.workers["b"].description = "other model"
    assert pool.workers["b"].is_on_trial
    assert not pool.workers["b"].is_due
    assert pool.pick("key", fits=lambda description: description == "other model") is pool.workers["b"]
    assert pool.pick("key", {"b"}, lambda description: description == "other model") is pool.workers["b"]
    assert pool.pick("key") is pool.workers["a"]


async def test_avoided_workers_are_the_last_resort() -> None:
    pool = await pool_of("a", "b")
    assert {pool.pick(key, {"a"}) for key in KEYS} == {pool.workers["b"]}
    assert pool.pick("key", {"a", "b"}) is not None
    assert pool.has_other({"a"})
    assert not pool.has_other({"a", "b"})


async def test_a_worker_that_fails_rounds_is_asked_by_nobody() -> None:
    """It describes itself all the same."""
    pool = await pool_of("a", "b")
    pool.workers["a"].round_failed(FAILED)
    await pool.workers["a"].probe()
    assert pool.workers["a"].state is WorkerState.ON_TRIAL
    assert set(picks(pool)) == {"b"}


async def test_one_session_tries_a_worker_on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    pool = await pool_of("a", "b")
    sick = pool.workers["a"]
    monkeypatch.setattr(sick, "_outside", type(sick._outside)(now_s=lambda: now_s))
    sick.round_failed(FAILED)
    await sick.probe()
    now_s += 1.0
    assert Counter(picks(pool)) == {"a": 1, "b": len(KEYS) - 1}
    sick.round_succeeded()
    assert set(picks(pool)) == {"a", "b"}


async def test_a_sick_worker_is_better_than_none() -> None:
    pool = await pool_of("a")
    pool.workers["a"].round_failed(FAILED)
    assert pool.pick("key") is None, "it has not answered a probe since"
    await pool.workers["a"].probe()
    assert pool.pick("key") is pool.workers["a"]


async def test_probes_at_once_are_one() -> None:
    num_asked, gate = 0, asyncio.Event()

    async def describe(channel: Channel) -> str:
        nonlocal num_asked
        num_asked += 1
        await gate.wait()
        return "model"

    worker = Worker("a", Channel("a", World([])), describe)
    probes = [asyncio.create_task(worker.probe()) for _ in range(10)]
    await until(lambda: num_asked > 0)
    probes[0].cancel()  # the others still get their answer
    gate.set()
    assert await asyncio.gather(*probes[1:]) == [True] * 9
    assert num_asked == 1


# ---- watching


async def test_a_worker_that_comes_late_serves_within_seconds() -> None:
    """However long its name led nowhere, and however long it did not answer."""
    world = World([], is_name_known=False)
    async with watched(world) as pool:
        await until(lambda: world.num_lookups > 10)
        world.is_name_known, world.listed = True, ["a"]
        await until(lambda: "a" in pool.workers)
        assert pool.pick("key") is None
        await asyncio.sleep(1.0)  # probes that fail; their pauses grow
        world.answers["a"] = "model"
        assert await until(lambda: bool(pool.in_service)) < 2.0


async def test_new_workers_get_new_sessions_at_once() -> None:
    world = World(["a"], {"a": "model", "b": "model"})
    async with watched(world) as pool:
        assert set(picks(pool)) == {"a"}
        world.listed = ["a", "b"]
        await until(lambda: len(pool.in_service) == 2)
        assert set(picks(pool)) == {"a", "b"}


async def test_a_worker_whose_name_is_gone_ends_its_streams() -> None:
    world = World(["a", "b"], {"a": "model", "b": "model"})
    async with watched(world) as pool:
        pool.workers["a"].num_streams = 1
        world.listed = ["b"]
        await until(lambda: not pool.workers["a"].is_listed)
        assert set(picks(pool)) == {"b"}
        pool.workers["a"].suspected.set()
        await asyncio.sleep(0.1)
        assert world.closed == []
        pool.workers["a"].num_streams = 0
        pool.workers["a"].suspected.set()
        await until(lambda: world.closed == ["a"])
        assert list(pool.workers) == ["b"]


async def test_workers_stay_while_names_cannot_be_looked_up() -> None:
    world = World(["a"], {"a": "model"})
    async with watched(world) as pool:
        world.is_name_known = False
        seen = world.num_lookups
        await until(lambda: world.num_lookups > seen + 3)
        assert set(picks(pool)) == {"a"}


async def test_a_suspected_worker_is_probed_at_once() -> None:
    world = World(["a"], {"a": "model"})
    async with watched(world) as pool:
        pool.workers["a"].lost(UnavailableError("connection lost"))
        assert await until(lambda: bool(pool.in_service)) < 1.0


async def test_an_outage_is_logged_once() -> None:
    world = World(["a"], {"a": "model"})
    with capture_logs() as entries:
        async with watched(world) as pool:
            world.answers.clear()
            pool.workers["a"].lost(UnavailableError("connection lost"))
            await asyncio.sleep(1.0)  # several probes
            world.answers["a"] = "model"
            await until(lambda: bool(pool.in_service))
    events = [(entry["event"], entry["kind"]) for entry in entries if entry["event"].startswith("workers_")]
    assert events == [("workers_unavailable", "toy"), ("workers_available", "toy")]


async def test_states_are_measured_until_a_worker_is_gone() -> None:
    def state() -> float | None:
        return REGISTRY.get_sample_value("specdec_worker_state", {"kind": "toy", "worker": "measured"})

    world = World(["measured"], {"measured": "model"})
    async with watched(world) as pool:
        assert state() == 2
        world.answers.clear()
        pool.workers["measured"].lost(UnavailableError("connection lost"))
        assert state() == 0
        world.listed = []
        pool.workers["measured"].suspected.set()
        await until(lambda: state() is None)


# ---- names


@pytest.mark.parametrize(
    ("name", "addresses"),
    [
        ("127.0.0.1:5", ["ipv4:127.0.0.1:5"]),
        ("dns:///127.0.0.1:5", ["ipv4:127.0.0.1:5"]),
        ("dns:127.0.0.1", ["ipv4:127.0.0.1:443"]),
        ("[::1]:5", ["ipv6:[::1]:5"]),
        ("ipv4:10.0.0.1:5,10.0.0.2:6", ["ipv4:10.0.0.1:5", "ipv4:10.0.0.2:6"]),
        ("ipv6:[::1]:5,[::2]:6", ["ipv6:[::1]:5", "ipv6:[::2]:6"]),
        ("unix:/run/target", ["unix:/run/target"]),
        ("dns://10.0.0.1/target:5", ["dns://10.0.0.1/target:5"]),
        ("xds:///target", ["xds:///target"]),
    ],
)
async def test_names_lead_to_addresses(name: str, addresses: list[str]) -> None:
    assert list(await resolver(name)()) == addresses


async def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(OSError, match=r".+"):
        await resolver("name.invalid:5")()


def test_certificates_are_for_the_host_of_the_name() -> None:
    assert host_of("dns:///target.specdec.svc:50053") == "target.specdec.svc"
    assert host_of("dns:///target.specdec.svc.:50053") == "target.specdec.svc", (
        "a dot ends the name, not the certificate's"
    )
    assert host_of("[::1]:5") == "::1"
    assert host_of("ipv4:10.0.0.1:5") is None
    assert host_of("unix:/run/target") is None
