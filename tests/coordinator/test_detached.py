"""What becomes of a session that no client follows any more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from coordinator import requests
from coordinator.detached import DetachedRule, DetachedSessions
from coordinator.session_record import Status
from coordinator.sessions import SessionStore, open_store
from specdec.errors import InvalidArgumentError
from specdec.request import generate_request, prompt_request
from specdec.types import DetachedPolicy
from specdec.v1 import generation_pb2
from tests.support.toy_coordinator import LENGTH, Gate, ToyCoordinator, generation_tasks, take, until

PARK, FINISH, CANCEL = DetachedPolicy


@pytest.fixture
async def store() -> AsyncIterator[SessionStore]:
    """A store that ends with nothing left running."""
    store = open_store("memory", 1000.0)
    yield store
    await until(lambda: not generation_tasks())
    await store.close()


async def left_at(coordinator: ToyCoordinator, num_tokens: int) -> int:
    """Follow a session to so many tokens or more, where its rounds wait; then leave it, and let rounds go on.

    Return how many tokens there were.
    """
    coordinator.toys.before = gate = Gate(num_tokens)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        left = len(await take(chunks, num_tokens))
    gate.opened.set()
    return left


async def until_status(store: SessionStore, status: Status) -> None:
    while (await store.read("s")).status is not status:  # noqa: ASYNC110  # only the test's time-out limits the wait
        await asyncio.sleep(0.001)


async def test_parked_session_waits_for_a_client(store: SessionStore) -> None:
    """The default: it goes on where it was when somebody resumes it."""
    coordinator = ToyCoordinator(store)
    await coordinator.create("s")
    left = await left_at(coordinator, 8)
    assert generation_tasks() == []
    session = await store.read("s")
    assert (session.status, len(session.emitted)) == (Status.ACTIVE, left)
    assert len(await coordinator.tokens("s", left)) == LENGTH - left


@pytest.mark.parametrize("by_request", [False, True])
async def test_session_is_finished_without_clients(store: SessionStore, by_request: bool) -> None:
    """As the operator says, or as its request does, which is heard first."""
    rule = DetachedRule(CANCEL, 0.0) if by_request else DetachedRule(FINISH)
    coordinator = ToyCoordinator(store, detached=rule)
    await coordinator.create("s", FINISH.value if by_request else 0)
    await left_at(coordinator, 8)
    await until_status(store, Status.FINISHED)
    await until(lambda: not len(coordinator.running))
    session = await store.read("s")
    assert (session.epoch, len(session.emitted)) == (1, LENGTH)


@pytest.mark.parametrize("turns", range(8))
async def test_session_is_finished_however_soon_its_client_leaves(store: SessionStore, turns: int) -> None:
    coordinator = ToyCoordinator(store, detached=DetachedRule(FINISH))
    await coordinator.create("s")
    following = asyncio.create_task(coordinator.tokens("s"))
    for _ in range(1 + turns):
        await asyncio.sleep(0)
    following.cancel()
    await until_status(store, Status.FINISHED)
    await until(lambda: not len(coordinator.running))


async def test_finishing_session_ends_with_its_coordinator(store: SessionStore) -> None:
    """It waits in the store for a client, at any coordinator."""
    coordinator = ToyCoordinator(store, detached=DetachedRule(FINISH))
    await coordinator.create("s")
    coordinator.toys.before = Gate(8)
    async with aclosing(coordinator.follow("s", 0, b"")) as chunks:
        await take(chunks, 8)
    await coordinator.running.stop()
    assert generation_tasks() == []
    assert len(await ToyCoordinator(store).tokens("s", 8)) == LENGTH - 8


async def test_session_is_cancelled_without_clients(store: SessionStore) -> None:
    coordinator = ToyCoordinator(store, detached=DetachedRule(CANCEL, patience_s=0.0))
    await coordinator.create("s")
    left = await left_at(coordinator, 8)
    watching = asyncio.create_task(coordinator.watch(period_s=0.001))
    await until_status(store, Status.CANCELLED)
    watching.cancel()
    assert len((await store.read("s")).emitted) == left


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_session_whose_client_came_back_is_not_cancelled(
    store: SessionStore, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, or at another coordinator."""
    ended, cancel = asyncio.Event(), SessionStore.cancel

    async def noted(store: SessionStore, session_id: str, at_epoch: int | None = None) -> Status:
        status = await cancel(store, session_id, at_epoch)
        ended.set()
        return status

    monkeypatch.setattr(SessionStore, "cancel", noted)
    coordinator = ToyCoordinator(store, detached=DetachedRule(CANCEL, patience_s=0.0))
    await coordinator.create("s")
    left = await left_at(coordinator, 8)
    back = ToyCoordinator(store) if elsewhere else coordinator
    back.toys.before = gate = Gate(16)
    async with aclosing(back.follow("s", left, b"")) as chunks:
        tokens = await take(chunks, 16 - left)
        watching = asyncio.create_task(coordinator.watch(period_s=0.001))
        await ended.wait()
        watching.cancel()
        assert (await store.read("s")).status is Status.ACTIVE
        gate.opened.set()
        tokens += [entry.token async for chunk, _ in chunks for entry in chunk.emitted]
    assert len(tokens) == LENGTH - left


async def test_finished_session_is_left_alone(store: SessionStore) -> None:
    coordinator = ToyCoordinator(store, detached=DetachedRule(CANCEL, patience_s=0.0))
    await coordinator.create("s")
    await coordinator.tokens("s")
    assert coordinator._detached.due(1e9) == []


def test_sessions_are_due_once_their_time_is_over() -> None:
    sessions = DetachedSessions(patience_s=30.0)
    sessions.add("a", 1, 100.0)
    sessions.add("b", 2, 110.0)
    assert [sessions.due(now_s) for now_s in (129.9, 130.0, 200.0)] == [[], [("a", 1)], [("b", 2)]]


# ---- in requests


@pytest.mark.parametrize("policy", [None, *DetachedPolicy])
def test_request_says_the_policy(policy: DetachedPolicy | None) -> None:
    request = generate_request(prompt_request("Once", None), None, None, "id", policy)
    assert requests.detached_policy(request) is policy


def test_policy_that_is_not_known_is_refused() -> None:
    unknown = generation_pb2.DetachedPolicy.ValueType(77)
    with pytest.raises(InvalidArgumentError, match="when_detached"):
        requests.detached_policy(generation_pb2.GenerateRequest(when_detached=unknown))
    with pytest.raises(InvalidArgumentError, match="give a DetachedPolicy"):
        generate_request(prompt_request("Once", None), None, None, "id", "park")  # type: ignore[arg-type]
