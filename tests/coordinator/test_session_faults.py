"""The session store on a real Redis: lost replies, cut connections, restarts, backups, and many calls at once."""

import asyncio

import pytest

from coordinator.session_record import Status
from coordinator.sessions import keys
from coordinator.stores.client import RedisClient
from coordinator.stores.node import MAX_CALLS
from coordinator.stores.opening import open_redis
from coordinator.stores.scripts import LIBRARY
from specdec.errors import DataLossError, NotFoundError, UnavailableError
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisServer, running_redis
from tests.support.stored_sessions import (
    LOGPROBS,
    PROMPT,
    SESSION,
    OpenStore,
    commit,
    create,
    opened,
    round_after,
    tokens_of,
)


async def test_a_lost_reply_does_not_repeat_a_commit(proxy: Proxy) -> None:
    """It is repeated; the script recognises it."""
    async with opened(proxy.url) as store:
        await create(store)
        epoch = (await store.claim(SESSION)).epoch
        before: tuple[int, ...] = PROMPT
        for number in range(5):
            played = round_after(before, (number, number + 1), logprobs=LOGPROBS)
            if number:  # the first one loads the script
                proxy.lose_reply()
            await commit(store, epoch, played)
            before = (*before, *tokens_of(played))
        assert proxy.num_lost == 4
        assert tuple(entry.token for entry in (await store.read(SESSION)).emitted) == before[len(PROMPT) :]


async def test_lost_replies_do_not_undo_creation_or_claim(proxy: Proxy) -> None:
    async with opened(proxy.url) as store:
        await create(store, "loads-the-script")
        first = await store.claim("loads-the-script")
        proxy.lose_reply()
        await create(store)
        proxy.lose_reply()
        claimed = await store.claim(SESSION)
        assert proxy.num_lost == 2
        assert claimed.epoch >= first.epoch
        await commit(store, claimed.epoch, round_after(PROMPT, (1,)))


async def test_an_unguarded_append_would_be_doubled(proxy: Proxy) -> None:
    """The control: the proxy loses the reply of a command that was executed, and the client repeats it."""
    texts = {"increase": "return redis.call('INCR', KEYS[1])", LIBRARY: ""}
    client = RedisClient(open_redis(proxy.url).route, read_script=texts.__getitem__)
    increase = client.script("increase", lambda _: True)
    await increase(["counter"], [])
    proxy.lose_reply()
    assert await increase(["counter"], []) == 3
    await client.close()


async def test_connections_that_are_cut_are_made_again(proxy: Proxy) -> None:
    async with opened(proxy.url) as store:
        await create(store)
        proxy.cut()
        assert (await store.claim(SESSION)).epoch == 1


async def test_an_abandoned_call_leaves_no_stale_reply(proxy: Proxy) -> None:
    """A connection whose reply is still to come must not answer another command with it."""
    async with opened(proxy.url) as store:
        await create(store)
        epoch = (await store.claim(SESSION)).epoch
        await commit(store, epoch, round_after(PROMPT, (1,)))
        proxy.hold()
        committing = asyncio.create_task(commit(store, epoch, round_after((*PROMPT, 1), (2,))))
        await proxy.held.wait()
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        proxy.release()
        assert tuple(entry.token for entry in (await store.read(SESSION)).emitted) == (1, 2)
        assert await store.cancel(SESSION) is Status.CANCELLED


async def test_the_store_recovers_when_redis_is_back() -> None:
    with running_redis(append_only=True) as server:
        async with opened(server.url, patience_s=0.5) as store:
            await create(store)
            epoch = (await store.claim(SESSION)).epoch
            await commit(store, epoch, round_after(PROMPT, (1,)))
            server.kill()
            with pytest.raises(UnavailableError, match="try again"):
                await commit(store, epoch, round_after((*PROMPT, 1), (2,)))
            server.start()
            await commit(store, epoch, round_after((*PROMPT, 1), (2,)))
            assert tuple(entry.token for entry in (await store.read(SESSION)).emitted) == (1, 2)


