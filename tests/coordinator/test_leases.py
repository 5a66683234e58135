"""The lease of a session: who may claim it when, what its followers read, embedded and real Redis, mutants."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.asyncio import Redis

from coordinator.generation import OutputToken, Round
from coordinator.prompts import EncodedPrompt
from coordinator.session_record import LogEnd, Status
from coordinator.session_replies import LeasedElsewhere, SessionCancelled
from coordinator.sessions import SessionStore, keys
from coordinator.stores.client import RedisClient
from coordinator.stores.node import Node
from coordinator.stores.opening import memory_pool, open_redis
from coordinator.stores.routes import FixedRoute
from coordinator.stores.scripts import read_script
from specdec.errors import DataLossError, FencedError, SpecdecError
from specdec.exact.prefix import chain
from specdec.types import Statistics, TokenLogprobs, TokenOrigin

TTL_S = 1000.0
LONG_S, SHORT_S = 300.0, 0.03  # leases that no test outlasts, and that one may wait for
SESSION = "a-session"
PROMPT = (7, 8, 9)
LOGPROBS = TokenLogprobs(-0.5, ((3, -0.25), (4, -2.0)))


async def create(store: SessionStore, session_id: str = SESSION) -> None:
    await store.create(session_id, b"one", b"request", EncodedPrompt(PROMPT, chain(b"", PROMPT)))


def round_after(before: tuple[int, ...], *tokens: int) -> Round:
    """The round that commits `tokens` after `before`, prompt included."""
    emitted = tuple(OutputToken(token, TokenOrigin.BONUS, LOGPROBS) for token in tokens)
    base = chain(b"", before)
    return Round(len(before), base, emitted, chain(base, tokens), None, Statistics())


async def commit(store: SessionStore, epoch: int, played: Round) -> None:
    await store.commit(SESSION, epoch, played, played.statistics)


class OpenStore(SessionStore):
    """A store, and the Redis that it is in."""

    def __init__(self, client: RedisClient) -> None:
        super().__init__(client, TTL_S)
        assert isinstance(client.route, FixedRoute)
        self.client = client
        self.redis = Redis(connection_pool=client.route.node.pool)

    def lasting(self, lease_s: float) -> SessionStore:
        """Return the same store for coordinators whose leases last so long."""
        return SessionStore(self.client, TTL_S, lease_s=lease_s)


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[OpenStore]:
    """An empty store of each kind."""
    url = "memory" if request.param == "memory" else request.getfixturevalue("redis_url")
    store = OpenStore(open_redis(url))
    yield store
    await store.close()


async def leased(store: OpenStore, owner: str, lease_s: float = LONG_S) -> int:
    """Let an owner claim a session for so long; return its epoch."""
    return (await store.lasting(lease_s).claim(SESSION, owner=owner)).epoch


async def check_a_lease_keeps_others_away(store: OpenStore) -> None:
    await create(store)
    assert await leased(store, "first", LONG_S) == 1
    with pytest.raises(LeasedElsewhere) as elsewhere:
        await leased(store, "second")
    assert (elsewhere.value.session.epoch, elsewhere.value.session.prompt) == (1, PROMPT)
    assert (await store.read(SESSION)).epoch == 1
    assert await leased(store, "first") == 2, "its own lease keeps nobody away"


async def check_a_lapsed_lease_keeps_nobody_away(store: OpenStore) -> None:
    await create(store)
    assert await leased(store, "first", SHORT_S) == 1
    await asyncio.sleep(SHORT_S)
    assert await leased(store, "second") == 2


async def check_a_released_lease_keeps_nobody_away(store: OpenStore) -> None:
    await create(store)
    await store.release(SESSION, await leased(store, "first", LONG_S))
    text = (*PROMPT, 1)
    epoch = await leased(store, "second", LONG_S)
    assert epoch == 2
    await store.release(SESSION, 1)
    await commit(store.lasting(LONG_S), 2, round_after(PROMPT, 1))
    with pytest.raises(LeasedElsewhere):
        await leased(store, "third")
    await store.release(SESSION, 2)
    await store.lasting(LONG_S).heartbeat(SESSION, 2, len(text), chain(b"", text))  # it was under way
    assert await leased(store, "third") == 3


async def check_a_former_owner_releases_nothing(store: OpenStore) -> None:
    await create(store)
    await leased(store, "first", SHORT_S)
    await asyncio.sleep(SHORT_S)
    await leased(store, "second", LONG_S)
    await store.release(SESSION, 1)
    with pytest.raises(LeasedElsewhere):
        await leased(store, "third")


async def check_commits_renew_a_lease(store: OpenStore) -> None:
    await create(store)
    epoch = await leased(store, "first", SHORT_S)
    await commit(store.lasting(LONG_S), epoch, round_after(PROMPT, 1))
    await asyncio.sleep(SHORT_S)
    with pytest.raises(LeasedElsewhere):
        await leased(store, "second")


@pytest.mark.parametrize("count", [0, 3])
async def test_heartbeats_of_many_sessions_at_once(store: OpenStore, count: int) -> None:
    """One is fine, one is not there, one has another owner, one is cancelled; a call that fails says nothing."""
    names = [f"session {number}" for number in range(count)]
    for name in names:
        await create(store, name)
        await store.claim(name)
    beats = [(name, 1, len(PROMPT), chain(b"", PROMPT)) for name in [*names, "unknown"]]
    if count:
        await store.claim(names[1])
        await store.cancel(names[2])
    refusals = [type(refusal) for refusal in await store.heartbeats(beats)]
    assert refusals == [type(None), FencedError, SessionCancelled, DataLossError][-count - 1 :]


async def test_heartbeats_that_fail_say_nothing(unused_tcp_port: int) -> None:
    store = OpenStore(open_redis(f"redis://127.0.0.1:{unused_tcp_port}"))
    assert await store.heartbeats([(SESSION, 1, 1, b"")] * 2) == [None, None]
    assert await store.heartbeats([]) == []
    await store.close()


async def check_heartbeats_renew_a_lease(store: OpenStore) -> None:
    await create(store)
    epoch = await leased(store, "first", SHORT_S)
    lasting = store.lasting(LONG_S)
    assert await lasting.heartbeats([(SESSION, epoch, len(PROMPT), chain(b"", PROMPT))]) == [None]
    await asyncio.sleep(SHORT_S)
    with pytest.raises(LeasedElsewhere):
        await leased(store, "second")
    await store.compare(SESSION, epoch, len(PROMPT), chain(b"", PROMPT))
    assert (await store.tail(SESSION, LogEnd.of(await store.read(SESSION))))[0].lease_left_s > LONG_S / 2


async def check_a_clock_that_jumps_does_not_prolong_leases(store: OpenStore) -> None:
    """To twice its length at most."""
    await create(store)
    await leased(store, "first", LONG_S)
    later_ms = 1000 * (int(time.time()) + 10 * int(LONG_S))
    await store.redis.hset(keys(SESSION)[0], "leased_at", later_ms)  # the clock was ahead when it was renewed
    assert await leased(store, "second") == 2


async def check_a_tail_gets_what_the_log_gains(store: OpenStore) -> None:
    await create(store)
    epoch = await leased(store, "first", LONG_S)
    known = LogEnd.of(await store.read(SESSION))
    text: tuple[int, ...] = PROMPT
    for played in (round_after(PROMPT, 1, 2), round_after((*PROMPT, 1, 2), 3)):
        await commit(store.lasting(LONG_S), epoch, played)
        news, known = await store.tail(SESSION, known)
        assert (news.emitted, news.epoch, news.status) == (played.emitted, epoch, Status.ACTIVE)
        assert 0 < news.lease_left_s <= LONG_S
        text = (*text, *(entry.token for entry in played.emitted))
        assert (known.length, known.digest) == (len(text), chain(b"", text))
    assert (await store.tail(SESSION, known))[0].emitted == ()
    with pytest.raises(DataLossError):
        await store.tail(SESSION, LogEnd(known.length, b"x" * 16, known.num_logprob_bytes))
    with pytest.raises(DataLossError):
        await store.tail(SESSION, LogEnd(known.length + 1, known.digest, known.num_logprob_bytes))


async def check_a_detached_session_is_cancelled_unless_it_was_claimed(store: OpenStore) -> None:
    await create(store)
    first = await leased(store, "first", LONG_S)
    await store.release(SESSION, first)
    second = await leased(store, "second", LONG_S)
    assert await store.cancel(SESSION, first) is Status.ACTIVE
    assert await store.cancel(SESSION, second) is Status.CANCELLED


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_checks(store: OpenStore, check: Callable[[OpenStore], Awaitable[None]]) -> None:
    await check(store)


# a script, what is there, and what a mistake puts in its place
MUTANTS = {
    "claims ignore leases": ("claim", "lease_left_ms(KEYS[1]) > 0 and", "false and"),
    "owners are kept away by their own leases": ("claim", "redis.call('HGET', KEYS[1], 'owner') ~= ARGV[4]", "true"),
    "commits do not renew leases": ("commit", "renew_lease(KEYS[1], ARGV[12])", ""),
    "heartbeats do not renew leases": ("heartbeat", "redis.call('HEXISTS', KEYS[1], 'leased_at') == 1", "false"),
    "late heartbeats renew what was released": (
        "heartbeat",
        "redis.call('HEXISTS', KEYS[1], 'leased_at') == 1",
        "true",
    ),
    "former owners release": ("release", "redis.call('HGET', KEYS[1], 'epoch') == ARGV[1]", "true"),
    "leases last for ever": ("lease", "math.abs(age) < length and length - age or 0", "length"),
    "clocks that jump back prolong leases": ("lease", "math.abs(age) < length", "age < length"),
    "tails begin one token late": ("tail", "4 * known, -1", "4 * (known + 1), -1"),
    "tails leave out log probabilities": ("tail", "redis.call('GETRANGE', KEYS[4], ARGV[2], -1)", "''"),
    "a detached session is cancelled under its new owner": ("cancel", "#ARGV[1] == 0 or state[2] == ARGV[1]", "true"),
}


async def fails(check: Callable[[OpenStore], Awaitable[None]], script: str, old: str, new: str) -> bool:
    """Return whether a check rejects a store whose script is changed."""

    def mutated(name: str) -> str:
        text = read_script(name)
        assert name != script or text.count(old) == 1, f"{script}.lua has changed; change the mutant with it"
        return text.replace(old, new) if name == script else text

    store = OpenStore(RedisClient(FixedRoute(Node(memory_pool())), read_script=mutated))
    try:
        await check(store)
    except (AssertionError, SpecdecError, SessionCancelled, LeasedElsewhere, pytest.fail.Exception):
        return True
    finally:
        await store.close()
    return False


@pytest.mark.parametrize("name", MUTANTS)
async def test_each_mutant_of_the_scripts_is_rejected(name: str) -> None:
    assert any([await fails(check, *MUTANTS[name]) for check in CHECKS])
