"""One run: the service, its clients, the faults between them, and what came of it."""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.census import census
from tests.chaos.clients import Behaviour, Clients, drawn_behaviour, drawn_texts, undisturbed
from tests.chaos.faults import Done, Fault, Faults, drawn_faults, kinds_of
from tests.chaos.ledger import Ledger, Session, Text
from tests.chaos.mistakes import OF_CLIENTS
from tests.chaos.models import save_models
from tests.chaos.processes import Nursery
from tests.chaos.service import TTL_S, Models, Service, Size, running_service

AT_ONCE = 16
MAX_FAULTS_AT_ONCE = 3
MAX_WAIT_S = 5.0  # for the next share of the work, until the next fault comes all the same


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does; everything that is drawn follows from the seed."""

    num_sessions: int
    num_faults: int
    seed: int
    num_at_once: int = AT_ONCE  # sessions
    size: Size = field(default_factory=Size)
    longest_fault_s: float = 4.0
    only: tuple[str, ...] = ()  # kinds of fault; empty: all
    mistake: str = ""


@dataclass(slots=True)
class Result:
    """What came of a run."""

    plan: Plan
    ledger: Ledger
    faults: list[Done]
    left: list[str]  # what the census found
    elapsed_s: float

    @property
    def violations(self) -> list[str]:
        """All that was wrong."""
        return [*self.ledger.violations, *self.left]


async def run(plan: Plan, forks: Nursery) -> Result:
    """Run the service with sessions and faults. Raises AssertionError if it does not start."""
    chance = random.Random(plan.seed)
    with tempfile.TemporaryDirectory(prefix="specdec-chaos-") as name:
        folder = Path(name)
        models = Models(*await asyncio.to_thread(save_models, folder))
        mistake = "" if plan.mistake in OF_CLIENTS else plan.mistake
        async with running_service(forks, folder, models, plan.size, mistake) as service:
            return await _disturbed(service, plan, chance)


async def _disturbed(service: Service, plan: Plan, chance: random.Random) -> Result:
    texts = await undisturbed(service, drawn_texts(chance, plan.num_sessions))
    sessions = [
        (Session(f"session {n}", chance.choice(texts)), drawn_behaviour(chance)) for n in range(plan.num_sessions)
    ]
    kinds = kinds_of(is_durable=plan.size.is_durable, only=plan.only)
    planned = drawn_faults(chance, plan.num_faults, plan.longest_fault_s, kinds)
    ledger, begin_s = Ledger(), time.monotonic()
    faults, clients = (
        Faults(service, ledger),
        Clients(service, ledger, plan.mistake if plan.mistake in OF_CLIENTS else ""),
    )
    following = asyncio.create_task(_follow_all(clients, sessions, plan.num_at_once))
    await _make_all(faults, planned, _Work(ledger, sessions, following))
    await following
    elapsed_s = time.monotonic() - begin_s
    ledger.violations += [f"{part.name} ended by itself" for part in service.all_parts if part.ended_by_itself]
    for session, _ in sessions:
        await clients.compare(session)
    await clients.close()
    left = await census(service, TTL_S)
    return Result(plan, ledger, faults.done, left, elapsed_s)


async def _follow_all(clients: Clients, sessions: Sequence[tuple[Session, Behaviour]], num_at_once: int) -> None:
    room = asyncio.Semaphore(num_at_once)

    async def follow(session: Session, behaviour: Behaviour) -> None:
        async with room:
            await clients.follow(session, behaviour)

    async with asyncio.TaskGroup() as group:
        for session, behaviour in sessions:
            group.create_task(follow(session, behaviour))


@dataclass(frozen=True, slots=True)
class _Work:
    """How much of the sessions' work is done."""

    ledger: Ledger
    sessions: Sequence[tuple[Session, Behaviour]]
    following: "asyncio.Task[None]"

    @property
    def share(self) -> float:
        """The share of their tokens that clients have, about."""
        if self.following.done():
            return 1.0
        num_tokens = sum(_max_tokens(session.text) for session, _ in self.sessions)
        return self.ledger.num_tokens / num_tokens

    async def until(self, share: float) -> None:
        """Wait until so much is done, or for some time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_WAIT_S):
                while self.share < share:
                    self.ledger.news.clear()
                    await self.ledger.news.wait()


def _max_tokens(text: Text) -> int:
    return text.sampling.max_new_tokens or 0


async def _make_all(faults: Faults, planned: Sequence[Fault], work: _Work) -> None:
    """Make each fault when its share of the work is done, or when nothing has gone on for some time."""
    room = asyncio.Semaphore(MAX_FAULTS_AT_ONCE)

    async def make(fault: Fault) -> None:
        try:
            await faults.make(fault)
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        for number, fault in enumerate(planned):
            await room.acquire()
            await work.until((number + 0.5) / len(planned))
            group.create_task(make(fault))
