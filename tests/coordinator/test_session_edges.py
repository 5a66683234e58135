"""Sessions at their ends, and at the edges of two things that happen at once: what expired stays away, nobody waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from coordinator.detached import DetachedRule
from coordinator.healing import Healing, heal
from coordinator.session_record import Status
from coordinator.sessions import SessionStore, open_store
from specdec.errors import FencedError, UnavailableError
from specdec.types import DetachedPolicy
from tests.support.toy_coordinator import Gate, ToyCoordinator, take

CANCELLING = DetachedRule(DetachedPolicy.CANCEL, 0.1)


@asynccontextmanager
async def running(coordinator: ToyCoordinator, store: SessionStore) -> AsyncIterator[None]:
    """Do the upkeep of a coordinator while the context lasts; close the store after it."""
    watching = asyncio.create_task(coordinator.watch(0.05))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await store.close()


async def test_a_name_that_is_used_again_belongs_to_the_new_session() -> None:
    """Whoever has shown other text of the former one neither brings that back, nor marks the new one as lost."""
    store = open_store("memory", 1000.0)
    coordinator = ToyCoordinator(store)
    await coordinator.create("s")
    await coordinator.tokens("s")
    session = await store.read("s")
    others = (replace(session.emitted[0], token=session.emitted[0].token ^ 1), *session.emitted[1:])
    former = replace(session, incarnation="former", emitted=others, epoch=session.epoch + 7)
    assert await heal(store, former) is Healing.REPLACED
    assert await store.read("s") == session
    await store.close()


async def test_a_worker_that_always_says_fenced_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.fences.MAX_FENCES", 3)
    store = open_store("memory", 1000.0)
    coordinator = ToyCoordinator(store)
    await coordinator.create("s")

    async def fence(number: int) -> None:
        raise FencedError("the session is at epoch 99")

    coordinator.toys.before = fence
    with pytest.raises(UnavailableError, match="found no owner after 3 attempts; resume it"):
        await coordinator.tokens("s")
    assert (await store.read("s")).epoch == 4
    await store.close()


class Held:
    """A call of the store whose reply is held back."""

    def __init__(self, store: SessionStore, name: str) -> None:
        self._call = getattr(store, name)
        self.done, self.released = asyncio.Event(), asyncio.Event()
        setattr(store, name, self)

    async def __call__(self, *arguments: Any) -> Any:
        reply = await self._call(*arguments)
        self.done.set()
        await self.released.wait()
        return reply


async def test_a_cancellation_in_the_turn_of_the_claim_is_seen() -> None:
    """The replies of both come in one turn of the loop, before the rounds' task has begun."""
    store = open_store("memory", 1000.0)
    coordinator = ToyCoordinator(store)
    await coordinator.create("s")
    claim = Held(store, "claim")
    following = asyncio.create_task(coordinator.tokens("s"))
    await claim.done.wait()
    cancel = Held(store, "cancel")
    cancelling = asyncio.create_task(coordinator.cancel("s"))
    await cancel.done.wait()
    claim.released.set()
    cancel.released.set()
    assert await cancelling is Status.CANCELLED
    async with asyncio.timeout(10.0):
        assert await following == []
    await store.close()


async def test_a_session_that_is_to_be_cancelled_is_so_once_the_store_answers() -> None:
    store = open_store("memory", 1000.0)
    coordinator = ToyCoordinator(store, detached=CANCELLING)
    await coordinator.create("s")
    coordinator.toys.before = Gate(4)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        await take(chunks, 4)
    cancel, is_away = store.cancel, True

    async def cancel_later(*arguments: Any) -> Any:
        if is_away:
            raise UnavailableError("the store is away")
        return await cancel(*arguments)

    store.cancel = cancel_later  # type: ignore[assignment, method-assign]  # a store that is away for a while
    async with running(coordinator, store):
        await asyncio.sleep(0.5)
        is_away = False
        await until_cancelled(store)


async def test_a_client_that_leaves_during_the_claim_has_left() -> None:
    store = open_store("memory", 1000.0)
    coordinator = ToyCoordinator(store, detached=CANCELLING)
    await coordinator.create("s")
    claim = Held(store, "claim")
    following = asyncio.create_task(coordinator.tokens("s"))
    await claim.done.wait()
    following.cancel()
    await asyncio.sleep(0)
    claim.released.set()
    await asyncio.gather(following, return_exceptions=True)
    async with running(coordinator, store):
        await until_cancelled(store)


async def test_no_cancellation_is_lost_between_two_calls_of_the_store() -> None:
    store = open_store("memory", 1000.0)
    coordinator = ToyCoordinator(store)
    await coordinator.create("s")
    await coordinator.tokens("s")
    for num_turns in range(100):
        watching = asyncio.create_task(coordinator.watch(0.0))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        watching.cancel()
        async with asyncio.timeout(20.0):
            await asyncio.wait([watching])
    await store.close()


async def until_cancelled(store: SessionStore) -> None:
    async with asyncio.timeout(10.0):
        while (await store.read("s")).status is not Status.CANCELLED:  # noqa: ASYNC110  # a store sends no events
            await asyncio.sleep(0.02)
