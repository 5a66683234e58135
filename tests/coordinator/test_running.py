"""Followers of a running session: they see committed tokens only, and rounds stop when the last one leaves."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from itertools import count

import pytest

from coordinator.generation import Round
from coordinator.session_record import LogEnd, Status
from coordinator.sessions import Beat, SessionStore, open_store
from coordinator.stores.opening import open_redis
from specdec.errors import DataLossError, NotFoundError, OverloadedError, UnavailableError
from specdec.types import FinishReason, Statistics
from tests.support.toy_coordinator import (
    LENGTH,
    PROMPT,
    Chunks,
    Gate,
    ToyCoordinator,
    generation_tasks,
    lapse,
    read_into,
    take,
    take_last,
    tokens_of,
    until,
)


@pytest.fixture
async def store() -> AsyncIterator[SessionStore]:
    """A store that ends with nothing left running."""
    store = open_store("memory", 1000.0)
    yield store
    await store.close()
    await until(lambda: not generation_tasks())


@pytest.fixture
async def coordinator(store: SessionStore) -> ToyCoordinator:
    coordinator = ToyCoordinator(store)
    await coordinator.create("s")
    return coordinator


@pytest.fixture
async def undisturbed() -> list[int]:
    """The session's tokens without any disturbance."""
    alone = ToyCoordinator(open_store("memory", 1000.0))
    await alone.create("s")
    tokens = await alone.tokens("s")
    await alone.store.close()
    assert len(tokens) == LENGTH
    return tokens


# ---- following


