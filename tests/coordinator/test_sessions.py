"""The session store: embedded and real Redis, lost replies, old owners, a store restored from backup, mutants."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from coordinator.generation import OutputToken, Round
from coordinator.prompts import EncodedPrompt
from coordinator.session_record import LogEnd, Status
from coordinator.session_replies import SessionCancelled
from coordinator.sessions import SessionStore, keys, open_store
from coordinator.stores.client import PATIENCE_S, RedisClient
from coordinator.stores.node import MAX_CALLS, Command, Node
from coordinator.stores.opening import memory_pool, open_redis
from coordinator.stores.routes import FixedRoute
from coordinator.stores.scripts import LIBRARY, read_script
from specdec.errors import AlreadyExistsError, DataLossError, FencedError, NotFoundError, SpecdecError, UnavailableError
from specdec.exact.prefix import chain
from specdec.types import FinishReason, Statistics, TokenLogprobs, TokenOrigin
from tests.support.proxy import Proxy, running_proxy
from tests.support.redis_server import RedisServer, running_redis

TTL_S = 1000.0
SESSION = "a-session"
PROMPT = (7, 8, 2**32 - 1)
LOGPROBS = TokenLogprobs(-0.5, ((3, -0.25), (4, -2.0)))


async def create(store: SessionStore, session_id: str = SESSION, fingerprint: bytes = b"one") -> None:
    await store.create(session_id, fingerprint, b"request", EncodedPrompt(PROMPT, chain(b"", PROMPT)))


def round_after(
    before: tuple[int, ...],
    tokens: tuple[int, ...],
    finish: FinishReason | None = None,
    logprobs: TokenLogprobs | None = None,
) -> Round:
    """The round that commits `tokens` after `before`, prompt included."""
    origins = [TokenOrigin.ACCEPTED] * (len(tokens) - 1) + [TokenOrigin.BONUS]
    emitted = tuple(OutputToken(token, origin, logprobs) for token, origin in zip(tokens, origins, strict=True))
    digest = chain(b"", before)
    statistics = Statistics(num_rounds=1, num_tokens=len(tokens), draft_s=0.5, num_drafts_per_depth=(1, 1))
    return Round(len(before), digest, emitted, chain(digest, tokens), finish, statistics)


async def commit(store: SessionStore, epoch: int, played: Round) -> None:
    await store.commit(SESSION, epoch, played, played.statistics)


def tokens_of(played: Round) -> tuple[int, ...]:
    return tuple(entry.token for entry in played.emitted)


class OpenStore(SessionStore):
    """A store, and the Redis that it is in."""

    def __init__(self, client: RedisClient, ttl_s: float) -> None:
        super().__init__(client, ttl_s)
        assert isinstance(client.route, FixedRoute)
        self.redis = Redis(connection_pool=client.route.node.pool)


@asynccontextmanager
async def opened(url: str, ttl_s: float = TTL_S, patience_s: float = PATIENCE_S) -> AsyncIterator[OpenStore]:
    store = OpenStore(open_redis(url, patience_s=patience_s), ttl_s)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[OpenStore]:
    """An empty store of each kind."""
    url = "memory" if request.param == "memory" else request.getfixturevalue("redis_url")
    async with opened(url) as store:
        yield store


@pytest.fixture
async def proxy(redis_server: RedisServer, redis_url: str) -> AsyncIterator[Proxy]:
    async with running_proxy(redis_server.port) as proxy:
        yield proxy


# ---- the contract, on both kinds


async def test_a_session_comes_back_as_it_was_committed(store: OpenStore) -> None:
    await create(store)
    session = await store.claim(SESSION)
    first = round_after(PROMPT, (1, 2, 0), logprobs=LOGPROBS)
    last = round_after((*PROMPT, 1, 2, 0), (5,), FinishReason.EOS, TokenLogprobs(-1.5, ()))
    await commit(store, session.epoch, first)
    await commit(store, session.epoch, last)
    read = await store.claim(SESSION)
    assert (read.prompt, read.emitted) == (PROMPT, first.emitted + last.emitted)
    assert (read.status, read.finish, read.digest) == (Status.FINISHED, FinishReason.EOS, last.digest)
    assert (read.request, read.statistics, read.epoch) == (b"request", last.statistics, 1)


async def test_creating_again_changes_nothing(store: OpenStore) -> None:
    await create(store)
    await commit(store, (await store.claim(SESSION)).epoch, round_after(PROMPT, (1,)))
    await create(store)
    read = await store.read(SESSION)
    assert (read.epoch, len(read.emitted)) == (1, 1)


async def test_a_key_with_other_parameters_is_refused(store: OpenStore) -> None:
    await create(store)
    with pytest.raises(AlreadyExistsError, match="new request_id"):
        await create(store, fingerprint=b"other")


async def test_only_claims_raise_the_epoch(store: OpenStore) -> None:
    await create(store)
    assert [(await store.claim(SESSION)).epoch for _ in range(3)] == [1, 2, 3]
    assert (await store.read(SESSION)).epoch == 3


async def test_a_finished_session_keeps_its_epoch(store: OpenStore) -> None:
    await create(store)
    await commit(store, (await store.claim(SESSION)).epoch, round_after(PROMPT, (1,), FinishReason.LENGTH))
    assert (await store.claim(SESSION)).epoch == 1


async def test_unknown_sessions_are_not_found(store: OpenStore) -> None:
    for call in (store.claim, store.read, store.cancel):
        with pytest.raises(NotFoundError, match="begin a new one"):
            await call("no-such-session")


async def test_cancelling_ends_a_session_at_its_next_commit(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    assert await store.cancel(SESSION) is Status.CANCELLED
    assert await store.cancel(SESSION) is Status.CANCELLED
    with pytest.raises(SessionCancelled):
        await commit(store, epoch, round_after(PROMPT, (1,)))
    read = await store.claim(SESSION)
    assert (read.status, read.finish, read.emitted, read.epoch) == (
        Status.CANCELLED, FinishReason.CANCELLED, (), epoch
    )  # fmt: skip


async def test_a_finished_session_cannot_be_cancelled(store: OpenStore) -> None:
    await create(store)
    await commit(store, (await store.claim(SESSION)).epoch, round_after(PROMPT, (1,), FinishReason.STOP))
    assert await store.cancel(SESSION) is Status.FINISHED
    assert (await store.read(SESSION)).finish is FinishReason.STOP


async def test_nothing_follows_a_finish(store: OpenStore) -> None:
    await create(store)
    await commit(store, (await store.claim(SESSION)).epoch, round_after(PROMPT, (1,), FinishReason.STOP))
    with pytest.raises(DataLossError):
        await commit(store, 1, round_after((*PROMPT, 1), (2,)))


async def test_the_store_in_memory_is_its_openers_own() -> None:
    async with opened("memory") as one, opened("memory") as other:
        await create(one)
        with pytest.raises(NotFoundError):
            await other.read(SESSION)


# ---- checks that mutants of the scripts must fail


async def check_zombies_are_fenced(store: OpenStore) -> None:
    await create(store)
    zombie = await store.claim(SESSION)
    owner = await store.claim(SESSION)
    with pytest.raises(FencedError) as fenced:
        await commit(store, zombie.epoch, round_after(PROMPT, (1,)))
    assert fenced.value.metadata == {"epoch": str(owner.epoch)}
    assert (await store.read(SESSION)).emitted == ()


async def check_zombies_are_fenced_even_where_they_repeat(store: OpenStore) -> None:
    await create(store)
    zombie = await store.claim(SESSION)
    await commit(store, zombie.epoch, round_after(PROMPT, (1,)))
    await store.claim(SESSION)
    with pytest.raises(FencedError):
        await commit(store, zombie.epoch, round_after(PROMPT, (1,)))


async def check_a_repeated_commit_adds_nothing(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    played = round_after(PROMPT, (1, 2), logprobs=LOGPROBS)
    await commit(store, epoch, played)
    await commit(store, epoch, played)
    assert (await store.claim(SESSION)).emitted == played.emitted


async def check_a_repeated_last_commit_adds_nothing(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    played = round_after(PROMPT, (1,), FinishReason.EOS)
    await commit(store, epoch, played)
    await commit(store, epoch, played)
    assert (await store.read(SESSION)).status is Status.FINISHED


async def check_a_commit_repeated_after_a_cancellation_is_recognised(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    played = round_after(PROMPT, (1, 2))
    await commit(store, epoch, played)
    await store.cancel(SESSION)
    await commit(store, epoch, played)
    with pytest.raises(SessionCancelled):
        await commit(store, epoch, round_after((*PROMPT, 1, 2), (3,)))


async def check_another_length_is_data_loss(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    for before in (PROMPT[:-1], (*PROMPT, 1)):
        with pytest.raises(DataLossError, match="new session"):
            await commit(store, epoch, round_after(before, (9, 9)))
    assert (await store.read(SESSION)).emitted == ()


async def check_another_length_with_the_right_digest_is_data_loss(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    for base_length in (len(PROMPT) - 1, len(PROMPT) + 1):
        with pytest.raises(DataLossError):
            await commit(store, epoch, replace(round_after(PROMPT, (1,)), base_length=base_length))


async def check_another_digest_is_data_loss(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    with pytest.raises(DataLossError, match="new session"):
        await commit(store, epoch, round_after((1, 1, 1), (1,)))
    assert (await store.read(SESSION)).emitted == ()


async def check_other_tokens_of_the_same_length_are_data_loss(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1, 2)))
    with pytest.raises(DataLossError):
        await commit(store, epoch, round_after(PROMPT, (1, 3)))


async def check_a_claim_raises_the_epoch(store: OpenStore) -> None:
    await create(store)
    assert (await store.claim(SESSION)).epoch < (await store.claim(SESSION)).epoch


async def check_all_keys_live_as_long(store: OpenStore) -> None:
    """Every commit gives all four keys the full time to live again."""
    await create(store)
    client = store.redis
    assert all([await client.pttl(key) > 0 for key in keys(SESSION)[:2]])
    epoch = (await store.claim(SESSION)).epoch
    before: tuple[int, ...] = PROMPT
    for token in (1, 2):
        for key in keys(SESSION):
            await client.pexpire(key, 60_000)
        await commit(store, epoch, round_after(before, (token,), logprobs=LOGPROBS))
        before = (*before, token)
        left_s = [await client.pttl(key) / 1000 for key in keys(SESSION)]
        assert all(TTL_S - 500 < left <= TTL_S for left in left_s)


async def check_remains_of_an_expired_session_are_swept(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1, 2), logprobs=LOGPROBS))
    await store.redis.delete(keys(SESSION)[0])
    await create(store)
    assert (await store.read(SESSION)).emitted == ()


async def check_an_epoch_that_went_back_is_data_loss(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    with pytest.raises(DataLossError):
        await commit(store, epoch + 1, round_after(PROMPT, (1,)))


async def check_a_heartbeat_sees_what_the_store_lacks(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1, 2)))
    text = (*PROMPT, 1, 2)
    await store.heartbeat(SESSION, epoch, len(PROMPT), chain(b"", PROMPT))  # a commit may be under way
    await store.heartbeat(SESSION, epoch, len(text), chain(b"", text))
    for wrong in ((*text, 3), (*PROMPT, 1, 3)):
        with pytest.raises(DataLossError):
            await store.heartbeat(SESSION, epoch, len(wrong), chain(b"", wrong))


async def check_a_comparison_leaves_the_expiry_as_it_is(store: OpenStore) -> None:
    """A session that was left expires when it was to: comparing it, again and again, does not keep it."""
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    for key in keys(SESSION)[:2]:
        await store.redis.pexpire(key, 60_000)
    await store.compare(SESSION, epoch, len(PROMPT), chain(b"", PROMPT))
    assert all([0 < await store.redis.pttl(key) <= 60_000 for key in keys(SESSION)[:2]])
    with pytest.raises(DataLossError):
        await store.compare(SESSION, epoch, len(PROMPT) + 1, chain(b"", (*PROMPT, 3)))


async def check_finished_sessions_take_no_round(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1,), FinishReason.EOS))
    with pytest.raises(DataLossError):
        await commit(store, epoch, round_after((*PROMPT, 1), (2,)))


async def check_only_what_was_read_is_restored(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1,), logprobs=LOGPROBS))
    read = await store.claim(SESSION)
    assert await store.restore(replace(read, epoch=9), read)
    restored = await store.claim(SESSION)
    assert restored == replace(read, epoch=10), "with log probabilities"
    assert not await store.restore(replace(read, epoch=20), read), "others have changed it"
    assert not await store.restore(replace(read, epoch=20), None)
    await store.redis.flushall()
    assert await store.restore(restored, None)
    assert await store.claim(SESSION) == replace(restored, epoch=11)
    assert all([await store.redis.pttl(key) > 0 for key in keys(SESSION)])


async def check_lost_sessions_stay_lost(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await store.lose(SESSION)
    for call in (store.claim(SESSION), store.read(SESSION), store.cancel(SESSION)):
        with pytest.raises(DataLossError, match="begin a new session"):
            await call
    with pytest.raises(FencedError):
        await commit(store, epoch, round_after(PROMPT, (1,)))
    found = await store.find(SESSION)
    assert found
    assert found.status is Status.LOST
    await create(store)
    with pytest.raises(DataLossError):
        await store.claim(SESSION)


async def check_tokens_that_vanished_are_data_loss(store: OpenStore) -> None:
    """What Redis evicts key by key."""
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1,)))
    await store.redis.delete(keys(SESSION)[1])
    with pytest.raises(DataLossError):
        await commit(store, epoch, round_after((*PROMPT, 1), (2,)))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_checks(store: OpenStore, check: Callable[[OpenStore], Awaitable[None]]) -> None:
    await check(store)


EPOCH = "if tonumber(meta[1]) > tonumber(ARGV[1]) then"
OLDER = "if tonumber(meta[1]) < tonumber(ARGV[1]) then"
REPLAY = "if tonumber(meta[2]) == length and meta[3] == ARGV[4] then"
CONFLICT = "meta[2] ~= ARGV[2] or meta[3] ~= ARGV[3]"
CANCELLED = "if meta[4] == 'cancelled' then\n  return {'cancelled'}\nend\n"
EXPIRE = "for _, key in ipairs(KEYS) do"
MUTANTS = {
    "no epoch check": ("commit", EPOCH, "if false then"),
    "lower epochs are let in": ("commit", EPOCH, OLDER),
    "epochs that went back are let in": ("commit", OLDER, "if false then"),
    "ended sessions go on": ("commit", "if meta[4] ~= 'active' then", "if false then"),
    "restoring does not compare": ("restore", "if (meta[field] or '') ~= ARGV[field] then", "if false then"),
    "losing keeps the epoch": ("lose", "redis.call('HINCRBY', KEYS[1], 'epoch', 1)", ""),
    "a heartbeat does not see what was lost": (
        "heartbeat",
        "or behind < 0 or (behind == 0 and meta[3] ~= ARGV[4])",
        "",
    ),
    "a comparison ends a session": ("heartbeat", "if tonumber(ARGV[2]) > 0 then", "if true then"),
    "no recognition of replays": ("commit", REPLAY, "if false then"),
    "replays recognised by length alone": ("commit", REPLAY, "if tonumber(meta[2]) == length then"),
    "replays recognised before the epoch": (
        "commit",
        EPOCH,
        f"local length = tonumber(ARGV[2]) + #ARGV[5] / 4\n{REPLAY}\n  return {{'committed'}}\nend\n{EPOCH}",
    ),
    "cancelled before replays": ("commit", EPOCH, CANCELLED + EPOCH),
    "no comparison of lengths": ("commit", CONFLICT, "meta[3] ~= ARGV[3]"),
    "no comparison of digests": ("commit", CONFLICT, "meta[2] ~= ARGV[2]"),
    "no comparison at all": ("commit", CONFLICT, "false"),
    "tokens need not be there": ("commit", "redis.call('STRLEN', KEYS[2]) ~= 4 * tonumber(meta[2])", "false"),
    "meta is not kept alive": ("commit", EXPIRE, "for _, key in ipairs({KEYS[2], KEYS[3], KEYS[4]}) do"),
    "tokens are not kept alive": ("commit", EXPIRE, "for _, key in ipairs({KEYS[1], KEYS[3], KEYS[4]}) do"),
    "origins are not kept alive": ("commit", EXPIRE, "for _, key in ipairs({KEYS[1], KEYS[2], KEYS[4]}) do"),
    "logprobs are not kept alive": ("commit", EXPIRE, "for _, key in ipairs({KEYS[1], KEYS[2], KEYS[3]}) do"),
    "a new session's meta never expires": ("create", "redis.call('PEXPIRE', KEYS[1], ARGV[2])\n", ""),
    "a new session's tokens never expire": ("create", "redis.call('PEXPIRE', KEYS[2], ARGV[2])\n", ""),
    "remains are kept": ("create", "redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])\n", ""),
    "claims raise nothing": ("claim", "ARGV[1] == '1'", "false"),
}


async def fails(check: Callable[[OpenStore], Awaitable[None]], script: str, old: str, new: str) -> bool:
    """Return whether a check rejects a store whose script is changed."""

    def mutated(name: str) -> str:
        text = read_script(name)
        assert name != script or text.count(old) == 1, f"{script}.lua has changed; change the mutant with it"
        return text.replace(old, new) if name == script else text

    store = OpenStore(RedisClient(FixedRoute(Node(memory_pool())), read_script=mutated), TTL_S)
    try:
        await check(store)
    except (AssertionError, SpecdecError, SessionCancelled, pytest.fail.Exception):
        return True
    finally:
        await store.close()
    return False


# without this, a check that checks nothing would go unnoticed
@pytest.mark.parametrize("name", MUTANTS)
async def test_each_mutant_of_the_scripts_is_rejected(name: str) -> None:
    assert any([await fails(check, *MUTANTS[name]) for check in CHECKS])


async def test_a_heartbeat_tells_the_owner(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await store.redis.pexpire(keys(SESSION)[0], 60_000)
    await store.heartbeat(SESSION, epoch, len(PROMPT), chain(b"", PROMPT))
    assert await store.redis.pttl(keys(SESSION)[0]) > 60_000
    await store.claim(SESSION)
    with pytest.raises(FencedError):
        await store.heartbeat(SESSION, epoch, len(PROMPT), chain(b"", PROMPT))
    await store.cancel(SESSION)
    with pytest.raises(SessionCancelled):
        await store.heartbeat(SESSION, epoch + 1, len(PROMPT), chain(b"", PROMPT))
    await store.redis.delete(keys(SESSION)[0])
    with pytest.raises(DataLossError):
        await store.heartbeat(SESSION, epoch + 1, len(PROMPT), chain(b"", PROMPT))


# ---- faults, on a real Redis


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


class Replying(Node):
    """A server that always says the same."""

    def __init__(self, reply: object) -> None:
        super().__init__(memory_pool())
        self._reply = reply

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        if isinstance(self._reply, RedisError) and not isinstance(self._reply, ResponseError):
            raise self._reply
        return [self._reply for _ in commands]


@pytest.mark.parametrize(
    "error",
    [
        ResponseError("DB index is out of range"),
        AuthenticationError("wrong password"),
        NoPermissionError("no permissions to run evalsha"),
    ],
)
async def test_refusals_of_redis_are_quoted(error: Exception) -> None:
    with pytest.raises(UnavailableError, match=f"the session store refuses .{error}.; see to its address, password"):
        await RedisClient(FixedRoute(Replying(error))).ping()


CALLS: dict[str, Callable[[SessionStore], Awaitable[object]]] = {
    "create": create,
    "commit": lambda store: commit(store, 1, round_after(PROMPT, (1,))),
    "heartbeat": lambda store: store.heartbeat(SESSION, 1, 1, b""),
    "cancel": lambda store: store.cancel(SESSION),
    "claim": lambda store: store.claim(SESSION),
    "tail": lambda store: store.tail(SESSION, LogEnd(1, b"", 0)),
}
MALFORMED = [None, 1, b"OK", [], [b"committed", b"1"], [None], [b"fenced"], [[b"committed"]], [b"", b"", b"", b"", 2]]
NO_SESSION: list[tuple[str, object]] = [("cancel", None), ("claim", []), ("tail", [])]  # these replies mean it


def store_that_replies(reply: object) -> SessionStore:
    return SessionStore(RedisClient(FixedRoute(Replying(reply))), TTL_S)


@pytest.mark.parametrize(
    ("name", "reply"), [(name, reply) for name in CALLS for reply in MALFORMED if (name, reply) not in NO_SESSION]
)
async def test_malformed_replies_are_unavailable(name: str, reply: object) -> None:
    with pytest.raises(UnavailableError, match=f"malformed reply to {name}"):
        await CALLS[name](store_that_replies(reply))


@pytest.mark.parametrize("fields", [[], [b"epoch"], [b"prompt_length", b"x"]])
async def test_unreadable_sessions_are_unavailable(fields: list[bytes]) -> None:
    with pytest.raises(UnavailableError, match="malformed session"):
        await store_that_replies([fields, b"", b"", b"", 0]).read(SESSION)


async def test_urls_that_redis_rejects_are_refused() -> None:
    with pytest.raises(ValueError, match="give embedded, redis://"):
        open_store("http://127.0.0.1", TTL_S)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h/0?wrong=1", "option that Redis clients do not know: 'wrong'"),
        ("rediss://h/0?ssl_cert_reqs=perhaps", "wrong option.*perhaps"),
    ],
)
async def test_wrong_options_in_a_url_are_named(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_store(url, TTL_S)


# ---- many calls at once


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


# ---- any order of calls, against a model


class StoreMachine(RuleBasedStateMachine):
    """One session, several owners that may act at any time, a client that cancels, expiry and replays."""

    server: RedisServer

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = OpenStore(open_redis(self.server.url), TTL_S)
        self.commits: list[tuple[int, Round]] = []  # accepted: epoch and round
        self.epochs: list[int] = []  # given out
        self.run(self.store.redis.flushall())
        self.born()

    def born(self) -> None:
        self.run(create(self.store))
        self.log: tuple[int, ...] = PROMPT
        self.epoch, self.status = 0, Status.ACTIVE
        self.commits.clear()
        self.epochs.clear()
        self.exists = True

    def run(self, call: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(call)

    def outcome(self, epoch: int, played: Round) -> str:
        try:
            self.run(commit(self.store, epoch, played))
        except (SpecdecError, SessionCancelled) as error:
            return type(error).__name__
        return "committed"

    def expected(self, epoch: int, played: Round) -> str:
        """The model's outcome of a commit."""
        if not self.exists:
            return "DataLossError"
        if epoch != self.epoch:
            return "FencedError" if epoch < self.epoch else "DataLossError"
        if self.commits and self.commits[-1] == (epoch, played):
            return "committed"
        if played.base_digest != chain(b"", self.log):
            return "DataLossError"
        ends = {Status.ACTIVE: "committed", Status.CANCELLED: "SessionCancelled", Status.FINISHED: "DataLossError"}
        return ends[self.status]

    def try_commit(self, epoch: int, played: Round) -> None:
        outcome = self.outcome(epoch, played)
        assert outcome == self.expected(epoch, played)
        if outcome == "committed" and (epoch, played) not in self.commits:
            self.commits.append((epoch, played))
            self.log += tokens_of(played)
            self.status = Status.FINISHED if played.finish else self.status

    @rule()
    def claim(self) -> None:
        if not self.exists:
            with pytest.raises(NotFoundError):
                self.run(self.store.claim(SESSION))
            return
        session = self.run(self.store.claim(SESSION))
        self.epoch += self.status is Status.ACTIVE
        assert session.epoch == self.epoch
        assert self.status is not Status.ACTIVE or session.epoch > max(self.epochs, default=0)
        self.epochs.append(session.epoch)

    @precondition(lambda self: self.epochs)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 3), min_size=1, max_size=3), finish=st.sampled_from([*[None] * 5, FinishReason.EOS]))  # fmt: skip  # noqa: E501
    def commit(self, data: st.DataObject, tokens: list[int], finish: FinishReason | None) -> None:
        """From any epoch that was ever given out."""
        self.try_commit(data.draw(st.sampled_from(self.epochs)), round_after(self.log, tuple(tokens), finish))

    @precondition(lambda self: self.epochs)
    @rule(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def commit_as_owner(self, tokens: list[int]) -> None:
        self.try_commit(self.epochs[-1], round_after(self.log, tuple(tokens)))

    @precondition(lambda self: self.commits)
    @rule()
    def replay(self) -> None:
        self.try_commit(*self.commits[-1])

    @precondition(lambda self: self.epochs)
    @rule(cut=st.integers(1, 4), token=st.integers(0, 3))
    def commit_from_the_past(self, cut: int, token: int) -> None:
        """An owner that believes in an older, or in another, log of the same length."""
        past = self.log[:-cut] or (1,)
        self.try_commit(self.epochs[-1], round_after(past, (token,)))
        self.try_commit(self.epochs[-1], round_after((*self.log[:-1], self.log[-1] ^ 1), (token,)))

    @rule()
    def create_again(self) -> None:
        if not self.exists:
            self.born()
        self.run(create(self.store))
        with pytest.raises(AlreadyExistsError):
            self.run(create(self.store, fingerprint=b"other"))

    @precondition(lambda self: self.exists)
    @rule()
    def cancel(self) -> None:
        if self.status is Status.ACTIVE:
            self.status = Status.CANCELLED
        assert self.run(self.store.cancel(SESSION)) is self.status

    @rule(chance=st.integers(0, 9))
    def expire(self, chance: int) -> None:
        if chance == 0:
            self.run(self.store.redis.pexpireat(keys(SESSION)[0], 1))
            self.exists = False

    @invariant()
    def store_is_the_model(self) -> None:
        if not self.exists:
            return
        session = self.run(self.store.read(SESSION))
        log = session.prompt + tuple(entry.token for entry in session.emitted)
        assert (log, session.epoch, session.status) == (self.log, self.epoch, self.status)
        assert session.digest == chain(b"", self.log)

    @invariant()
    def one_commit_a_length(self) -> None:
        lengths = [played.base_length for _, played in self.commits]
        assert len(set(lengths)) == len(lengths)

    def teardown(self) -> None:
        self.run(self.store.close())
        self.loop.close()


def test_any_order_of_calls(redis_server: RedisServer) -> None:
    class Machine(StoreMachine):
        server = redis_server

    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    bounds = settings(
        max_examples=60,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=checks,
    )
    run_state_machine_as_test(Machine, settings=bounds)