async def test_an_emptied_store_is_data_loss() -> None:
    with running_redis(append_only=False) as server:
        async with opened(server.url) as store:
            await create(store)
            epoch = (await store.claim(SESSION)).epoch
            server.stop()
            server.start()
            with pytest.raises(DataLossError):
                await commit(store, epoch, round_after(PROMPT, (1,)))
            with pytest.raises(NotFoundError):
                await store.read(SESSION)


async def test_a_store_restored_from_backup_is_data_loss(redis_server: RedisServer, redis_url: str) -> None:
    async with opened(redis_url) as store:
        await create(store)
        epoch = (await store.claim(SESSION)).epoch
        await commit(store, epoch, round_after(PROMPT, (1,)))
        with redis_server.client() as client:
            backup = {key: client.dump(key) for key in keys(SESSION)[:3]}
            await commit(store, epoch, round_after((*PROMPT, 1), (2,)))
            for key, data in backup.items():
                client.restore(key, 0, data, replace=True)
        with pytest.raises(DataLossError):
            await commit(store, epoch, round_after((*PROMPT, 1, 2), (3,)))


@pytest.mark.parametrize("part", [1, 2, 3], ids=["tokens", "origins", "logprobs"])
async def test_a_partial_session_is_data_loss(store: OpenStore, part: int) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1, 2), logprobs=LOGPROBS))
    stored = await store.redis.get(keys(SESSION)[part])
    assert stored is not None
    await store.redis.set(keys(SESSION)[part], stored[: 4 if part < 3 else 21])
    if part == 2:
        await store.redis.set(keys(SESSION)[part], b"\x01")
    with pytest.raises(DataLossError):
        await store.claim(SESSION)


async def test_reading_leaves_out_log_probabilities(store: OpenStore) -> None:
    await create(store)
    await commit(store, (await store.claim(SESSION)).epoch, round_after(PROMPT, (1, 2), logprobs=LOGPROBS))
    assert [(entry.token, entry.logprobs) for entry in (await store.read(SESSION)).emitted] == [(1, None), (2, None)]


async def test_a_session_expires(redis_server: RedisServer, redis_url: str) -> None:
    async with opened(redis_url) as store:
        await create(store)
        with redis_server.client() as client:
            client.pexpireat(keys(SESSION)[0], 1)
        with pytest.raises(NotFoundError, match="expired"):
            await store.claim(SESSION)


async def test_300_calls_at_once_succeed(store: OpenStore) -> None:
    names = [f"session {number}" for number in range(300)]
    await asyncio.gather(*(create(store, name) for name in names))
    claimed = await asyncio.gather(*(store.claim(name) for name in names))
    assert [session.epoch for session in claimed] == [1] * 300


async def test_1024_commits_survive_a_pause_of_redis(redis_server: RedisServer, redis_url: str) -> None:
    names = [f"session {number}" for number in range(1024)]
    played = round_after(PROMPT, (1, 2))
    async with opened(redis_url) as store:
        await asyncio.gather(*(create(store, name) for name in names))
        await asyncio.gather(*(store.claim(name) for name in names))
        with redis_server.paused():
            commits = [asyncio.create_task(store.commit(name, 1, played, played.statistics)) for name in names]
            await asyncio.wait(commits, timeout=1.0)  # the pause itself
            assert not any(commit.done() for commit in commits)
        await asyncio.gather(*commits)


async def test_a_call_gives_up_waiting_for_its_turn(redis_server: RedisServer, redis_url: str) -> None:
    redis = open_redis(redis_url)
    impatient = RedisClient(redis.route, patience_s=0.01)
    with redis_server.paused():
        calls = [asyncio.create_task(impatient.ping()) for _ in range(MAX_CALLS + 1)]
        with pytest.raises(UnavailableError, match="too many calls wait"):
            await calls[-1]
    await asyncio.gather(*calls[:-1])
    await impatient.close()
