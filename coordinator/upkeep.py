"""What a coordinator does for its sessions besides their rounds: it renews leases, and compares what it has shown."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from coordinator.detached import DetachedSessions
from coordinator.healing import heal
from coordinator.registry import RunningGenerations
from coordinator.running import RunningGeneration
from coordinator.session_record import SessionRecord
from coordinator.session_replies import SessionCancelled
from coordinator.sessions import SessionStore
from coordinator.shown import ShownSessions
from specdec.errors import DataLossError, FencedError, NotFoundError, UnavailableError
from specdec.outside import Outside
from specdec.serving.telemetry import get_logger

PERIOD_S = 1.0  # between two comparisons
BEATS_PER_LEASE = 4  # some of them may fail
Check = Callable[[], Awaitable[None]]


class Upkeep:
    """The sessions that run here, those that were left, and those that end unless a client comes back."""

    def __init__(
        self,
        store: SessionStore,
        running: RunningGenerations,
        shown: ShownSessions,
        detached: DetachedSessions,
        outside: Outside,
    ) -> None:
        self._store, self._running, self._shown, self._detached = store, running, shown, detached
        self._outside = outside

    async def run(self, period_s: float = PERIOD_S) -> None:
        """Do it forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew_leases(period_s, group), name="leases")
            group.create_task(self._compare(period_s), name="comparisons")

    async def _renew_leases(self, period_s: float, group: asyncio.TaskGroup) -> None:
        """Renew the leases of sessions that commit less often, all at once; hear of cancellations and takeovers."""
        beat_s = min(period_s, self._store.lease_s / BEATS_PER_LEASE)
        while True:
            await asyncio.sleep(beat_s)
            silent = self._running.silent(beat_s / 2)
            if silent:  # beside the next beats, which a lost reply must not hold up
                group.create_task(_tolerated("", partial(self._beat, silent, group)), name="beat")

    async def _beat(self, silent: Sequence[RunningGeneration], group: asyncio.TaskGroup) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._store.lease_s):
                refusals = await self._store.heartbeats([running.beat for running in silent])
            for running, refusal in zip(silent, refusals, strict=True):
                if refusal is not None:
                    refused = partial(running.refused, refusal)
                    group.create_task(_tolerated(running.session_id, refused), name="refused")

    async def _compare(self, period_s: float) -> None:
        """Compare what was left, and where a connection has broken what runs: the store may have gone back in time."""
        while True:
            await asyncio.sleep(period_s)
            await _tolerated("", self._store.answers)
            now_s, has_broken = self._outside.now_s(), self._store.unbroken_s < 2 * period_s
            running: list[RunningGeneration] = self._running.silent(0.0) if has_broken else []
            due = self._shown.due(now_s)
            checks: list[tuple[str, Check]] = [(one.session_id, one.check) for one in running]
            left = self._shown.all if has_broken else due
            checks += [(one.session_id, partial(self._check_left, one)) for one in left]
            checks += [(one.session_id, partial(self._end, *one)) for one in self._detached.due(now_s)]
            await asyncio.gather(*(_tolerated(session_id, check) for session_id, check in checks))

    async def _check_left(self, shown: SessionRecord) -> None:
        """Compare a session that was left with the store's. Raises UnavailableError."""
        length = len(shown.prompt) + len(shown.emitted)
        try:
            with suppress(SessionCancelled):  # the store has all of it, and may go back later
                await self._store.compare(shown.session_id, shown.epoch, length, shown.digest)
        except (FencedError, DataLossError):
            await heal(self._store, shown)
            if self._shown.get(shown.session_id) is shown:  # else it has been followed and left again meanwhile
                self._shown.take(shown.session_id)

    async def _end(self, session_id: str, epoch: int) -> None:
        """Cancel a session that nobody has claimed since its last client left."""
        try:
            with suppress(NotFoundError, DataLossError):  # it is over anyway
                await self._store.cancel(session_id, epoch)
        except UnavailableError:
            self._detached.add(session_id, epoch, self._outside.now_s())
            raise


async def _tolerated(session_id: str, check: Check) -> None:
    """Make a check of one session; those of the others go on if it fails."""
    try:
        await check()
    except UnavailableError:
        pass  # the commit will fail, or the next check will succeed
    except Exception as error:
        get_logger().error("heartbeat_failed", session_id=session_id, error=type(error).__name__)
