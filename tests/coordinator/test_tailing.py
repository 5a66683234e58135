"""Two coordinators over one store: one owns a session, the other one reads its log, and takes over once it may.

Leases last longer than any test, so that nothing but a release lets them end.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from coordinator.running import RunningGeneration
from coordinator.session_record import Status
from coordinator.sessions import SessionStore, open_store
from coordinator.tailing import FIRST_PAUSE_S, TailedGeneration
from specdec.errors import DataLossError, UnavailableError
from specdec.types import FinishReason
from tests.support.toy_coordinator import (
    LENGTH,
    Gate,
    ToyCoordinator,
    generation_tasks,
    read_into,
    take,
    take_last,
    tokens_of,
    until,
)

LEASE_S = 300.0
RELEASE = "coordinator.sessions.SessionStore.release"


@pytest.fixture
async def store() -> AsyncIterator[SessionStore]:
    """A store that ends with nothing left running."""
    store = open_store("memory", 1000.0, lease_s=LEASE_S)
    yield store
    await store.close()
    await until(lambda: not generation_tasks())
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("tail")]


@pytest.fixture
async def owner(store: SessionStore) -> ToyCoordinator:
    owner = ToyCoordinator(store)
    await owner.create("s")
    return owner


@pytest.fixture
async def undisturbed() -> list[int]:
    """The session's tokens without any disturbance."""
    alone = ToyCoordinator(open_store("memory", 1000.0))
    await alone.create("s")
    tokens = await alone.tokens("s")
    await alone.store.close()
    return tokens


async def test_followers_at_two_coordinators_share_one_owner(owner: ToyCoordinator, undisturbed: list[int]) -> None:
    other = ToyCoordinator(owner.store)
    owner.toys.before = gate = Gate(8)
    async with aclosing(owner.follow("s", 0, b"")) as chunks, aclosing(other.follow("s", 0, b"")) as elsewhere:
        seen, tailed = await take(chunks, 8), await take(elsewhere, 8)
        gate.opened.set()
        await asyncio.gather(read_into(seen, chunks), read_into(tailed, elsewhere))
    assert seen == tailed == undisturbed
    assert (await owner.store.read("s")).epoch == 1
    assert other.toys.scorers == []


async def test_tail_ends_as_the_session_does(owner: ToyCoordinator) -> None:
    """Text, digest, reason and usage are what the owner's followers get."""
    other = ToyCoordinator(owner.store)
    owner.toys.before = gate = Gate(4)
    async with aclosing(owner.follow("s", 0, b"")) as chunks, aclosing(other.follow("s", 0, b"")) as elsewhere:
        parts = [[await anext(chunks)], [await anext(elsewhere)]]
        gate.opened.set()
        for part, rest in zip(parts, (chunks, elsewhere), strict=True):
            part += [entry async for entry in rest]
    texts = ["".join(chunk.text for chunk, _ in part) for part in parts]
    ends = [(part[-1][0].digest, part[-1][1] and part[-1][1].reason) for part in parts]
    assert texts[0] == texts[1]
    assert ends[0] == ends[1]
    assert ends[0][1] is FinishReason.LENGTH


async def test_nothing_uncommitted_is_tailed(owner: ToyCoordinator) -> None:
    other = ToyCoordinator(owner.store)
    async with aclosing(owner.follow("s", 0, b"")) as chunks:
        await anext(chunks)
        following = asyncio.create_task(read_into([], chunks))
        seen: list[int] = []
        async for chunk, _ in other.follow("s", 0, b""):
            seen += tokens_of(chunk)
            assert seen == (await other.stored("s"))[: len(seen)]
        await following
    assert len(seen) == LENGTH


async def test_tail_takes_over_once_the_owners_followers_have_left(
    owner: ToyCoordinator, undisturbed: list[int]
) -> None:
    other = ToyCoordinator(owner.store)
    owner.toys.before = Gate(8)
    async with aclosing(other.follow("s", 0, b"")) as elsewhere:
        async with aclosing(owner.follow("s", 0, b"")) as chunks:
            await take(chunks, 8)
            seen = await take(elsewhere, 8)
        await read_into(seen, elsewhere)
    assert seen == undisturbed
    assert (await owner.store.read("s")).epoch == 2


async def test_stopping_coordinator_hands_its_sessions_over(owner: ToyCoordinator, undisturbed: list[int]) -> None:
    """At once: nobody waits for the end of a lease."""
    other = ToyCoordinator(owner.store)
    owner.toys.before = Gate(8)
    async with aclosing(owner.follow("s", 0, b"")) as chunks:
        seen, last = await take_last(chunks, 8)
        await owner.running.stop()
        with pytest.raises(UnavailableError, match="resume"):
            await anext(chunks)
        assert seen + await other.tokens("s", len(seen), last.digest) == undisturbed
    assert (await owner.store.read("s")).epoch == 2


async def test_failed_start_keeps_nobody_away(owner: ToyCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: object) -> None:
        raise UnavailableError("no tokenizer")

    monkeypatch.setattr(owner.capabilities, "check_tokenizer", fail)
    with pytest.raises(UnavailableError, match="no tokenizer"):
        await owner.tokens("s")
    assert len(await ToyCoordinator(owner.store).tokens("s")) == LENGTH


