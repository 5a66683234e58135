"""A real Redis Cluster: keys find their masters, also while slots move and masters fail."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest
from redis.crc import key_slot

from coordinator.session_ids import SECRET_BYTES
from coordinator.sessions import SECRET_KEY, SessionStore, keys, open_store
from coordinator.stores.scripts import absent_key
from specdec.errors import UnavailableError
from specdec.serving.local import Options
from specdec.serving.local.preflight import check
from tests.coordinator.test_sentinel import TTL_S, Writer
from tests.support.redis_cluster import RunningCluster, running_cluster

NUM_SESSIONS = 30


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """Three masters without replicas; each test leaves them running."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
async def store(cluster: RunningCluster) -> AsyncIterator[SessionStore]:
    store = open_store(cluster.url, TTL_S)
    yield store
    await store.close()


def test_all_keys_of_a_script_are_in_one_slot() -> None:
    for name in ("s", "a:b", "tenant/1"):
        assert len({key_slot(key.encode()) for key in [*keys(name), absent_key(keys(name)[0])]}) == 1
    assert key_slot(absent_key(SECRET_KEY).encode()) == key_slot(SECRET_KEY.encode())


async def test_sessions_are_spread_over_all_nodes(cluster: RunningCluster, store: SessionStore) -> None:
    await store.ping()
    writers = [Writer(store, f"spread {number}") for number in range(NUM_SESSIONS)]
    await asyncio.gather(*(writer.begin() for writer in writers))
    for token in range(3):
        await asyncio.gather(*(writer.commit(token) for writer in writers))
    assert all([await writer.stored() == [0, 1, 2] for writer in writers])
    assert min(cluster.num_keys()) > 0


async def test_the_secret_is_the_same_through_every_node(cluster: RunningCluster) -> None:
    secrets = set()
    for server in cluster.servers:
        store = open_store(f"redis+cluster://127.0.0.1:{server.port}", TTL_S)
        secrets.add(await store.secret())
        await store.close()
    assert [len(secret) for secret in secrets] == [SECRET_BYTES]


async def test_a_session_follows_its_slot(cluster: RunningCluster, store: SessionStore) -> None:
    """While it moves the calls wait."""
    writer = Writer(store, "moving")
    await writer.begin()
    await writer.commit(0)
    key = keys("moving")[0]
    target = next(server for server in cluster.servers if server is not cluster.holder(key))
    end = cluster.begin_moving(key, target)
    committing = asyncio.create_task(writer.commit(1))
    await asyncio.wait([committing], timeout=0.2)
    assert not committing.done()
    end()
    await committing
    await writer.commit(2)
    assert await writer.stored() == [0, 1, 2]
    assert writer.errors == []
    assert cluster.holder(key) is target


async def test_a_node_that_is_away_delays_only_its_own_sessions(cluster: RunningCluster, store: SessionStore) -> None:
    writers = [Writer(store, f"away {number}") for number in range(NUM_SESSIONS)]
    await asyncio.gather(*(writer.begin() for writer in writers))
    away = cluster.holder(keys("away 0")[0])
    is_there = {writer.name: cluster.holder(keys(writer.name)[0]) is away for writer in writers}
    with away.paused():
        commits = {writer.name: asyncio.create_task(writer.commit(0)) for writer in writers}
        await asyncio.gather(*(commit for name, commit in commits.items() if not is_there[name]))
        assert {name: commit.done() for name, commit in commits.items()} == {
            name: not there for name, there in is_there.items()
        }
    await asyncio.gather(*commits.values())
    assert all([await writer.stored() == [0] for writer in writers])


async def test_a_node_of_a_cluster_is_not_taken_for_a_single_redis(cluster: RunningCluster) -> None:
    name = next(name for name in map(str, count()) if cluster.holder(keys(name)[0]) is not cluster.servers[0])
    store = open_store(cluster.servers[0].url, TTL_S)
    with pytest.raises(UnavailableError, match=r"part of a cluster that sends us elsewhere; give redis\+cluster://"):
        await store.read(name)
    await store.close()


def test_up_asks_a_node_before_it_starts_anything(cluster: RunningCluster) -> None:
    check(Options("org/name", port=0, store=cluster.url), {})


async def test_a_replica_takes_its_masters_place() -> None:
    """With every replica waited for, nothing that was acknowledged is lost."""
    with running_cluster(num_replicas=1) as cluster:
        store = open_store(cluster.url, TTL_S, patience_s=30.0)
        durable = open_store(cluster.url, TTL_S, num_replicas=1, patience_s=30.0)
        writer = Writer(durable, "promoted")
        await writer.begin()
        for token in range(20):
            await writer.commit(token)
        former = cluster.holder(keys("promoted")[0])
        former.kill()
        writer.store = store  # the new master has no replica
        await writer.commit(20)
        assert await writer.stored() == list(range(21))
        assert cluster.holder(keys("promoted")[0]) is not former
        await store.close()
        await durable.close()
