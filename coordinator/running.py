"""Generations that run in this coordinator, and the clients that follow them.

A session runs while somebody follows it. When the last follower leaves it pauses: what was committed stays in the
store, the workers keep their caches while they have remaining_tokens, and whoever resumes it goes on from there.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from coordinator import metrics
from coordinator.draft import NoDrafter, SessionDrafter
from coordinator.draft_length import DraftLength
from coordinator.generation import Chunk, Generation, Round
from coordinator.rounds import run_rounds
from coordinator.sessions import Session, SessionCancelled, SessionStore
from coordinator.target import Scorer
from specdec.errors import DataLossError, OverloadedError, UnavailableError
from specdec.types import FinishReason, Statistics


@dataclass(frozen=True, slots=True)
class WorkerHandles:
    """The workers' ends that one session uses, and how it chooses K."""

    scorer: Scorer
    drafter: SessionDrafter | NoDrafter
    draft_length: DraftLength


class RunningGeneration:
    """One generation and its followers."""

    def __init__(self, session: Session, generation: Generation, store: SessionStore) -> None:
        self.session_id = session.session_id
        self.generation = generation
        self._epoch = session.epoch
        self._store = store
        self._num_published = len(generation.emitted)
        self._published = generation.statistics
        self._base_s = generation.statistics.total_s
        self._began_at = time.perf_counter()
        self._changed = asyncio.Condition()
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def statistics(self) -> Statistics:
        """Sums over what is committed."""
        return self._published

    def start(self, team: WorkerHandles) -> None:
        """Begin to play rounds."""
        self._task = asyncio.create_task(self._run(team), name=f"generation {self.session_id}")

    async def stop(self) -> None:
        """End the rounds; the one that is being committed still is."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def follow(self, offset: int, digest: bytes) -> AsyncIterator[tuple[Chunk, bool]]:
        """Yield the completion from token `offset` on as it is committed, each chunk with whether it is the last.

        Raises DataLossError if the client has more than, or other than, what is committed; and what ended the rounds.
        """
        self._check_position(offset, digest)
        last = False
        while not last:
            await self._wait_past(offset)
            end = self._num_published
            last = self._is_complete
            yield self.generation.chunk(offset, end), last
            offset = end

    def _check_position(self, offset: int, digest: bytes) -> None:
        if offset > self._num_published:
            raise DataLossError(
                f"offset {offset} is past the {self._num_published} tokens that the session store holds"
            )
        if digest and digest != self.generation.digest_at(offset):
            raise DataLossError(f"the session store holds other tokens than the client, up to offset {offset}")

    @property
    def has_failed(self) -> bool:
        """Say whether an error ended the rounds."""
        return self._error is not None

    @property
    def _is_complete(self) -> bool:
        return self.generation.done and self._num_published == len(self.generation.emitted)

    async def _wait_past(self, offset: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_published > offset or self._is_complete or self._error)
        if self._num_published == offset and not self._is_complete and self._error:
            raise self._error

    async def _run(self, team: WorkerHandles) -> None:
        try:
            await run_rounds(self.generation, team.drafter, team.scorer, team.draft_length, self._publish)
            await asyncio.gather(team.scorer.close(), team.drafter.close())
        except SessionCancelled:
            await asyncio.gather(team.scorer.close(), team.drafter.close())
            await self._cut(FinishReason.CANCELLED)
        except asyncio.CancelledError:
            await self._fail(UnavailableError("this coordinator has stopped the session's rounds; resume it"))
            raise
        except Exception as error:
            await self._fail(error)
        finally:
            team.scorer.drop()
            team.drafter.drop()

    async def _publish(self, played: Round) -> None:
        begin = time.perf_counter()
        statistics = replace(
            played.statistics, commit_s=self._published.commit_s, total_s=self._base_s + begin - self._began_at
        )
        await self._store.commit(self.session_id, self._epoch, played, statistics)
        end = time.perf_counter()
        metrics.observe_round(self._published, played, end - begin)
        async with self._changed:
            self._published = replace(
                statistics,
                commit_s=statistics.commit_s + end - begin,
                total_s=self._base_s + end - self._began_at,
            )
            self._num_published += len(played.emitted)
            self._changed.notify_all()

    async def _cut(self, reason: FinishReason) -> None:
        """End at what is committed."""
        async with self._changed:
            self.generation.cut(self._num_published, reason)
            self._changed.notify_all()

    async def _fail(self, error: Exception) -> None:
        async with self._changed:
            self._error = error
            self._changed.notify_all()


@dataclass(slots=True)
class _Entry:
    live: asyncio.Future[RunningGeneration]
    num_members: int = 0

    @property
    def has_failed(self) -> bool:
        """Say whether it ended with an error, which only its members need to see."""
        return self.live.done() and (self.live.exception() is not None or self.live.result().has_failed)


class RunningGenerations:
    """All generations of this coordinator; at most one a session."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[str, _Entry] = {}

    @asynccontextmanager
    async def attach(
        self, session_id: str, revive: Callable[[], Coroutine[Any, Any, RunningGeneration]]
    ) -> AsyncIterator[RunningGeneration]:
        """Give the session's generation, running it while anybody is attach; `revive` claims one that does not run.

        Raises OverloadedError if too many run already, and what `revive` raises.
        """
        entry = self._entries.get(session_id)
        if entry is None or entry.has_failed:
            entry = self._revived(session_id, revive)
        entry.num_members += 1
        try:
            yield await asyncio.shield(entry.live)
        finally:
            entry.num_members -= 1
            if not entry.num_members:
                await asyncio.shield(self._pause(session_id, entry))

    async def stop(self) -> None:
        """End all rounds; sessions stay in the store."""
        await asyncio.gather(*(self._pause(session_id, entry) for session_id, entry in [*self._entries.items()]))

    def _revived(self, session_id: str, revive: Callable[[], Coroutine[Any, Any, RunningGeneration]]) -> _Entry:
        if session_id not in self._entries and len(self._entries) >= self._most:
            raise OverloadedError(f"{self._most} sessions run here already; try again soon")
        entry = self._entries[session_id] = _Entry(asyncio.ensure_future(revive()))
        metrics.NUM_RUNNING.set(len(self._entries))
        return entry

    async def _pause(self, session_id: str, entry: _Entry) -> None:
        """Forget first, then stop: who joins meanwhile claims the session, and fences what is still under way here."""
        if self._entries.get(session_id) is entry:
            del self._entries[session_id]
            metrics.NUM_RUNNING.set(len(self._entries))
        revived = await asyncio.gather(entry.live, return_exceptions=True)
        if isinstance(revived[0], RunningGeneration):
            await revived[0].stop()
