"""The session store, embedded and in a real Redis: its contract, and mutants of its scripts."""

from collections.abc import Awaitable, Callable

import pytest

from coordinator.session_record import Status
from coordinator.session_replies import SessionCancelled
from coordinator.sessions import keys
from coordinator.stores.client import RedisClient
from coordinator.stores.node import Node
from coordinator.stores.opening import memory_pool
from coordinator.stores.routes import FixedRoute
from coordinator.stores.scripts import read_script
from specdec.errors import AlreadyExistsError, DataLossError, FencedError, NotFoundError, SpecdecError
from specdec.exact.prefix import chain
from specdec.types import FinishReason, TokenLogprobs
from tests.support.session_checks import CHECKS
from tests.support.stored_sessions import (
    LOGPROBS,
    PROMPT,
    SESSION,
    TTL_S,
    OpenStore,
    commit,
    create,
    opened,
    round_after,
)

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
