"""Failovers by real Sentinels: the master is found again, and in durable mode nothing that was acknowledged is lost."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.generation import OutputToken, Round
from coordinator.prompts import EncodedPrompt
from coordinator.sessions import SessionStore, open_store
from specdec.errors import DataLossError, UnavailableError
from specdec.exact.prefix import chain
from specdec.serving.local import CannotRun, Options
from specdec.serving.local.preflight import check
from specdec.types import Statistics, TokenOrigin
from tests.support.ports import free_port
from tests.support.redis_sentinel import NUM_REPLICAS, Failover, running_failover, wait_until
from tests.support.redis_server import RedisServer

NUM_FAILOVERS = int(os.environ.get("SENTINEL_FAILOVERS", "1"))
NUM_SESSIONS = 16
PROMPT = (1, 2, 3)
TTL_S = 1000.0
RETURN_S = 100.0  # of replicas, on a busy machine


@pytest.fixture(scope="module")
def failover() -> Iterator[Failover]:
    """Servers and Sentinels; each test leaves them running and in step."""
    with running_failover() as failover:
        yield failover


@dataclass(slots=True)
class Writer:
    """A session's owner, who goes on until told to stop, and repeats what was not acknowledged."""

    store: SessionStore
    name: str
    epoch: int = 0
    acknowledged: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def begin(self) -> None:
        await self.store.create(self.name, b"f", b"request", EncodedPrompt(PROMPT, chain(b"", PROMPT)))
        self.epoch = (await self.store.claim(self.name)).epoch

    async def write(self, stopped: asyncio.Event) -> None:
        while not stopped.is_set():
            await self.commit(len(self.acknowledged))
            await asyncio.sleep(0.002)

    async def commit(self, token: int) -> None:
        """Commit one token, again and again until that is acknowledged."""
        log = (*PROMPT, *self.acknowledged)
        digest = chain(b"", log)
        emitted = (OutputToken(token, TokenOrigin.BONUS, None),)
        played = Round(len(log), digest, emitted, chain(digest, [token]), None, Statistics())
        while True:
            try:
                await self.store.commit(self.name, self.epoch, played, played.statistics)
            except UnavailableError as error:
                self.errors.append(str(error))
            else:
                self.acknowledged.append(token)
                return

    async def stored(self) -> list[int]:
        return [entry.token for entry in (await self.store.read(self.name)).emitted]


@contextmanager
def cut_off(master: RedisServer) -> Iterator[None]:
    """Let a master's replicas lose it while the context lasts; its other connections stay.

    SYNC stays forbidden: a replica falls back to it when PSYNC is refused, and one that got through with it counts
    offsets from its own start, so that it never acknowledges a write (seen in CI).
    """
    with master.client() as client:
        client.acl_setuser("default", enabled=True, commands=["-psync", "-sync"])
        client.client_kill_filter(_type="replica")
        wait_until(lambda: client.info("replication")["connected_slaves"] == 0)
    yield
    if master.is_running:
        with master.client() as client:
            client.acl_setuser("default", enabled=True, commands=["+psync"])


@asynccontextmanager
async def described_if_late(failover: Failover) -> AsyncIterator[None]:
    """Fail with what the servers say where it takes too long."""
    try:
        async with asyncio.timeout(RETURN_S):
            yield
    except TimeoutError:
        raise AssertionError(await asyncio.to_thread(failover.described)) from None


@asynccontextmanager
async def opened(failover: Failover, **options: Any) -> AsyncIterator[SessionStore]:
    """Open the store, and close it whatever happens."""
    store = open_store(failover.url, TTL_S, **options)
    try:
        yield store
    finally:
        await store.close()


@pytest.mark.parametrize("how", ["killed", "demoted"])
@pytest.mark.long(but=("killed",))
async def test_failovers_under_load_lose_nothing_in_durable_mode(failover: Failover, how: str) -> None:
    """All replicas have what was acknowledged, so any of them may be promoted."""
    async with opened(failover, num_replicas=NUM_REPLICAS, patience_s=60.0) as store:
        writers = [Writer(store, f"{how} {number}") for number in range(NUM_SESSIONS)]
        await asyncio.gather(*(writer.begin() for writer in writers))
        for _ in range(NUM_FAILOVERS):
            await write_through_a_failover(failover, how, writers)
        for writer in writers:
            assert await writer.stored() == writer.acknowledged == list(range(len(writer.acknowledged)))
    assert {error for writer in writers for error in writer.errors} == set()


async def write_through_a_failover(failover: Failover, how: str, writers: Sequence[Writer]) -> None:
    """Let all write until each has committed to the new master."""
    stopped = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for writer in writers:
            group.create_task(writer.write(stopped))  # what fails there ends the test
        former = failover.master
        if how == "killed":
            former.kill()
            await asyncio.to_thread(failover.await_master_other_than, former)
            former.start()
        else:
            await asyncio.to_thread(failover.fail_over)
        counts = [len(writer.acknowledged) for writer in writers]
        while any(len(writer.acknowledged) <= count for writer, count in zip(writers, counts, strict=True)):  # noqa: ASYNC110  # the writers
            await asyncio.sleep(0.01)  # each has committed to the new master
        stopped.set()
    await asyncio.to_thread(failover.await_replicas)


@pytest.mark.long
async def test_without_replicas_a_failover_may_lose_commits_and_says_so(failover: Failover) -> None:
    """The control: what the durable mode is for."""
    async with opened(failover) as store:
        writer = Writer(store, "not durable")
        await writer.begin()
        await asyncio.to_thread(failover.await_replicas)
        former = failover.master
        with cut_off(former):
            await writer.commit(0)
            former.kill()
            await asyncio.to_thread(failover.await_master_other_than, former)
        with pytest.raises(DataLossError):
            await writer.commit(1)
    former.start()
    await asyncio.to_thread(failover.await_replicas)


async def test_too_few_replicas_delay_a_commit_and_then_make_the_store_unavailable(failover: Failover) -> None:
    durable = open_store(failover.url, TTL_S, num_replicas=1, patience_s=1.5)
    writer = Writer(durable, "too few")
    await writer.begin()
    with cut_off(failover.master):
        committing = asyncio.create_task(writer.commit(0))
        while not writer.errors:
            await asyncio.wait([committing], timeout=0.01)
        with pytest.raises(UnavailableError, match=r"copies \(0 of the 1 replicas of --store-replicas answer\)"):
            await durable.read("too few")
    async with described_if_late(failover):
        await committing  # repeated, and recognised
        await writer.commit(1)
    assert await writer.stored() == [0, 1]
    await durable.close()
    await asyncio.to_thread(failover.await_replicas)


def test_up_asks_a_sentinel_before_it_starts_anything(failover: Failover) -> None:
    check(Options("org/name", port=0, store=failover.url), {})
    dead = f"redis+sentinel://127.0.0.1:{free_port()}/main"
    with pytest.raises(CannotRun, match=r"no Redis answers on 127\.0\.0\.1:"):
        check(Options("org/name", port=0, store=dead), {})


async def test_a_replica_gives_no_answer_of_its_own(failover: Failover) -> None:
    """It may lack what its master has: neither NOT_FOUND nor DATA_LOSS is for it to say."""
    replica, _ = failover.replicas
    store = open_store(replica.url, TTL_S, patience_s=0.1)
    for call in (store.read("never was"), store.claim("never was"), store.cancel("never was"), store.secret()):
        with pytest.raises(UnavailableError, match="the session store is a replica, which takes no writes; give"):
            await call
    with pytest.raises(UnavailableError, match="replica"):
        await store.heartbeat("never was", 1, 1, b"")
    await store.close()
