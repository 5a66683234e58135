"""All generations that are followed in this coordinator, whether they run here or are tailed; at most one a session.

A session runs while a client follows it. When the last follower leaves it pauses: what was committed stays in the
store, the workers keep their caches while they have room, and the next client that resumes it continues there.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from coordinator import metrics
from coordinator.followed import FollowedGeneration
from coordinator.running import RunningGeneration
from specdec.errors import OverloadedError

Start = Callable[[], Coroutine[Any, Any, FollowedGeneration]]
"""Claims a session that is not followed here, and starts it, or tails it."""

RESUME_SHARE = 16  # of so many places one is kept for sessions that are resumed


@dataclass(slots=True)
class _Entry:
    running: asyncio.Future[FollowedGeneration]
    num_followers: int = 0

    @property
    def has_failed(self) -> bool:
        """Return whether it ended with an error, which only its followers need to see."""
        return self.running.done() and self.started is None

    @property
    def takes_room(self) -> bool:
        """Return whether it starts or runs; what has ended waits only for its followers to read it."""
        return not self.running.done() or (self.started is not None and self.started.is_running)

    @property
    def started(self) -> FollowedGeneration | None:
        """The generation once it runs, unless an error ended it."""
        if not self.running.done() or self.running.cancelled() or self.running.exception() is not None:
            return None
        return None if self.running.result().has_failed else self.running.result()


class RunningGenerations:
    """The generations by session."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._entries: dict[str, _Entry] = {}
        self._closing: set[asyncio.Task[None]] = set()  # ended generations that still close their worker streams

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._entries

    def get(self, session_id: str) -> FollowedGeneration | None:
        """Return the session's generation, if it runs here."""
        entry = self._entries.get(session_id)
        return entry.started if entry else None

    def silent(self, seconds: float) -> list[RunningGeneration]:
        """Return the generations whose rounds run here and have committed nothing for so long."""
        started = [entry.started for entry in self._entries.values()]
        running = [one for one in started if isinstance(one, RunningGeneration) and one.is_running]
        return [one for one in running if one.silent_s >= seconds]

    def check_room_for_new(self) -> None:
        """Raise OverloadedError if no new session may be added: the last places are for those that are resumed."""
        self._check_room(self._maximum - self._maximum // RESUME_SHARE)

    def _check_room(self, maximum: int) -> None:
        if len(self._entries) < maximum:
            return
        if sum(entry.takes_room for entry in self._entries.values()) >= maximum:
            raise OverloadedError(f"{maximum} sessions run here already; try again soon", limit="sessions")

    @asynccontextmanager
    async def attach(self, session_id: str, start: Start) -> AsyncIterator[FollowedGeneration]:
        """Yield the session's generation, which runs at least until the context ends.

        Raises OverloadedError if too many run already, and what `start` raises.
        """
        entry = self._entries.get(session_id)
        if entry is None or entry.has_failed:
            entry = self._add(session_id, start)
        entry.num_followers += 1
        try:
            yield await asyncio.shield(entry.running)
        finally:
            entry.num_followers -= 1
            if not entry.num_followers:
                # at once: a client that joins from here on claims the session, and fences what is still ending here
                self._remove(session_id, entry)
                await asyncio.shield(self._pause(entry))

    async def stop(self) -> None:
        """End all rounds; sessions stay in the store."""
        entries = list(self._entries.items())
        for session_id, entry in entries:
            self._remove(session_id, entry)
        await asyncio.gather(*(self._pause(entry) for _, entry in entries))
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _add(self, session_id: str, start: Start) -> _Entry:
        self._check_room(self._maximum)
        entry = self._entries[session_id] = _Entry(asyncio.ensure_future(start()))
        metrics.NUM_RUNNING.set(len(self._entries))
        return entry

    def _remove(self, session_id: str, entry: _Entry) -> None:
        if self._entries.get(session_id) is entry:
            del self._entries[session_id]
            metrics.NUM_RUNNING.set(len(self._entries))

    async def _pause(self, entry: _Entry) -> None:
        """End an entry's rounds."""
        (started,) = await asyncio.gather(entry.running, return_exceptions=True)
        closing = await started.stop() if isinstance(started, FollowedGeneration) else None
        if closing:
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
