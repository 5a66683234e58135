"""Clients that leave at random moments, while their prompt is read too: what was theirs is freed."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from prometheus_client import REGISTRY
from redis.asyncio import Redis

from coordinator.session_ids import SessionIds
from coordinator.sessions import SECRET_KEY
from specdec import AsyncClient, NotFoundError, SamplingParams, SpecdecError, SpeculationParams
from specdec.engine import LanguageModel
from specdec.serving.security.caller import NO_TENANT
from tests.fuzz.census import census, settled
from tests.fuzz.report import Report
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import Cluster, cluster, save_tokenizer
from tests.support.redis_server import running_redis

NUM_AT_ONCE = 8
LATEST = 1.2  # times what a session takes: some have ended before their client leaves
PROMPT_TOKENS, NEW_TOKENS = 90, 24
PREFILL_CHUNK_TOKENS = 64  # a prompt takes several forwards
DRAFT_TOKENS = 4
# of the two engines together: those that run, those that were put together meanwhile, and those of a proposal
MAX_FORWARDS = 4 + DRAFT_TOKENS
IDLE_S = 60.0
ENGINES = ("target", "draft")
WAYS = ("leaves", "cancels", "leaves, then cancels", "has a deadline")


@dataclass(slots=True)
class Forwards:
    """Counts forwards of this process."""

    num_begun: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while the context lasts."""
        forward = LanguageModel.forward

        def counting(model: LanguageModel, feeds: Any, *more: Any) -> Any:
            self.num_begun += 1
            return forward(model, feeds, *more)

        with mock.patch.object(LanguageModel, "forward", counting):
            yield


@dataclass(slots=True)
class Leavers:
    """Sessions of one service, and how their clients left."""

    client: AsyncClient
    ids: SessionIds
    rng: random.Random
    session_s: float  # that one takes undisturbed
    ways: Counter[str] = field(default_factory=Counter)
    names: list[str] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    num_forwards: list[int] = field(default_factory=list)  # after the last of each group had left

    async def leave_together(self, forwards: Forwards) -> None:
        """Let some clients come and leave at random moments; then wait until the workers are idle."""
        await asyncio.gather(*(self._come_and_leave() for _ in range(NUM_AT_ONCE)))
        begun, began_s = forwards.num_begun, time.monotonic()
        async with asyncio.timeout(IDLE_S):
            while num_at_work():  # noqa: ASYNC110  # the state of other threads
                await asyncio.sleep(0.001)
        self.idle_s.append(time.monotonic() - began_s)
        self.num_forwards.append(forwards.num_begun - begun)

    async def _come_and_leave(self) -> None:
        way, name = self.rng.choice(WAYS), f"leaver-{len(self.names)}"
        self.names.append(name)
        self.ways[way] += 1
        leave_after_s = self.rng.uniform(0.0, LATEST * self.session_s)
        deadline_s = max(0.001, leave_after_s) if way == "has a deadline" else 60.0
        following = asyncio.ensure_future(complete(self.client, name, self.rng.getrandbits(20), deadline_s))
        await asyncio.wait([following], timeout=60.0 if way == "has a deadline" else leave_after_s)
        if way == "cancels":
            await self.cancel(name)
            await asyncio.wait([following])
        following.cancel()
        with suppress(asyncio.CancelledError, SpecdecError):
            await following
        if way == "leaves, then cancels":
            await self.cancel(name)

    async def cancel(self, name: str) -> None:
        """End a session, if it has begun."""
        with suppress(NotFoundError):
            await self.client.cancel(self.ids.of_request(NO_TENANT, name).public)


def num_at_work() -> float:
    """Return how many sessions wait for a forward of a worker, or are in one."""
    names = [f"specdec_{engine}_num_sessions_{state}" for engine in ENGINES for state in ("waiting", "running")]
    return sum(REGISTRY.get_sample_value(name) or 0.0 for name in names)


async def complete(client: AsyncClient, name: str, seed: int, timeout_s: float = 60.0) -> tuple[int, ...]:
    """Return the text of one session."""
    completion = await client.complete(
        prompt_token_ids=[7 + seed % 100] * PROMPT_TOKENS,
        sampling=SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True),
        speculation=SpeculationParams(num_draft_tokens=DRAFT_TOKENS, drafter="model"),
        request_id=name,
        timeout_s=timeout_s,
    )
    return completion.tokens


@asynccontextmanager
async def _served(folder: Path, redis_url: str) -> AsyncIterator[Cluster]:
    target, draft = (save_tokenizer(build("llama", folder / name), VOCAB_SIZE) for name in ("target", "draft"))
    chunks = {"prefill_chunk_tokens": PREFILL_CHUNK_TOKENS}
    async with cluster(
        target, draft, draft_settings=chunks, target_settings=chunks, store=redis_url, session_ttl_s=10.0
    ) as running:
        yield running


async def leave_often(folder: Path, num_leaving: int, seed: int) -> Report:
    """Let so many clients leave; check what is left."""
    report, forwards = Report("leavers", num_leaving), Forwards()
    with running_redis() as redis, forwards.counted():
        async with _served(folder, redis.url) as served, AsyncClient(served.address) as client:
            expected, session_s = await _calm(client)
            before = await census(redis.url)
            began_s = time.monotonic()
            leavers = Leavers(client, SessionIds(await _secret(redis.url)), random.Random(seed), session_s)
            while len(leavers.names) < num_leaving:
                await leavers.leave_together(forwards)
            report.elapsed_s = time.monotonic() - began_s
            if await complete(client, "after", 0) != expected:
                report.wrong.append("a text changed")
            for name in ("calm", "after"):
                await leavers.cancel(name)
            report.wrong += await settled(redis.url, before)
    report.codes = leavers.ways
    if max(leavers.num_forwards) > MAX_FORWARDS:
        report.wrong.append(f"{max(leavers.num_forwards)} forwards began after the last client had left")
    report.neighbour = (
        f"idle after {max(leavers.idle_s):.2f} s and {max(leavers.num_forwards)} forwards at most, "
        f"a session takes {session_s:.2f} s"
    )
    return report


async def _calm(client: AsyncClient) -> tuple[tuple[int, ...], float]:
    """Return a text, and how long it takes when the services have warmed up."""
    for attempt in range(3):
        began_s = time.monotonic()
        tokens = await complete(client, f"calm {attempt}", 0)
    return tokens, time.monotonic() - began_s


async def _secret(redis_url: str) -> bytes:
    async with Redis.from_url(redis_url) as redis:
        secret = await redis.get(SECRET_KEY)
    assert isinstance(secret, bytes)
    return secret
