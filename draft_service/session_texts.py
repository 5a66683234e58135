"""A base for drafters that need only the session's tokens: it keeps, updates and evicts them."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from draft_service.drafter import NO_OBSERVATIONS, DraftResult
from specdec.drafting.request import DraftRequest
from specdec.exact.prefix import PrefixChain, num_equal
from specdec.exact.values import Observations, Proposal, Timing
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.session_stream import WorkerSession
from specdec.types import ModelInfo

MAX_HELD_TOKENS = 1 << 20  # of all sessions; an indexed token takes up to 600 bytes
SESSION_TOKENS = 4  # what a session counts for besides its tokens: an empty text takes 2 kB
CHUNK_TOKENS = 1000  # some milliseconds of work before the event loop may run


class SessionText(Protocol):
    """A session's tokens, indexed as the drafter needs them: a function of the tokens alone."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens."""
        ...

    def append(self, token: int) -> None:
        """Add a token."""
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        ...


TextT = TypeVar("TextT", bound=SessionText)


class _Held(Generic[TextT]):
    """One session's text."""

    def __init__(self, text: TextT) -> None:
        self.text = text
        self.chain = PrefixChain()  # over the text's tokens
        self.lock = asyncio.Lock()  # an old stream and its successor may both have a message under way

    async def bring_up_to_date(self, request: DraftRequest) -> None:
        """Truncate and append, but keep what is the same."""
        text = self.text
        num_matching = num_equal(text.tokens[request.start :], request.tokens)
        self.chain.truncate(request.start + num_matching)
        await _truncate(text, request.start + num_matching)
        for count, token in enumerate(request.tokens[num_matching:], start=1):
            text.append(token)
            if count % CHUNK_TOKENS == 0:
                self.chain.digest(text.tokens, len(text.tokens))
                await asyncio.sleep(0)


class TextDrafter(Generic[TextT]):
    """Drafts from the session's own tokens. A subclass defines what to draft; nothing is drafted ahead."""

    observations = NO_OBSERVATIONS
    grammars: GrammarCompiler | None = None

    def __init__(self, name: str, new_text: Callable[[], TextT], max_held_tokens: int = MAX_HELD_TOKENS) -> None:
        self.name = name
        self.model = ModelInfo(name, context_length=max_held_tokens)  # a longer text is refused
        self._new_text = new_text
        self._max_held_tokens = max_held_tokens
        self._num_unchecked = 0  # tokens added since the last count
        self._held: OrderedDict[str, _Held[TextT]] = OrderedDict()  # least recently used first

    def draft(self, session: WorkerSession, text: TextT, num_draft_tokens: int, stop_below: float = 0.0) -> Proposal:
        """Return a proposal of at most `num_draft_tokens` tokens that continues `text`.

        It may leave out candidates that are accepted with less than a chance of `stop_below`, by its own judgement.
        """
        raise NotImplementedError

    async def drafted(
        self, session: WorkerSession, text: TextT, num_draft_tokens: int, stop_below: float = 0.0
    ) -> Proposal:
        """Return what `draft` returns; a drafter that must wait for it overrides this method in its place."""
        return self.draft(session, text, num_draft_tokens, stop_below)

    def observe(self, session: WorkerSession, text: TextT, observations: Observations) -> None:
        """Take in what the target observed."""

    def finished(self, session: WorkerSession, text: TextT) -> None:
        """Take the text of a session that is over, instead of freeing it."""

    async def propose(self, session: WorkerSession, request: DraftRequest, match: bool) -> DraftResult:
        """Draft at most K tokens; hold the committed tokens."""
        began_s = time.perf_counter()
        if request.start and session.key not in self._held:
            return DraftResult(Proposal(), 0)
        held = self._hold(session)
        async with held.lock:
            text = held.text
            if len(text.tokens) < request.start:
                return DraftResult(Proposal(), len(text.tokens))
            if not held.chain.proves(text.tokens, request.start, request.prefix_digest):
                return DraftResult(Proposal(), 0)
            await held.bring_up_to_date(request)
            if request.observations:
                self.observe(session, text, request.observations)
            count = request.num_draft_tokens
            proposal = await self.drafted(session, text, count, request.stop_below) if count else Proposal()
        self._evict(SESSION_TOKENS + len(request.tokens))
        return DraftResult(proposal, request.committed_length, Timing(total_s=time.perf_counter() - began_s))

    def _hold(self, session: WorkerSession) -> _Held[TextT]:
        held = self._held.setdefault(session.key, _Held(self._new_text()))
        self._held.move_to_end(session.key)
        return held

    @property
    def num_sessions(self) -> int:
        """Sessions of which a text is held."""
        return len(self._held)

    @property
    def num_held_tokens(self) -> int:
        """Tokens of all sessions that are held."""
        return sum(len(held.text.tokens) for held in self._held.values())

    def _evict(self, num_new: int) -> None:
        """Forget the least recently used sessions, but never the last one; count only occasionally."""
        self._num_unchecked += num_new
        if self._num_unchecked < self._max_held_tokens // 64:
            return
        self._num_unchecked = 0
        num_tokens = self.num_held_tokens + SESSION_TOKENS * self.num_sessions
        while num_tokens > self._max_held_tokens and len(self._held) > 1:
            _, held = self._held.popitem(last=False)
            num_tokens -= len(held.text.tokens) + SESSION_TOKENS

    def draft_ahead(self, session: WorkerSession, request: DraftRequest, proposal: Proposal) -> None:
        """Do nothing: a lookup costs nothing."""

    def abandon(self, session: WorkerSession, is_latest: bool) -> None:
        """Do nothing: nothing runs in the background."""

    def forget(self, session: WorkerSession) -> None:
        """Free the session's text."""
        held = self._held.pop(session.key, None)
        if held:
            self.finished(session, held.text)


async def _truncate(text: SessionText, length: int) -> None:
    for end in range(len(text.tokens) - CHUNK_TOKENS, length, -CHUNK_TOKENS):
        text.truncate(end)
        await asyncio.sleep(0)
    text.truncate(length)
