"""Followers of a running session: all see the committed tokens, nobody sees more, and nothing stays when all left."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from coordinator.draft_length import Costs, DraftLength
from coordinator.generation import Chunk, Generation, Limits, Round, chain
from coordinator.redis_client import open_redis
from coordinator.running import RunningGeneration, RunningGenerations, WorkerHandles
from coordinator.sessions import SessionStore, Status, open_store
from coordinator.target import Scored
from specdec.errors import DataLoss, Fenced, NotFound, Overloaded, Unavailable
from specdec.exact.values import Proposal
from specdec.types import FinishReason, SamplingParams, Statistics
from tests.support.toys import NoText, ToyDrafter, ToyModel, ToyScorer, markov_logits

SEED = 11
LENGTH = 24
PROMPT = (1,)
SAMPLING = SamplingParams(seed=SEED, max_new_tokens=LENGTH)
MAX_TURNS = 100_000  # of the event loop: what has not happened by then waits for itself


class Drafter(ToyDrafter):
    """A toy that counts its ends."""

    num_closed = num_dropped = 0

    async def close(self) -> None:
        self.num_closed += 1

    def drop(self) -> None:
        self.num_dropped += 1


class Scorer(ToyScorer):
    """A toy that counts its ends, and waits or fails where the test says."""

    num_closed = num_dropped = 0
    before: Callable[[int], Any]

    async def score(self, committed: list[int], proposal: Proposal) -> Scored:
        await self.before(len(committed) - len(PROMPT))
        return await super().score(committed, proposal)

    async def close(self) -> None:
        self.num_closed += 1

    def drop(self) -> None:
        self.num_dropped += 1


class Gate:
    """Lets rounds pass that begin before `limit` completion tokens, and the others when it is opened."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.opened = limit, asyncio.Event()

    async def __call__(self, length: int) -> None:
        if self.limit is not None and length >= self.limit:
            await self.opened.wait()
        await asyncio.sleep(0)


class Coordinator:
    """A coordinator of toys over a store; two over one store are two coordinators."""

    def __init__(self, store: SessionStore, most: int = 8) -> None:
        self.store, self.running = store, RunningGenerations(most)
        self.before: Callable[[int], Any] = Gate()
        self.teams: list[WorkerHandles] = []
        self.claimed: list[RunningGeneration] = []

    async def create(self, session_id: str) -> None:
        await self.store.create(session_id, b"", b"", PROMPT, chain(b"", PROMPT))

    async def revive(self, session_id: str) -> RunningGeneration:
        session = await self.store.claim(session_id)
        generation = Generation(
            session.prompt,
            SAMPLING,
            Limits(LENGTH, 1000),
            NoText(),
            emitted=list(session.emitted),
            finish=session.finish,
            statistics=session.statistics,
        )
        live = RunningGeneration(session, generation, self.store)
        self.claimed.append(live)
        if session.status is Status.ACTIVE:
            live.start(self.team())
        return live

    def team(self) -> WorkerHandles:
        scorer = Scorer(ToyModel(markov_logits(1), SAMPLING, prompt=PROMPT), SEED)
        scorer.before = self.before
        drafter = Drafter(ToyModel(markov_logits(2), SAMPLING, prompt=PROMPT), SEED)
        self.teams.append(WorkerHandles(scorer, drafter, DraftLength(Costs(), 8, fixed=3)))  # type: ignore[arg-type]
        return self.teams[-1]

    async def follow(self, session_id: str, offset: int = 0, digest: bytes = b"") -> AsyncIterator[tuple[Chunk, bool]]:
        """What a handler does."""
        async with (
            self.running.attach(session_id, lambda: self.revive(session_id)) as live,
            aclosing(live.follow(offset, digest)) as chunks,
        ):
            async for chunk, last in chunks:
                yield chunk, last

    async def tokens(self, session_id: str, offset: int = 0, digest: bytes = b"") -> list[int]:
        """Follow to the end."""
        return [token async for chunk, _ in self.follow(session_id, offset, digest) for token in tokens_of(chunk)]

    async def stored(self, session_id: str) -> list[int]:
        return [entry.token for entry in (await self.store.read(session_id)).emitted]


def tokens_of(chunk: Chunk) -> list[int]:
    return [entry.token for entry in chunk.emitted]


