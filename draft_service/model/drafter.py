"""Drafting with a small language model.

Draft-ahead: while the target scores a proposal and no request waits, the worker assumes that all of it will be
accepted, guesses the token that will close the round, and drafts the round that would follow. It makes the request that
the coordinator would make, with that round's keys: where the guess was right the answer is what it would draw now (bit
for bit, in forwards of the same shape); where it was wrong it is discarded. This is a cache: no distribution and no key
depends on it.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from draft_service.drafter import NO_OBSERVATIONS, DraftResult
from draft_service.metrics import METRICS, count_ahead
from draft_service.model.tasks import NOTHING, GuessTask, ProposeTask
from specdec.drafting.request import DraftRequest
from specdec.engine import CacheMiss, EngineError, EngineLoop, TaskTimes
from specdec.errors import NonFiniteLogitsError
from specdec.exact.prefix import chain
from specdec.exact.values import Proposal, Timing
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.model_worker import run_task
from specdec.serving.session_stream import WorkerSession
from specdec.types import ModelInfo


@dataclass(frozen=True, slots=True)
class Ahead:
    """A round that was drafted, or begun, before its request."""

    session: WorkerSession
    accepted: tuple[int, ...]  # draft tokens of the round before, as far as `request` does not have them
    request: DraftRequest
    proposal: Proposal
    chances: tuple[float, ...]  # of its tokens, when each was about to be drawn
    stopped_chance: float | None  # of the token before which it stopped; None: it was interrupted, or is whole
    digest: bytes  # of the text that it follows, as the cache holds it

    def answers(self, session: WorkerSession, request: DraftRequest) -> bool:
        """Return whether this is the requested round: the same text, whatever part of it the request repeats."""
        if session != self.session or request.committed_length != self.request.committed_length:
            return False
        if [*self.accepted, *self.request.tokens][-len(request.tokens) :] != list(request.tokens):
            return False
        return request.prefix_digest is None or chain(request.prefix_digest, request.tokens) == self.digest

    def begun(self, request: DraftRequest) -> "Begun":
        """Return as much of it as the request would have drawn, which may stop elsewhere than was expected."""
        likely = sum(1 for _ in takewhile(lambda chance: chance >= request.stop_below, self.chances))
        size = min(likely, request.num_draft_tokens)
        has_stopped = self.stopped_chance is not None and self.stopped_chance < request.stop_below
        is_whole = size == request.num_draft_tokens or size < len(self.chances) or has_stopped
        proposal = Proposal(self.proposal.tokens[:size], self.proposal.distributions[:size])
        return Begun(proposal, self.chances[size - 1] if size else 1.0, is_whole)


@dataclass(frozen=True, slots=True)
class Begun:
    """The beginning of a round that was drafted ahead."""

    proposal: Proposal = NOTHING
    chance: float = 1.0  # of its last token
    is_whole: bool = False  # there is nothing to add


class ModelDrafter:
    """Drafts with the engine's model."""

    observations = NO_OBSERVATIONS

    def __init__(
        self,
        name: str,
        engine: EngineLoop[Any],
        model: ModelInfo,
        drafts_ahead: bool,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.grammars = grammars
        self._engine = engine
        self._drafts_ahead = drafts_ahead
        self._ahead: dict[
            str, tuple[WorkerSession, asyncio.Task[Ahead | None]]
        ] = {}  # by session key; the stream's WorkerSession
        self._num_asking = 0

    async def propose(self, session: WorkerSession, request: DraftRequest, match: bool) -> DraftResult:
        """Draft K tokens, fewer where the context ends; hold the committed tokens and all draft tokens but the last."""
        began_s = time.perf_counter()
        request = self._within_context(request)
        self._num_asking += 1  # interrupts drafting ahead
        try:
            begun = await self._begun(session, request)
            if request.num_draft_tokens and begun.is_whole:
                proposal, timings = begun.proposal, TaskTimes(total_s=time.perf_counter() - began_s)
            else:
                task = ProposeTask(session, request, match, begun.proposal, begun_chance=begun.chance)
                proposal, timings = await run_task(self._engine, task), task.timings
        except CacheMiss as miss:
            return DraftResult(NOTHING, miss.cached_len)
        finally:
            self._num_asking -= 1
        METRICS.observe_round(len(proposal), timings)
        timing = Timing(timings.queue_s, timings.forward_s, timings.total_s)
        return DraftResult(proposal, request.committed_length + max(0, len(proposal) - 1), timing)

    def _within_context(self, request: DraftRequest) -> DraftRequest:
        """Limit K to the room in the context; the last draft token is never fed."""
        room = max(0, self.model.context_length + 1 - request.committed_length)
        return replace(request, num_draft_tokens=min(request.num_draft_tokens, room))

    async def _begun(self, session: WorkerSession, request: DraftRequest) -> Begun:
        """Return what was drafted ahead of this round; it is used at most once."""
        _, running = self._ahead.pop(session.key, (None, None))
        ahead = await running if running else None
        if ahead is None:
            return Begun()
        hit = ahead.answers(session, request)
        count_ahead(hit)
        return ahead.begun(request) if hit else Begun()

    def draft_ahead(self, session: WorkerSession, request: DraftRequest, proposal: Proposal) -> None:
        """Draft the round that would follow `proposal`, unless a request is waiting. Returns at once."""
        if self._drafts_ahead and proposal and not self._num_asking:
            drafting = self._drafted_ahead(session, request, proposal)
            self._ahead[session.key] = session, asyncio.create_task(drafting)

    async def _drafted_ahead(self, session: WorkerSession, request: DraftRequest, proposal: Proposal) -> Ahead | None:
        """Guess the closing token and draft after it until a request arrives; None if nothing was drafted."""
        *accepted, last = proposal.tokens  # the last one was not fed
        num_committed, start = request.committed_length, request.committed_length + len(accepted)
        if self._is_asked() or start >= self.model.context_length:
            return None
        with suppress(EngineError, NonFiniteLogitsError):
            guessing = DraftRequest(start, [last], 1)
            task: ProposeTask = GuessTask(session, guessing, match=False, num_committed=num_committed)
            guess: Proposal = await self._engine.run(task)
            tokens = [last, *guess.tokens]
            following = self._within_context(replace(request, start=start, tokens=tokens, prefix_digest=None))
            if following.num_draft_tokens and not self._is_asked():
                asked = self._is_asked
                task = ProposeTask(session, following, match=False, interrupted=asked, num_committed=num_committed)
                drafted = await self._engine.run(task)
                chances = tuple(task.chances)
                return Ahead(session, tuple(accepted), following, drafted, chances, task.stopped_chance, task.digest)
        return None

    def _is_asked(self) -> bool:
        """Return whether any session waits for its draft; called on the engine thread too."""
        return self._num_asking > 0

    def abandon(self, session: WorkerSession, is_latest: bool) -> None:
        """Stop drafting ahead for a stream that has ended, not for another one of the same session."""
        owner, running = self._ahead.get(session.key, (None, None))
        if running and owner is session:
            del self._ahead[session.key]
            running.cancel()
        if is_latest:
            self._engine.leave(session.key)  # its cache may make room for others at once

    def forget(self, session: WorkerSession) -> None:
        """Free the session's cache, and stop drafting ahead for any of its streams."""
        _, running = self._ahead.pop(session.key, (None, None))
        if running:
            running.cancel()
        self._engine.forget(session.key)