async def test_a_fast_follower_elsewhere_does_not_wait_for_a_slow_one_at_the_owner(
    owner: ToyCoordinator, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner pauses without a lease; who reads on claims the session, and the slow one gets the rest of it."""
    monkeypatch.setattr("coordinator.followed.MAX_UNREAD_TOKENS", 3)
    other = ToyCoordinator(owner.store)
    async with aclosing(owner.follow("s", 0, b"")) as slow:
        seen = await take(slow, 1)
        assert await other.tokens("s") == undisturbed
        await read_into(seen, slow)
    assert seen == undisturbed
    assert (await owner.store.read("s")).epoch == 2


async def test_slow_followers_do_not_take_a_session_from_each_other(
    owner: ToyCoordinator, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.followed.MAX_UNREAD_TOKENS", 3)
    monkeypatch.setattr("coordinator.tailing.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("coordinator.tailing.MAX_PAUSE_S", 0.01)
    other = ToyCoordinator(owner.store)
    owner.toys.before = gate = Gate(4)
    async with aclosing(owner.follow("s", 0, b"")) as one, aclosing(other.follow("s", 0, b"")) as two:
        await take(one, 4)
        tailed = await take(two, 4)
        gate.opened.set()
        await asyncio.sleep(0.5)  # some fifty looks at a session that nobody has the lease of
        assert (await owner.store.read("s")).epoch == 1
        await read_into(tailed, two)
    assert tailed == undisturbed
    assert (await owner.store.read("s")).epoch == 2


@pytest.mark.parametrize("canceller", ["owner", "other"])
async def test_cancelling_ends_every_follower(owner: ToyCoordinator, canceller: str) -> None:
    other = ToyCoordinator(owner.store)
    owner.toys.before = Gate(8)
    watching = asyncio.create_task(owner.watch(period_s=0.001))
    async with aclosing(owner.follow("s", 0, b"")) as chunks, aclosing(other.follow("s", 0, b"")) as elsewhere:
        num_tokens = len(await take(chunks, 8))
        await take(elsewhere, num_tokens)
        assert await {"owner": owner, "other": other}[canceller].cancel("s") is Status.CANCELLED
        for rest in (chunks, elsewhere):
            ending = [ending async for _, ending in rest][-1]
            assert ending
            assert (ending.reason, ending.num_completion_tokens) == (FinishReason.CANCELLED, num_tokens)
    watching.cancel()


async def test_tail_begins_anywhere(owner: ToyCoordinator, undisturbed: list[int]) -> None:
    """Also past what this coordinator has read, as of a client that comes from the owner."""
    other = ToyCoordinator(owner.store)
    owner.toys.before = gate = Gate(8)
    async with aclosing(other.follow("s", 0, b"")) as early, aclosing(owner.follow("s", 0, b"")) as chunks:
        reading = asyncio.create_task(anext(early))
        seen, chunk = await take_last(chunks, 8)
        late = asyncio.create_task(other.tokens("s", len(seen), chunk.digest))
        await reading
        with pytest.raises(DataLossError, match="other tokens"):
            await other.tokens("s", len(seen), b"x" * 16)
        with pytest.raises(DataLossError, match="past the"):
            await other.tokens("s", LENGTH + 1)
        gate.opened.set()
        await read_into([], chunks)
        assert await late == undisturbed[len(seen) :]


async def test_who_runs_and_who_tails(owner: ToyCoordinator) -> None:
    other = ToyCoordinator(owner.store)
    owner.toys.before = Gate(8)
    async with aclosing(owner.follow("s", 0, b"")) as chunks, aclosing(other.follow("s", 0, b"")) as elsewhere:
        await take(chunks, 8)
        await take(elsewhere, 8)
        assert isinstance(owner.running.get("s"), RunningGeneration)
        assert isinstance(other.running.get("s"), TailedGeneration)
        assert (len(owner.running.silent(0.0)), len(other.running.silent(0.0))) == (1, 0), "whose lease is renewed"
        assert len(other.running) == 1
    assert len(other.running) == len(owner.running) == 0


async def test_tails_read_a_few_times_a_second(owner: ToyCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses grow while there is no news; a lease that ends soon is looked at when it ends."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def pausing(seconds: float) -> None:
        pauses.extend([seconds] if seconds else [])  # without: other waits of the test
        await sleep(0)

    other = ToyCoordinator(owner.store)
    owner.toys.before = Gate(8)
    async with aclosing(owner.follow("s", 0, b"")) as chunks, aclosing(other.follow("s", 0, b"")) as elsewhere:
        await take(chunks, 8)
        await take(elsewhere, 8)
        monkeypatch.setattr("coordinator.tailing.asyncio.sleep", pausing)
        while len(pauses) <= 20:  # only the test's time-out limits the wait
            await sleep(0.001)
        monkeypatch.undo()
        assert FIRST_PAUSE_S <= min(pauses) <= max(pauses) == pauses[-1] == 0.5
