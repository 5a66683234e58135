"""Drafting by looking up: what followed the last time that the text's end occurred in it (prompt lookup).

No model and no vocabulary: it serves any target, and costs microseconds. Saxena 2023, "Prompt lookup decoding".
"""

import asyncio
import time
from array import array
from collections import OrderedDict

from draft_service.drafters import Drafted, DraftRequest
from specdec.exact.prefix import num_equal
from specdec.exact.values import Proposal, SparseDistribution, Timing
from specdec.serving.session_stream import Session
from specdec.types import ModelInfo

MAX_HELD_TOKENS = 1 << 20  # of all sessions; an indexed token takes up to 600 bytes
INDEX_CHUNK_TOKENS = 1000  # some milliseconds of work before the event loop gets its turn


class SuffixIndex:
    """A text, and for each suffix of each length where it last occurred before; append and truncate are cheap."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.tokens: array[int] = array("I")
        self._lengths = range(longest, shortest - 1, -1)
        # where the token behind the latest occurrence of an n-gram stands
        self._latest: dict[tuple[int, ...], int] = {}
        # for each length and each token: where the occurrence before stood that this token's replaced; 0: none
        self._earlier: dict[int, array[int]] = {length: array("I") for length in self._lengths}

    def append(self, token: int) -> None:
        """Add a token: it follows the n-grams that end where it stands."""
        position = len(self.tokens)
        for length in self._lengths:
            if position >= length:
                gram = tuple(self.tokens[position - length :])
                self._earlier[length].append(self._latest.get(gram, 0))
                self._latest[gram] = position
            else:
                self._earlier[length].append(0)
        self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        while len(self.tokens) > length:
            self._pop()

    def _pop(self) -> None:
        self.tokens.pop()
        position = len(self.tokens)
        for length in self._lengths:
            earlier = self._earlier[length].pop()
            if position >= length:
                gram = tuple(self.tokens[position - length :])
                if earlier:
                    self._latest[gram] = earlier
                else:
                    del self._latest[gram]

    def continuation(self, num_tokens: int) -> list[int]:
        """Return what followed the longest suffix that occurred before, at its latest occurrence.

        Where that runs into the text's end it goes on with what it returned itself: a loop is continued as a loop.
        """
        begin = self._find()
        if begin is None:
            return []
        period = len(self.tokens) - begin
        return [self.tokens[begin + index % period] for index in range(num_tokens)]

    def _find(self) -> int | None:
        end = len(self.tokens)
        for length in self._lengths:
            if end > length:
                position = self._latest.get(tuple(self.tokens[end - length :]))
                if position is not None:
                    return position
        return None


class _Held:
    """One session's text."""

    def __init__(self, index: SuffixIndex) -> None:
        self.index = index
        self.lock = asyncio.Lock()  # an old stream and its successor may both have a message under way


class NgramDrafter:
    """Drafts from the session's own text."""

    name = "ngram"
    model = ModelInfo("ngram")

    def __init__(self, shortest: int, longest: int, max_held_tokens: int = MAX_HELD_TOKENS) -> None:
        self._shortest, self._longest = shortest, longest
        self._max_held_tokens = max_held_tokens
        self._num_unchecked = 0  # tokens taken in since the last count
        self._held: OrderedDict[str, _Held] = OrderedDict()  # least recently used first

    async def propose(self, session: Session, ask: DraftRequest, match: bool) -> Drafted:
        """Draft at most K tokens, each for certain; hold the committed tokens."""
        began_s = time.perf_counter()
        held = self._held.setdefault(session.session_id, _Held(SuffixIndex(self._shortest, self._longest)))
        self._held.move_to_end(session.session_id)
        async with held.lock:
            index = held.index
            if len(index.tokens) < ask.start:
                return Drafted(Proposal(), len(index.tokens))
            await self._bring_up_to_date(index, ask)
            tokens = tuple(index.continuation(ask.num_draft_tokens))
        self._evict(len(ask.tokens))
        rows = tuple(SparseDistribution((token,), (1.0,)) for token in tokens)
        timing = Timing(total_s=time.perf_counter() - began_s)
        return Drafted(Proposal(tokens, rows), ask.committed_length, timing)

    async def _bring_up_to_date(self, index: SuffixIndex, ask: DraftRequest) -> None:
        """Truncate and append, but leave alone what is the same: the index is a function of the text alone."""
        num_matching = num_equal(index.tokens[ask.start :], ask.tokens)
        index.truncate(ask.start + num_matching)
        for count, token in enumerate(ask.tokens[num_matching:], start=1):
            index.append(token)
            if count % INDEX_CHUNK_TOKENS == 0:
                await asyncio.sleep(0)

    def _evict(self, num_new: int) -> None:
        """Forget the least recently used sessions, but never the last one; count only now and then."""
        self._num_unchecked += num_new
        if self._num_unchecked < self._max_held_tokens // 64:
            return
        self._num_unchecked = 0
        num_tokens = sum(len(held.index.tokens) for held in self._held.values())
        while num_tokens > self._max_held_tokens and len(self._held) > 1:
            _, held = self._held.popitem(last=False)
            num_tokens -= len(held.index.tokens)

    def go_ahead(self, session: Session, ask: DraftRequest, proposal: Proposal) -> None:
        """Nothing to do ahead: a lookup costs nothing."""

    def leave(self, session: Session) -> None:
        """Nothing is under way."""

    def forget(self, session: Session) -> None:
        """Free the session's text."""
        self._held.pop(session.session_id, None)