@pytest.fixture
async def store() -> AsyncIterator[SessionStore]:
    """A store that ends with nothing left running."""
    store = open_store("embedded", 1000.0)
    yield store
    await store.close()
    await until(lambda: not running())


def running() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("generation")]


@pytest.fixture
async def coordinator(store: SessionStore) -> Coordinator:
    coordinator = Coordinator(store)
    await coordinator.create("s")
    return coordinator


@pytest.fixture
async def undisturbed() -> list[int]:
    """The session's tokens, had nothing happened to it."""
    alone = Coordinator(open_store("embedded", 1000.0))
    await alone.create("s")
    tokens = await alone.tokens("s")
    await alone.store.close()
    assert len(tokens) == LENGTH
    return tokens


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until something is so."""
    for _ in range(MAX_TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


async def take(chunks: AsyncIterator[tuple[Chunk, bool]], count: int) -> list[int]:
    """Read chunks until there are at least so many tokens."""
    tokens: list[int] = []
    while len(tokens) < count:
        chunk, _ = await anext(chunks)
        tokens += tokens_of(chunk)
    return tokens


async def read_into(tokens: list[int], chunks: AsyncIterator[tuple[Chunk, bool]]) -> None:
    async for chunk, _ in chunks:
        tokens += tokens_of(chunk)


# ---- following


async def test_a_follower_gets_what_is_committed(coordinator: Coordinator) -> None:
    chunks = [entry async for entry in coordinator.follow("s")]
    tokens = [token for chunk, _ in chunks for token in tokens_of(chunk)]
    session = await coordinator.store.read("s")
    assert tokens == [entry.token for entry in session.emitted]
    assert [last for _, last in chunks] == [False] * (len(chunks) - 1) + [True]
    assert (chunks[-1][0].digest, session.finish) == (session.digest, FinishReason.LENGTH)
    (team,) = coordinator.teams
    assert (team.scorer.num_closed, team.drafter.num_closed) == (1, 1)


async def test_two_followers_get_the_same_and_one_generation_runs(
    coordinator: Coordinator, undisturbed: list[int]
) -> None:
    assert await asyncio.gather(*(coordinator.tokens("s") for _ in range(3))) == [undisturbed] * 3
    assert len(coordinator.teams) == 1


async def test_who_joins_late_gets_everything(coordinator: Coordinator, undisturbed: list[int]) -> None:
    coordinator.before = gate = Gate(8)
    async with aclosing(coordinator.follow("s")) as first:
        before = await take(first, 8)
        late = asyncio.create_task(coordinator.tokens("s"))
        offset = asyncio.create_task(coordinator.tokens("s", 5))
        gate.opened.set()
        after = [token async for chunk, _ in first for token in tokens_of(chunk)]
        assert before + after == await late == undisturbed
        assert await offset == undisturbed[5:]


async def test_a_finished_session_is_replayed(coordinator: Coordinator, undisturbed: list[int]) -> None:
    assert await coordinator.tokens("s") == undisturbed
    assert await coordinator.tokens("s", 10) == undisturbed[10:]
    (chunk, last), *more = [entry async for entry in coordinator.follow("s", LENGTH)]
    assert (tokens_of(chunk), last, more) == ([], True, [])
    assert len(coordinator.teams) == 1


async def test_nothing_uncommitted_is_seen(coordinator: Coordinator) -> None:
    """The store's log is looked at with each chunk."""
    seen: list[int] = []
    async for chunk, _ in coordinator.follow("s"):
        seen += tokens_of(chunk)
        assert (await coordinator.stored("s"))[: len(seen)] == seen


class LosingStore(SessionStore):
    """A store that is gone from one length on, before or after it committed."""

    fail_from = 0

    async def commit(self, session_id: str, epoch: int, step: Round, statistics: Statistics) -> None:
        if step.base_length - len(PROMPT) >= self.fail_from:
            raise Unavailable("the store is gone")
        await super().commit(session_id, epoch, step, statistics)


async def test_tokens_whose_commit_failed_are_never_seen() -> None:
    losing = LosingStore(open_redis("embedded"), 1000.0)
    losing.fail_from = 9
    coordinator = Coordinator(losing)
    await coordinator.create("s")
    seen: list[int] = []
    with pytest.raises(Unavailable):
        await read_into(seen, coordinator.follow("s"))
    assert seen == await coordinator.stored("s")
    assert 9 <= len(seen) < LENGTH


