"""A store that goes back in time gets back what was shown, or says from then on that it lost it."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from coordinator.generation import OutputToken
from coordinator.healing import Healing, Position, heal, take_back
from coordinator.servicer import GenerationServicer
from coordinator.session_ids import PROOF_BYTES, SECRET_BYTES, SessionIds
from coordinator.session_record import Status
from coordinator.sessions import SessionStore, keys, open_store
from coordinator.stores.client import RedisClient
from coordinator.stores.node import Node
from coordinator.stores.opening import memory_pool
from coordinator.stores.routes import FixedRoute
from specdec.errors import DataLossError, InvalidArgumentError, NotFoundError, UnavailableError
from specdec.exact.prefix import chain
from specdec.outside import Outside
from specdec.serving.security.caller import NO_TENANT
from specdec.types import TokenOrigin
from specdec.v1 import generation_pb2
from tests.support.redis_server import running_redis
from tests.support.toy_coordinator import (
    LENGTH,
    PROMPT,
    Chunks,
    Gate,
    ToyCapabilities,
    ToyCoordinator,
    read_into,
    take_last,
    tokens_of,
)

SESSION, INCARNATION = "s", "0" * 16
SETTLED_S = 0.2


class Store(SessionStore):
    """An embedded store that can go back in time."""

    def __init__(self) -> None:
        pool = memory_pool()
        self.redis = Redis(connection_pool=pool)
        self.client = RedisClient(FixedRoute(Node(pool)))
        super().__init__(self.client, 1000.0, Outside(random_bits=lambda count: 0))

    async def snapshot(self) -> dict[str, Any]:
        return {key: await self.redis.dump(key) for key in keys(SESSION)}

    async def go_back(self, snapshot: dict[str, Any]) -> None:
        for key, value in snapshot.items():
            await self.redis.delete(key)
            if value:
                await self.redis.restore(key, 0, value)
        await self.redis.hdel(keys(SESSION)[0], "leased_at")  # it is older than any lease


@pytest_asyncio.fixture
async def store() -> AsyncIterator[Store]:
    made = Store()
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("healing", "starting"):
        monkeypatch.setattr(f"coordinator.{module}.SETTLED_S", SETTLED_S)


async def undisturbed() -> list[int]:
    alone = ToyCoordinator(Store())
    await alone.create(SESSION)
    return await alone.tokens(SESSION)


def handed(tokens: list[int]) -> tuple[OutputToken, ...]:
    return tuple(OutputToken(token, TokenOrigin.ACCEPTED) for token in tokens)


def position(tokens: list[int], num_handed: int | None = None) -> Position:
    """Where a client is that was shown these tokens, and hands some of them back."""
    last = tokens if num_handed is None else tokens[len(tokens) - num_handed :]
    return Position(len(tokens), chain(b"", [*PROMPT, *tokens]), handed(last), INCARNATION)


def follow_from(coordinator: ToyCoordinator, where: Position) -> Chunks:
    return coordinator.follow(SESSION, where.offset, where.digest, where.handed, where.incarnation)


async def went_back(store: Store, owner: ToyCoordinator, *, is_empty: bool = False) -> list[int]:
    """Let an owner show some tokens, then let the store forget the last ones; return what was shown."""
    await owner.create(SESSION)
    owner.toys.before = Gate(4)
    async with aclosing(owner.follow(SESSION, 0, b"")) as chunks:
        shown, chunk = await take_last(chunks, 4)
        snapshot: dict[str, Any] = dict.fromkeys(keys(SESSION)) if is_empty else await store.snapshot()
    owner.toys.before = Gate(12)
    async with aclosing(owner.follow(SESSION, len(shown), chunk.digest)) as chunks:
        more, _ = await take_last(chunks, 8)
    await store.go_back(snapshot)
    return shown + more


# ---- the owner


@pytest.mark.parametrize("is_empty", [False, True])
async def test_owner_brings_back_what_it_has_shown(store: Store, is_empty: bool) -> None:
    """While it runs: its followers resume, and get the text that was begun."""
    owner, other = ToyCoordinator(store), ToyCoordinator(store)
    await owner.create(SESSION)
    snapshot = dict.fromkeys(keys(SESSION)) if is_empty else await store.snapshot()
    owner.toys.before = gate = Gate(8)
    async with aclosing(owner.follow(SESSION, 0, b"")) as chunks:
        shown, chunk = await take_last(chunks, 8)
        await store.go_back(snapshot)
        gate.opened.set()
        with pytest.raises(UnavailableError, match="has this session again"):
            await take_last(chunks, LENGTH)
    assert await store_tokens(store) == shown
    assert shown + await other.tokens(SESSION, len(shown), chunk.digest) == await undisturbed()


async def store_tokens(store: Store) -> list[int]:
    found = await store.find(SESSION)
    assert found
    return found.tokens


@pytest.mark.parametrize("is_empty", [False, True])
async def test_session_that_was_left_is_brought_back(store: Store, is_empty: bool) -> None:
    owner = ToyCoordinator(store)
    shown = await went_back(store, owner, is_empty=is_empty)
    watching = asyncio.create_task(owner.watch(period_s=0.001))
    found = None
    while found is None or found.tokens != shown:
        await asyncio.sleep(0.001)
        found = await store.find(SESSION)
    watching.cancel()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_session_that_ended_and_was_read_again_is_brought_back(store: Store, is_cancelled: bool) -> None:
    """It runs no more, so what was kept of it is all that its coordinator knows of it."""
    owner = ToyCoordinator(store)
    await owner.create(SESSION)
    snapshot = await store.snapshot()
    if is_cancelled:
        owner.toys.before = Gate(8)
        async with aclosing(owner.follow(SESSION, 0, b"")) as chunks:
            shown, _ = await take_last(chunks, 8)
        await store.cancel(SESSION)
    else:
        shown = await owner.tokens(SESSION)
    assert await owner.tokens(SESSION) == shown
    watching = asyncio.create_task(owner.watch(period_s=0.001))
    await asyncio.sleep(0.05)  # it is compared, and nothing is missing
    await store.go_back(snapshot)
    while await store_tokens(store) != shown:  # noqa: ASYNC110  # a store sends no events
        await asyncio.sleep(0.001)
    watching.cancel()


async def test_session_is_brought_back_before_it_goes_on_here(store: Store) -> None:
    owner = ToyCoordinator(store)
    shown = await went_back(store, owner)
    owner.toys.before = Gate()
    assert await owner.tokens(SESSION) == await undisturbed()
    assert (await undisturbed())[: len(shown)] == shown


async def test_heartbeat_of_a_long_round_sees_what_was_lost(store: Store) -> None:
    owner = ToyCoordinator(store)
    await owner.create(SESSION)
    snapshot = await store.snapshot()
    owner.toys.before = Gate(8)
    watching = asyncio.create_task(owner.watch(period_s=0.001))
    async with aclosing(owner.follow(SESSION, 0, b"")) as chunks:
        shown, _ = await take_last(chunks, 8)
        await store.go_back(snapshot)
        with pytest.raises(UnavailableError, match="has this session again"):
            await take_last(chunks, LENGTH)
    watching.cancel()
    assert await store_tokens(store) == shown


async def test_two_texts_of_one_session_are_lost(store: Store) -> None:
    """Another coordinator goes on with other text before the first one knows: both say so from then on."""
    owner, other = ToyCoordinator(store), ToyCoordinator(store)
    shown = await went_back(store, owner)
    claimed = await store.claim(SESSION)
    diverged = replace(claimed, emitted=(*claimed.emitted, OutputToken(shown[4] ^ 1, TokenOrigin.BONUS)))
    assert await store.restore(replace(diverged, digest=chain(b"", [*PROMPT, *diverged.tokens])), claimed)
    for coordinator in (owner, other):
        with pytest.raises(DataLossError, match="begin a new session"):
            await coordinator.tokens(SESSION, 0)
    found = await store.find(SESSION)
    assert found
    assert found.status is Status.LOST
    for call in (other.read(SESSION), other.cancel(SESSION)):
        with pytest.raises(DataLossError):
            await call


async def test_epoch_of_a_healed_session_is_above_all(store: Store) -> None:
    """Also where only the epoch went back."""
    await ToyCoordinator(store).create(SESSION)
    snapshot = await store.snapshot()
    shown = replace(await store.claim(SESSION), epoch=7)
    await store.go_back(snapshot)
    assert await heal(store, shown) is Healing.HEALED
    assert (await store.read(SESSION)).epoch == 8
    assert await heal(store, shown) is Healing.CURRENT


async def test_cancelled_session_stays_cancelled(store: Store) -> None:
    owner = ToyCoordinator(store)
    shown = await went_back(store, owner)
    await store.cancel(SESSION)
    assert await owner.tokens(SESSION) == shown
    assert (await store.read(SESSION)).status is Status.CANCELLED


@pytest.mark.parametrize("ran_here", [True, False])
async def test_a_session_that_was_only_read_here_is_not_brought_back(store: Store, ran_here: bool) -> None:
    """It may have expired: only who ran it knows for how long it cannot have."""
    owner, reader = ToyCoordinator(store), ToyCoordinator(store)
    await owner.create(SESSION)
    assert await owner.tokens(SESSION) == await reader.tokens(SESSION)
    await store.redis.delete(*keys(SESSION))
    watching = asyncio.create_task((owner if ran_here else reader).watch(0.01))
    await asyncio.sleep(0.3)  # some comparisons
    while ran_here and await store.find(SESSION) is None:  # noqa: ASYNC110  # a store sends no events
        await asyncio.sleep(0.02)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert (await store.find(SESSION) is not None) == ran_here


async def test_id_that_another_request_has_is_left_alone(store: Store) -> None:
    owner = ToyCoordinator(store)
    shown = await went_back(store, owner)
    await store.redis.hset(keys(SESSION)[0], "fingerprint", b"another")
    record = replace(await store.read(SESSION), fingerprint=b"", emitted=handed(shown), epoch=9)
    assert await heal(store, record) is Healing.REPLACED
    assert (await store.read(SESSION)).status is Status.ACTIVE


# ---- clients


@pytest.mark.parametrize("is_whole", [True, False])
async def test_client_hands_back_what_the_store_lacks(store: Store, is_whole: bool) -> None:
    shown = await went_back(store, ToyCoordinator(store))
    lacking = len(shown) - len(await store_tokens(store))
    where = position(shown, None if is_whole else lacking)
    other = ToyCoordinator(store)
    async with aclosing(follow_from(other, where)) as chunks:
        rest = [token async for chunk, _ in chunks for token in tokens_of(chunk)]
    assert shown + rest == await undisturbed() == await other.stored(SESSION)


async def test_a_text_that_was_lost_whole_keeps_its_model(store: Store) -> None:
    """The store goes back to where there was no text yet, and new sessions have another model by now."""
    owner, other = ToyCoordinator(store), ToyCoordinator(store)
    await owner.create(SESSION)
    claimed = await store.claim(SESSION, ToyCapabilities.target)
    await store.release(SESSION, claimed.epoch)
    snapshot = await store.snapshot()
    owner.toys.before = Gate(8)
    async with aclosing(owner.follow(SESSION, 0, b"")) as chunks:
        shown, _ = await take_last(chunks, 8)
    await store.go_back(snapshot)
    newer: Any = other.capabilities
    newer.target_of = lambda _: replace(ToyCapabilities.target, name="newer")
    async with aclosing(follow_from(other, position(shown))) as chunks:
        rest = [token async for chunk, _ in chunks for token in tokens_of(chunk)]
    assert shown + rest == await undisturbed()
    assert (await store.read(SESSION)).model == ToyCapabilities.target


async def test_client_joins_an_owner_that_has_less(store: Store) -> None:
    """The owner goes on with what the store has; the client hands back more, and both get one text."""
    shown = await went_back(store, ToyCoordinator(store))
    other = ToyCoordinator(store)
    other.toys.before = Gate(4)
    async with aclosing(other.follow(SESSION, 0, b"")) as behind:
        await take_last(behind, 4)
        where = position(shown)
        other.toys.before = Gate()
        async with aclosing(follow_from(other, where)) as chunks:
            rest = [token async for chunk, _ in chunks for token in tokens_of(chunk)]
    assert shown + rest == await other.stored(SESSION)


@pytest.mark.parametrize("change", ["too few", "none", "others"])
async def test_client_with_proof_and_not_all_tokens_loses_the_session(store: Store, change: str) -> None:
    """It was shown more than the store has: going on would show another text."""
    shown = await went_back(store, ToyCoordinator(store))
    whole = position(shown)
    given = {"too few": handed(shown[-1:]), "none": (), "others": handed([token ^ 1 for token in shown])}[change]
    other = ToyCoordinator(store)
    with pytest.raises(DataLossError, match="begin a new session"):
        async with aclosing(follow_from(other, replace(whole, handed=given))) as chunks:
            await take_last(chunks, 1)
    with pytest.raises(DataLossError):
        await other.tokens(SESSION)


async def test_expired_session_says_so_to_who_was_shown_it(store: Store) -> None:
    await went_back(store, ToyCoordinator(store), is_empty=True)
    shown = position([1, 2])
    other = ToyCoordinator(store)
    with pytest.raises(NotFoundError, match=r"has expired.* kept for 1000 s"):
        async with aclosing(follow_from(other, shown)) as chunks:
            await take_last(chunks, 1)
    with pytest.raises(NotFoundError, match="no such session, or it has expired"):
        await other.tokens(SESSION)


async def test_client_of_an_expired_session_leaves_its_successor_alone(store: Store) -> None:
    """A name may come again, as that of a request_id, once its session has expired."""
    coordinator = ToyCoordinator(store)
    shown = await went_back(store, coordinator, is_empty=True)
    former = replace(position([token ^ 1 for token in shown]), incarnation="of the one that has expired")
    await coordinator.create(SESSION)
    with pytest.raises(NotFoundError, match="has expired"):
        async with aclosing(follow_from(coordinator, former)) as chunks:
            await take_last(chunks, 1)
    assert (await store.read(SESSION)).status is Status.ACTIVE
    assert await ToyCoordinator(store).tokens(SESSION) == await undisturbed()


async def test_client_without_proof_changes_nothing(store: Store) -> None:
    shown = await went_back(store, ToyCoordinator(store))
    other = ToyCoordinator(store)
    with pytest.raises(DataLossError, match="past the"):
        await other.tokens(SESSION, len(shown) + LENGTH, b"x" * 16)
    assert (await store.read(SESSION)).status is Status.ACTIVE


async def test_log_probabilities_cannot_be_handed_back(store: Store) -> None:
    shown = await went_back(store, ToyCoordinator(store))
    request = generation_pb2.GenerateRequest.FromString((await store.read(SESSION)).request)
    request.sampling.num_logprobs = 1
    await store.redis.hset(keys(SESSION)[0], "request", request.SerializeToString())
    assert await take_back(store, SESSION, position(shown)) is Healing.LOST


def test_proofs_are_of_one_text_of_one_session() -> None:
    ids = SessionIds(bytes(SECRET_BYTES))
    session, other = ids.of_request("tenant", "a"), ids.of_request("other", "a")
    proof = ids.proof(session, "first", 5, b"d" * 16)
    assert ids.proved(session, 5, b"d" * 16, proof) == "first"
    for wrong in ((other, 5, b"d" * 16), (session, 6, b"d" * 16), (session, 5, b"e" * 16)):
        assert ids.proved(*wrong, proof) is None
    for forged in (b"", proof[:PROOF_BYTES], proof[:PROOF_BYTES] + b"second", proof + b"x" * 100, b"\xff" * len(proof)):
        assert ids.proved(session, 5, b"d" * 16, forged) is None
    assert SessionIds(b"x" * SECRET_BYTES).proved(session, 5, b"d" * 16, proof) is None


async def test_takeover_waits_until_a_broken_store_is_settled(store: Store) -> None:
    coordinator = ToyCoordinator(store)
    await coordinator.create(SESSION)
    unbroken_s = list[float]()  # when each round began

    async def note(_: int) -> None:
        unbroken_s.append(store.unbroken_s)

    coordinator.toys.before = note
    store.client._note_break()
    assert await coordinator.tokens(SESSION) == await undisturbed()
    assert unbroken_s[0] >= SETTLED_S


async def test_a_client_that_heals_a_session_waits_for_others(store: Store) -> None:
    """They may have shown more of it than this client was: that comes first, then new text."""
    owner, other = ToyCoordinator(store), ToyCoordinator(store)
    shown = await went_back(store, owner)
    await store.claim(SESSION, owner="whoever had it at that time")
    store.client._note_break()
    async with aclosing(follow_from(other, position(shown[:-1]))) as chunks:
        rest = list[int]()
        going_on = asyncio.create_task(read_into(rest, chunks))
        while len(await store_tokens(store)) < len(shown) - 1:  # noqa: ASYNC110  # a store sends no events
            await asyncio.sleep(0)
        known = owner._shown.get(SESSION)
        assert known
        assert await heal(store, known) is Healing.HEALED
        await going_on
    assert store.unbroken_s >= SETTLED_S
    assert shown[:-1] + rest == await other.stored(SESSION)
    assert (await other.stored(SESSION))[: len(shown)] == shown


@pytest.mark.parametrize("is_followed", [False, True], ids=["at rest", "running elsewhere"])
async def test_healed_session_rests_at_coordinators_that_just_started(store: Store, is_followed: bool) -> None:
    """They have seen no connection break, and nobody but clients knows what was shown."""
    shown = await went_back(store, ToyCoordinator(store))
    first, second, third = (ToyCoordinator(store) for _ in range(3))
    first.toys.before = Gate(4)
    async with AsyncExitStack() as followers:
        if is_followed:
            behind = await followers.enter_async_context(aclosing(first.follow(SESSION, 0, b"")))
            await take_last(behind, 4)
        first.toys.before = Gate()
        parts = {coordinator: list[int]() for coordinator in (first, second, third)}
        tasks = list[asyncio.Task[None]]()
        for coordinator, offset in ((first, len(shown) - 1), (second, 4), (third, len(shown))):
            chunks = await followers.enter_async_context(aclosing(follow_from(coordinator, position(shown[:offset]))))
            tasks.append(asyncio.create_task(read_into(parts[coordinator], chunks)))
            while len(await store_tokens(store)) < offset:  # noqa: ASYNC110  # a store sends no events
                await asyncio.sleep(0)
            await asyncio.sleep(SETTLED_S / 4)
        assert await store_tokens(store) == shown, "nobody has gone on"
        await asyncio.gather(*tasks)
    text = await third.stored(SESSION)
    assert text[: len(shown)] == shown
    assert [text[-len(rest) :] for rest in parts.values()] == [*parts.values()]


@pytest.mark.parametrize("origins", [[], [1, 1, 1], [1, 77]], ids=["none", "too many", "unknown"])
def test_tokens_without_their_origins_are_refused(origins: list[int]) -> None:
    ids = SessionIds(bytes(SECRET_BYTES))
    servicer, session = GenerationServicer(ToyCoordinator(Store()), ids), ids.of_request(NO_TENANT, "a")
    request = generation_pb2.ResumeRequest(offset=2, digest=b"d" * 16, tokens=[3, 4], origins=origins)  # type: ignore[arg-type]
    assert servicer._position(session, request) == Position(2, b"d" * 16), "without a proof they are not looked at"
    request.proof = ids.proof(session, "", 2, b"d" * 16)
    with pytest.raises(InvalidArgumentError, match="origins"):
        servicer._position(session, request)
    del request.origins[:]
    request.origins.extend([generation_pb2.TOKEN_ORIGIN_ACCEPTED] * 2)
    assert servicer._position(session, request) == Position(2, b"d" * 16, handed([3, 4]))


async def test_restart_of_an_idle_redis_is_noticed() -> None:
    """The library connects again by itself: no call fails."""
    with running_redis() as server:
        store = open_store(server.url, 1000.0)
        for _ in range(2):
            await store.answers()
        assert store.unbroken_s == math.inf
        server.kill()
        server.start()
        await store.answers()
        assert store.unbroken_s < 60
        await store.close()
