"""One generation whose rounds run at another coordinator: its log is read as it grows, for those who follow it here.

The log is asked for up to twenty times a second, at once when the owner's lease may have lapsed. Once nobody has a
lease, the followers claim the session: `OwnerLeft`.
"""

import asyncio
from dataclasses import replace

from coordinator.followed import FollowedGeneration, OwnerLeft
from coordinator.generation import Generation
from coordinator.healing import Healing, heal, told
from coordinator.session_record import LogEnd, SessionNews, SessionRecord, Status
from coordinator.session_replies import SessionCancelled
from coordinator.sessions import SessionStore
from specdec.errors import DataLossError, NotFoundError, UnavailableError

FIRST_PAUSE_S, MAX_PAUSE_S, PAUSE_FACTOR = 0.05, 0.5, 1.5  # between two reads; the first after news
LAPSE_S = 0.005  # after the end of a lease it has lapsed


class TailedGeneration(FollowedGeneration):
    """One generation that is read from its log."""

    def __init__(self, session: SessionRecord, generation: Generation, store: SessionStore) -> None:
        super().__init__(session, generation)
        self._store = store
        self._end = LogEnd.of(session)

    def start(self) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._run(), name=f"tail {self.session_id}")

    def interrupt(self, reason: Exception) -> None:
        """End it now; a cancelled session ends as its log says."""
        if not isinstance(reason, SessionCancelled):
            super().interrupt(reason)

    async def _run(self) -> None:
        try:
            self._begin()
            await self._read_on()
        except asyncio.CancelledError:
            self._error = self._interruption or UnavailableError("this coordinator stopped the session; resume it")
        except Exception as error:
            self._error = error
        self._has_ended = True
        self._tell()

    async def _read_on(self) -> None:
        """Publish what the log gains, to the session's end. Raises OwnerLeft, and what the store says against it."""
        pause_s = FIRST_PAUSE_S
        while not self._is_complete:
            await asyncio.sleep(pause_s)
            news = await self._news()
            self._publish(news)
            if news.status is Status.ACTIVE and not news.lease_left_s:
                raise OwnerLeft
            pause_s = FIRST_PAUSE_S if news.emitted else min(PAUSE_FACTOR * pause_s, MAX_PAUSE_S)
            pause_s = min(pause_s, news.lease_left_s + LAPSE_S)

    async def _news(self) -> SessionNews:
        """Ask the store; bring back what it has lost of what was shown here."""
        try:
            news, self._end = await self._store.tail(self.session_id, self._end)
        except (DataLossError, NotFoundError) as refusal:
            healing = await heal(self._store, self.shown)
            raise OwnerLeft if healing is Healing.CURRENT else told(healing) from refusal
        return news

    def _publish(self, news: SessionNews) -> None:
        self._session = replace(self._session, epoch=news.epoch)
        self.generation.replay(news.emitted, news.finish)
        self._num_published, self._published = len(self.generation.emitted), news.statistics
        if news.emitted or self._is_complete:
            self._tell()