# ---- leaving and coming back


async def test_when_the_last_follower_leaves_it_pauses(coordinator: Coordinator) -> None:
    coordinator.before = Gate(8)
    chunks = coordinator.follow("s")
    await take(chunks, 8)
    await chunks.aclose()
    assert running() == []
    (team,) = coordinator.teams
    # abandoned, not closed: the workers keep their caches for whoever resumes
    assert (team.scorer.num_closed, team.drafter.num_closed) == (0, 0)
    assert (team.scorer.num_dropped, team.drafter.num_dropped) == (1, 1)
    assert coordinator.running._entries == {}
    assert (await coordinator.store.read("s")).status is Status.ACTIVE


async def test_when_one_of_two_leaves_it_goes_on(coordinator: Coordinator, undisturbed: list[int]) -> None:
    coordinator.before = gate = Gate(8)
    first, second = coordinator.follow("s"), coordinator.follow("s")
    await take(first, 8)
    begun = await take(second, 8)
    await first.aclose()
    gate.opened.set()
    assert begun + [token async for chunk, _ in second for token in tokens_of(chunk)] == undisturbed
    assert len(coordinator.teams) == 1


@pytest.mark.parametrize("length", [1, 7, 20])
async def test_a_resumed_session_goes_on_as_if_undisturbed(
    coordinator: Coordinator, undisturbed: list[int], length: int
) -> None:
    coordinator.before = Gate(length)
    async with aclosing(coordinator.follow("s")) as chunks:
        chunk, tokens = None, []
        while len(tokens) < length:
            chunk, _ = await anext(chunks)
            tokens += tokens_of(chunk)
    coordinator.before = Gate()
    assert chunk
    assert tokens + await coordinator.tokens("s", len(tokens), chunk.digest) == undisturbed
    assert (await coordinator.store.read("s")).epoch == 2


async def test_what_a_client_has_must_be_in_the_store(coordinator: Coordinator) -> None:
    await coordinator.tokens("s")
    with pytest.raises(DataLoss, match="past the 24"):
        await coordinator.tokens("s", LENGTH + 1)
    with pytest.raises(DataLoss, match="other tokens"):
        await coordinator.tokens("s", 5, b"x" * 16)
    assert coordinator.running._entries == {}


async def test_an_unknown_session_is_not_found_and_leaves_nothing(coordinator: Coordinator) -> None:
    for _ in range(2):
        with pytest.raises(NotFound):
            await coordinator.tokens("unknown")
    assert coordinator.running._entries == {}


async def test_too_many_sessions_are_refused_and_followers_of_a_running_one_are_not(store: SessionStore) -> None:
    coordinator = Coordinator(store, most=1)
    await coordinator.create("s")
    await coordinator.create("other")
    coordinator.before = gate = Gate(4)
    async with aclosing(coordinator.follow("s")) as chunks:
        await take(chunks, 4)
        with pytest.raises(Overloaded, match="1 sessions"):
            await coordinator.tokens("other")
        following = asyncio.create_task(coordinator.tokens("s"))
        gate.opened.set()
        assert len(await following) == LENGTH
    assert len(await coordinator.tokens("other")) == LENGTH


# ---- ends from outside


async def test_a_cancelled_session_ends_at_what_is_committed(coordinator: Coordinator) -> None:
    coordinator.before = gate = Gate(8)
    async with aclosing(coordinator.follow("s")) as chunks:
        seen = await take(chunks, 8)
        assert await coordinator.store.cancel("s") is Status.CANCELLED
        gate.opened.set()
        rest = [entry async for entry in chunks]
        assert coordinator.claimed[0].generation.finish is FinishReason.CANCELLED
    assert rest[-1][1]
    seen += [token for chunk, _ in rest for token in tokens_of(chunk)]
    assert seen == await coordinator.stored("s") == await coordinator.tokens("s")
    assert coordinator.teams[0].scorer.num_closed == 1


