"""The texts of finished sessions, for others to draft from: so many tokens, those that finished last."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.context_index import ContextIndex
from specdec.serving.session_stream import WorkerSession
from specdec.serving.sharing import GREEDY, draws_of, group_of

CHUNK_TOKENS = 100  # a millisecond of work before the event loop gets its turn


@dataclass(slots=True)
class Shelf:
    """Texts that one group of sessions shares."""

    index: ContextIndex = field(default_factory=ContextIndex)
    draws: set[int] = field(default_factory=set)  # that some of its texts depend on


@dataclass(slots=True)
class Half:
    """Texts that finished one after the other, and are dropped together."""

    num_tokens: int = 0
    shelves: defaultdict[str, Shelf] = field(default_factory=lambda: defaultdict(Shelf))


class FinishedTexts:
    """Two halves of texts: when the younger one is full the older is dropped, and the younger takes its place.

    What is dropped depends on nothing that a session reads: an order of use would tell a session about the texts that
    were made with its own draws.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._younger, self._older = Half(), Half()
        self._waiting: deque[tuple[str, int | None, Sequence[int]]] = deque()
        self._num_waiting_tokens = 0
        self._arrived = asyncio.Event()

    @property
    def num_tokens(self) -> int:
        """Tokens that are held."""
        return self._younger.num_tokens + self._older.num_tokens + self._num_waiting_tokens

    def add(self, session: WorkerSession, tokens: Sequence[int]) -> None:
        """Take a finished text, or the end of one that is too long; `keep_indexing` makes it visible."""
        group = group_of(session)
        kept = tokens[-(self._max_tokens // 4) :] if self._max_tokens >= 4 else ()
        if group is None or not kept:
            return
        self._waiting.append((group, draws_of(session), kept))
        self._num_waiting_tokens += len(kept)
        while self._num_waiting_tokens > self._max_tokens // 4:
            self._num_waiting_tokens -= len(self._waiting.popleft()[2])
        self._arrived.set()

    def visible_to(self, session: WorkerSession) -> list[ContextIndex]:
        """Return the texts that a session may draft from: shelves without any text of its own draws."""
        group, draws = group_of(session), draws_of(session)
        if group is None:
            return []
        shelves = [each.shelves[group] for each in (self._younger, self._older) if group in each.shelves]
        return [shelf.index for shelf in shelves if draws is GREEDY or draws not in shelf.draws]

    async def keep_indexing(self) -> None:
        """Index what arrives, piece by piece, for ever."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                group, draws, tokens = self._waiting.popleft()
                self._num_waiting_tokens -= len(tokens)
                await self._index(self._shelf(group, draws, len(tokens)), tokens)

    def _shelf(self, group: str, draws: int | None, num_tokens: int) -> Shelf:
        """Return where a text goes; the draws are known before any of its tokens can be found."""
        if self._younger.num_tokens + num_tokens > 3 * self._max_tokens // 8:
            self._older, self._younger = self._younger, Half()
        self._younger.num_tokens += num_tokens
        shelf = self._younger.shelves[group]
        if draws is not GREEDY:
            shelf.draws.add(draws)
        return shelf

    async def _index(self, shelf: Shelf, tokens: Sequence[int]) -> None:
        for count, token in enumerate(tokens, start=1):
            shelf.index.append(token)
            if count % CHUNK_TOKENS == 0:
                await asyncio.sleep(0)
        shelf.index.end_text()