async def test_a_session_pauses_for_slow_readers(
    coordinator: ToyCoordinator, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.followed.MAX_UNREAD_TOKENS", 3)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        tokens = tokens_of((await anext(chunks))[0])
        for _ in range(2000):
            await asyncio.sleep(0)
        assert len(await coordinator.stored("s")) < LENGTH, "nobody reads"
        tokens += [token async for chunk, _ in chunks for token in tokens_of(chunk)]
    assert tokens == undisturbed


async def test_one_fast_reader_is_enough(
    coordinator: ToyCoordinator, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.followed.MAX_UNREAD_TOKENS", 3)
    async with aclosing(coordinator.follow("s", 0, b"")) as slow:
        tokens = tokens_of((await anext(slow))[0])
        assert await coordinator.tokens("s") == undisturbed
        tokens += [token async for chunk, _ in slow for token in tokens_of(chunk)]
    assert tokens == undisturbed


async def test_a_paused_session_has_no_lease_and_goes_on_alone(
    coordinator: ToyCoordinator, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else followed it: the epoch stays, and its next commit leases it again."""
    monkeypatch.setattr("coordinator.followed.MAX_UNREAD_TOKENS", 3)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        tokens = tokens_of((await anext(chunks))[0])
        session = await coordinator.store.read("s")
        async with asyncio.timeout(coordinator.store.lease_s / 2):  # else it lapses by itself
            while (await coordinator.store.tail("s", LogEnd.of(session)))[0].lease_left_s:  # noqa: ASYNC110
                await asyncio.sleep(0)
        tokens += [token async for chunk, _ in chunks for token in tokens_of(chunk)]
    assert tokens == undisturbed
    assert (await coordinator.store.read("s")).epoch == 1


async def test_a_paused_session_can_be_cancelled(coordinator: ToyCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.followed.MAX_UNREAD_TOKENS", 3)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        await anext(chunks)
        for _ in range(2000):
            await asyncio.sleep(0)
        assert await coordinator.cancel("s") is Status.CANCELLED
        endings = [ending async for _, ending in chunks]
    assert endings[-1]
    assert endings[-1].reason is FinishReason.CANCELLED


async def test_a_follower_gets_what_is_committed(coordinator: ToyCoordinator) -> None:
    chunks = [entry async for entry in coordinator.follow("s", 0, b"")]
    tokens = [token for chunk, _ in chunks for token in tokens_of(chunk)]
    session = await coordinator.store.read("s")
    assert tokens == [entry.token for entry in session.emitted]
    assert [ending is None for _, ending in chunks] == [True] * (len(chunks) - 1) + [False]
    assert (chunks[-1][0].digest, session.finish) == (session.digest, FinishReason.LENGTH)
    assert [num_closed for num_closed, _ in coordinator.toys.ends] == [1, 1]


async def test_followers_share_one_generation(coordinator: ToyCoordinator, undisturbed: list[int]) -> None:
    assert await asyncio.gather(*(coordinator.tokens("s") for _ in range(3))) == [undisturbed] * 3
    assert len(coordinator.toys.scorers) == 1


async def test_a_late_follower_gets_everything(coordinator: ToyCoordinator, undisturbed: list[int]) -> None:
    coordinator.toys.before = gate = Gate(8)
    async with aclosing(coordinator.follow("s", 0, b"")) as first:
        before = await take(first, 8)
        late = asyncio.create_task(coordinator.tokens("s"))
        offset = asyncio.create_task(coordinator.tokens("s", 5))
        gate.opened.set()
        after = [token async for chunk, _ in first for token in tokens_of(chunk)]
        assert before + after == await late == undisturbed
        assert await offset == undisturbed[5:]


async def test_a_finished_session_is_replayed(coordinator: ToyCoordinator, undisturbed: list[int]) -> None:
    assert await coordinator.tokens("s") == undisturbed
    assert await coordinator.tokens("s", 10) == undisturbed[10:]
    (chunk, ending), *more = [entry async for entry in coordinator.follow("s", LENGTH, b"")]
    assert ending
    assert (tokens_of(chunk), ending.reason, more) == ([], FinishReason.LENGTH, [])
    assert len(coordinator.toys.scorers) == 1


async def test_nothing_uncommitted_is_seen(coordinator: ToyCoordinator) -> None:
    """Each chunk is compared with the store's log."""
    seen: list[int] = []
    async for chunk, _ in coordinator.follow("s", 0, b""):
        seen += tokens_of(chunk)
        assert (await coordinator.stored("s"))[: len(seen)] == seen


class LosingStore(SessionStore):
    """A store that is unavailable from one length on, before or after it committed."""

    fail_from = 0

    async def commit(self, session_id: str, epoch: int, step: Round, statistics: Statistics) -> None:
        if step.base_length - len(PROMPT) >= self.fail_from:
            raise UnavailableError("the store is gone")
        await super().commit(session_id, epoch, step, statistics)


async def test_tokens_whose_commit_failed_are_never_seen() -> None:
    losing = LosingStore(open_redis("memory"), 1000.0)
    losing.fail_from = 9
    coordinator = ToyCoordinator(losing)
    await coordinator.create("s")
    seen: list[int] = []
    with pytest.raises(UnavailableError):
        await read_into(seen, coordinator.follow("s", 0, b""))
    assert seen == await coordinator.stored("s")
    assert 9 <= len(seen) < LENGTH


# ---- leaving and coming back


async def test_the_last_follower_to_leave_pauses_it(coordinator: ToyCoordinator) -> None:
    coordinator.toys.before = Gate(8)
    chunks = coordinator.follow("s", 0, b"")
    await take(chunks, 8)
    await chunks.aclose()
    assert generation_tasks() == []
    # abandoned, not closed: the workers keep their caches for the coordinator that resumes it
    assert coordinator.toys.ends == [(0, 1), (0, 1)]
    assert len(coordinator.running) == 0
    assert (await coordinator.store.read("s")).status is Status.ACTIVE


async def test_it_continues_while_one_follower_stays(coordinator: ToyCoordinator, undisturbed: list[int]) -> None:
    coordinator.toys.before = gate = Gate(8)
    first, second = coordinator.follow("s", 0, b""), coordinator.follow("s", 0, b"")
    await take(first, 8)
    begun = await take(second, 8)
    await first.aclose()
    gate.opened.set()
    assert begun + [token async for chunk, _ in second for token in tokens_of(chunk)] == undisturbed
    assert len(coordinator.toys.scorers) == 1


@pytest.mark.parametrize("length", [1, 7, 20])
async def test_a_resumed_session_continues_as_if_undisturbed(
    coordinator: ToyCoordinator, undisturbed: list[int], length: int
) -> None:
    coordinator.toys.before = Gate(length)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        tokens, chunk = await take_last(chunks, length)
    coordinator.toys.before = Gate()
    assert tokens + await coordinator.tokens("s", len(tokens), chunk.digest) == undisturbed
    assert (await coordinator.store.read("s")).epoch == 2


async def test_clients_ahead_of_the_store_get_data_loss(coordinator: ToyCoordinator) -> None:
    await coordinator.tokens("s")
    with pytest.raises(DataLossError, match="past the 24"):
        await coordinator.tokens("s", LENGTH + 1)
    with pytest.raises(DataLossError, match="other tokens"):
        await coordinator.tokens("s", 5, b"x" * 16)
    assert len(coordinator.running) == 0


async def test_an_unknown_session_is_not_found(coordinator: ToyCoordinator) -> None:
    for _ in range(2):
        with pytest.raises(NotFoundError):
            await coordinator.tokens("unknown")
    assert len(coordinator.running) == 0


async def test_only_new_sessions_are_refused_when_full(store: SessionStore) -> None:
    coordinator = ToyCoordinator(store, maximum=1)
    await coordinator.create("s")
    await coordinator.create("other")
    coordinator.toys.before = gate = Gate(4)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        await take(chunks, 4)
        with pytest.raises(OverloadedError, match="1 sessions"):
            await coordinator.tokens("other")
        following = asyncio.create_task(coordinator.tokens("s"))
        gate.opened.set()
        assert len(await following) == LENGTH
    assert len(await coordinator.tokens("other")) == LENGTH


# ---- ends from outside


async def ended_cancelled(coordinator: ToyCoordinator, seen: list[int], chunks: Chunks) -> None:
    """Read a cancelled session to its end, and compare it with the store."""
    rest = [entry async for entry in chunks]
    assert rest[-1][1]
    assert rest[-1][1].reason is FinishReason.CANCELLED
    seen += [token for chunk, _ in rest for token in tokens_of(chunk)]
    assert seen == await coordinator.stored("s") == await coordinator.tokens("s")


async def test_a_commit_learns_of_a_cancellation(coordinator: ToyCoordinator) -> None:
    coordinator.toys.before = gate = Gate(8)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        seen = await take(chunks, 8)
        assert await coordinator.store.cancel("s") is Status.CANCELLED
        gate.opened.set()
        await ended_cancelled(coordinator, seen, chunks)
    assert coordinator.toys.scorers[0].num_closed == 1


async def test_cancelling_at_the_owner_ends_the_round(coordinator: ToyCoordinator) -> None:
    """A round that would never end by itself; the worker streams are closed."""
    coordinator.toys.before = Gate(8)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        seen = await take(chunks, 8)
        assert await coordinator.cancel("s") is Status.CANCELLED
        await ended_cancelled(coordinator, seen, chunks)
    assert [num_closed for num_closed, _ in coordinator.toys.ends] == [1, 1]


async def test_cancelling_elsewhere_ends_the_round(coordinator: ToyCoordinator) -> None:
    coordinator.toys.before = Gate(8)
    watching = asyncio.create_task(coordinator.watch(period_s=0.001))
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        seen = await take(chunks, 8)
        assert await ToyCoordinator(coordinator.store).cancel("s") is Status.CANCELLED
        await ended_cancelled(coordinator, seen, chunks)
    assert coordinator.toys.scorers[0].num_closed == 1
    watching.cancel()


async def test_a_failed_heartbeat_does_not_end_the_heartbeats(
    coordinator: ToyCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.toys.before = Gate(8)
    heartbeats, num_calls = SessionStore.heartbeats, count()

    async def failing_at_first(store: SessionStore, beats: Sequence[Beat]) -> list[Exception | None]:
        if next(num_calls) < 3:
            raise TypeError("a bug")
        return await heartbeats(store, beats)

    monkeypatch.setattr(SessionStore, "heartbeats", failing_at_first)
    watching = asyncio.create_task(coordinator.watch(period_s=0.001))
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        seen = await take(chunks, 8)
        assert await ToyCoordinator(coordinator.store).cancel("s") is Status.CANCELLED
        await asyncio.wait_for(ended_cancelled(coordinator, seen, chunks), 30)
    watching.cancel()


async def test_a_takeover_ends_the_former_owners_round(coordinator: ToyCoordinator, undisturbed: list[int]) -> None:
    """Its followers go on with what the new owner commits."""
    coordinator.toys.before = Gate(8)
    watching = asyncio.create_task(coordinator.watch(period_s=0.001))
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        seen = await take(chunks, 8)
        await lapse(coordinator.store)
        assert await ToyCoordinator(coordinator.store).tokens("s") == undisturbed
        await read_into(seen, chunks)
    assert seen == undisturbed
    assert [(each.num_closed, each.num_abandoned) for each in coordinator.toys.scorers] == [(0, 1)]
    watching.cancel()


async def test_a_takeover_fences_the_former_owner(coordinator: ToyCoordinator, undisturbed: list[int]) -> None:
    coordinator.toys.before = gate = Gate(8)
    other = ToyCoordinator(coordinator.store)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        seen = await take(chunks, 8)
        await lapse(coordinator.store)
        taken_over = asyncio.create_task(other.tokens("s"))
        await until(lambda: bool(other.toys.scorers))
        gate.opened.set()
        await read_into(seen, chunks)
    assert await taken_over == seen == undisturbed
    assert (await coordinator.store.read("s")).epoch == 2


async def fail(length: int) -> None:
    raise UnavailableError("no target worker")


async def test_new_followers_do_not_join_a_failed_generation(
    coordinator: ToyCoordinator, undisturbed: list[int]
) -> None:
    """A follower that does not read keeps the failed entry, but does not block new ones."""
    coordinator.toys.before = fail
    async with coordinator.running.attach("s", lambda: coordinator.start("s")) as failing:
        await until(lambda: failing.has_failed)
        coordinator.toys.before = Gate()
        assert await coordinator.tokens("s") == undisturbed
    assert len(coordinator.running) == 0


async def test_leaving_a_failed_generation_spares_its_successor(coordinator: ToyCoordinator) -> None:
    coordinator.toys.before = fail
    async with AsyncExitStack() as slow:
        failing = await slow.enter_async_context(coordinator.running.attach("s", lambda: coordinator.start("s")))
        await until(lambda: failing.has_failed)
        coordinator.toys.before = gate = Gate(4)
        async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
            await take(chunks, 4)
            await slow.aclose()
            following = asyncio.create_task(coordinator.tokens("s"))
            gate.opened.set()
            assert len(await following) == LENGTH
    assert len(coordinator.toys.scorers) == 2


async def test_stopping_ends_the_followers(coordinator: ToyCoordinator) -> None:
    coordinator.toys.before = Gate(8)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        await take(chunks, 8)
        await coordinator.running.stop()
        with pytest.raises(UnavailableError, match="resume"):
            await read_into([], chunks)
    assert generation_tasks() == []


async def test_an_unexpected_error_reaches_the_follower(coordinator: ToyCoordinator) -> None:
    async def fail(length: int) -> None:
        raise KeyError(length)

    coordinator.toys.before = fail
    with pytest.raises(KeyError):
        await coordinator.tokens("s")


# ---- races


async def test_joining_as_the_last_follower_leaves_continues(
    coordinator: ToyCoordinator, undisturbed: list[int]
) -> None:
    """In the same event-loop turn in which the count becomes 0."""
    coordinator.toys.before = Gate(8)
    leaving = coordinator.follow("s", 0, b"")
    await take(leaving, 8)
    coordinator.toys.before = Gate()
    closing = asyncio.create_task(leaving.aclose())
    joining = asyncio.create_task(coordinator.tokens("s"))
    await closing
    assert await joining == undisturbed


@pytest.mark.parametrize("seed", range(6))
async def test_followers_may_come_and_go_at_any_time(store: SessionStore, undisturbed: list[int], seed: int) -> None:
    """Two coordinators, followers that leave at odd moments: each sees a prefix, and the log is never doubled."""
    coordinators = [ToyCoordinator(store), ToyCoordinator(store)]
    await coordinators[0].create("s")

    async def visit(number: int) -> None:
        """Follow for some turns of the event loop, leave, and return at the same offset."""
        seen: list[int] = []
        coordinator = coordinators[(number + seed) % 2]
        for stay in (1 + number + seed, 3 * number, 40):
            async with aclosing(coordinator.follow("s", len(seen), b"")) as chunks:
                for _ in range(stay):
                    chunk, ending = await anext(chunks)
                    assert chunk.offset == len(seen)
                    seen += tokens_of(chunk)
                    if ending:
                        break
            assert seen == undisturbed[: len(seen)]

    await asyncio.gather(*(visit(number) for number in range(6)))
    assert generation_tasks() == []
    assert await coordinators[0].tokens("s") == undisturbed == await coordinators[0].stored("s")
    assert all(len(coordinator.running) == 0 for coordinator in coordinators)


@pytest.mark.parametrize("turns", range(12))
async def test_a_handler_may_be_cancelled_at_any_moment(
    coordinator: ToyCoordinator, undisturbed: list[int], turns: int
) -> None:
    handler = asyncio.create_task(coordinator.tokens("s"))
    for _ in range(turns * turns):
        await asyncio.sleep(0)
    handler.cancel()
    await asyncio.gather(handler, return_exceptions=True)
    await until(lambda: not generation_tasks() and not len(coordinator.running))
    assert await coordinator.tokens("s") == undisturbed


async def test_an_ended_session_leaves_room_before_it_is_read(store: SessionStore) -> None:
    coordinator = ToyCoordinator(store, maximum=1)
    for name in ("unread", "next"):
        await coordinator.create(name)
    async with aclosing(coordinator.follow("unread", 0, b"")) as unread:
        await take(unread, 1)
        with pytest.raises(OverloadedError):
            await coordinator.tokens("next")
        await until(lambda: not generation_tasks())
        assert len(await coordinator.tokens("next")) == LENGTH
        assert [tokens_of(chunk) async for chunk, _ in unread]