async def test_a_fenced_session_says_so_and_the_other_coordinator_has_it(
    coordinator: Coordinator, undisturbed: list[int]
) -> None:
    coordinator.before = gate = Gate(8)
    other = Coordinator(coordinator.store)
    async with aclosing(coordinator.follow("s")) as chunks:
        seen = await take(chunks, 8)
        taken_over = asyncio.create_task(other.tokens("s"))
        await until(lambda: bool(other.claimed))
        gate.opened.set()
        with pytest.raises(Fenced):
            await read_into(seen, chunks)
    assert await taken_over == undisturbed
    assert seen == undisturbed[: len(seen)]


async def test_a_failed_generation_does_not_catch_who_comes_back(
    coordinator: Coordinator, undisturbed: list[int]
) -> None:
    """A follower that does not read keeps it in place, but not in the way."""

    async def fail(length: int) -> None:
        raise Unavailable("no target worker")

    coordinator.before = fail
    slow = coordinator.running.attach("s", lambda: coordinator.revive("s"))
    live = await slow.__aenter__()
    await until(lambda: live.has_failed)
    coordinator.before = Gate()
    assert await coordinator.tokens("s") == undisturbed
    await slow.__aexit__(None, None, None)
    assert coordinator.running._entries == {}


async def test_who_leaves_a_failed_generation_late_does_not_take_the_new_one_along(coordinator: Coordinator) -> None:
    async def fail(length: int) -> None:
        raise Unavailable("no target worker")

    coordinator.before = fail
    slow = coordinator.running.attach("s", lambda: coordinator.revive("s"))
    live = await slow.__aenter__()
    await until(lambda: live.has_failed)
    coordinator.before = gate = Gate(4)
    async with aclosing(coordinator.follow("s")) as chunks:
        await take(chunks, 4)
        await slow.__aexit__(None, None, None)
        following = asyncio.create_task(coordinator.tokens("s"))
        gate.opened.set()
        assert len(await following) == LENGTH
    assert len(coordinator.teams) == 2


async def test_stopping_tells_the_followers(coordinator: Coordinator) -> None:
    coordinator.before = Gate(8)
    async with aclosing(coordinator.follow("s")) as chunks:
        await take(chunks, 8)
        await coordinator.running.stop()
        with pytest.raises(Unavailable, match="resume"):
            await read_into([], chunks)
    assert running() == []


async def test_an_unexpected_error_reaches_the_follower(coordinator: Coordinator) -> None:
    async def fail(length: int) -> None:
        raise KeyError(length)

    coordinator.before = fail
    with pytest.raises(KeyError):
        await coordinator.tokens("s")


# ---- races


@pytest.mark.parametrize("seed", range(6))
async def test_any_coming_and_going(store: SessionStore, undisturbed: list[int], seed: int) -> None:
    """Two coordinators, followers that leave at odd moments: each sees a prefix, and the log is never doubled."""
    coordinators = [Coordinator(store), Coordinator(store)]
    await coordinators[0].create("s")

    async def visit(number: int) -> None:
        """Come, stay for some turns of the loop, leave; come back to where one was."""
        seen: list[int] = []
        coordinator = coordinators[(number + seed) % 2]
        for stay in (1 + number + seed, 3 * number, 40):
            try:
                async with aclosing(coordinator.follow("s", len(seen))) as chunks:
                    for _ in range(stay):
                        chunk, last = await anext(chunks)
                        assert chunk.offset == len(seen)
                        seen += tokens_of(chunk)
                        if last:
                            break
            except (Fenced, Unavailable):
                await asyncio.sleep(0)
            assert seen == undisturbed[: len(seen)]

    await asyncio.gather(*(visit(number) for number in range(6)))
    assert running() == []
    assert await coordinators[0].tokens("s") == undisturbed == await coordinators[0].stored("s")
    assert all(coordinator.running._entries == {} for coordinator in coordinators)


@pytest.mark.parametrize("turns", range(12))
async def test_a_handler_may_be_cancelled_at_any_moment(
    coordinator: Coordinator, undisturbed: list[int], turns: int
) -> None:
    handler = asyncio.create_task(coordinator.tokens("s"))
    for _ in range(turns * turns):
        await asyncio.sleep(0)
    handler.cancel()
    await asyncio.gather(handler, return_exceptions=True)
    await until(lambda: not running() and not coordinator.running._entries)
    assert await coordinator.tokens("s") == undisturbed
