"""Drafting with a small language model; the rounds that may follow are drafted ahead (`ahead.py`)."""

import asyncio
import time
from dataclasses import replace
from typing import Any

from draft_service.drafter import NO_OBSERVATIONS, DraftResult
from draft_service.metrics import METRICS, count_ahead
from draft_service.model.ahead import NONE_FOUND, HeldText, OutcomeDrafter, RoundsAhead
from draft_service.model.drafted import NOTHING
from draft_service.model.tasks import ProposeTask
from specdec.drafting.request import DraftRequest
from specdec.engine import CacheMiss, EngineLoop, TaskTimes
from specdec.exact.values import Proposal, Timing
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.model_worker import run_task
from specdec.serving.session_stream import WorkerSession
from specdec.types import ModelInfo


class ModelDrafter:
    """Drafts with the engine's model."""

    observations = NO_OBSERVATIONS

    def __init__(
        self,
        name: str,
        engine: EngineLoop[Any],
        model: ModelInfo,
        num_outcomes: int,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.grammars = grammars
        self._engine = engine
        self._num_outcomes = num_outcomes
        self._outcomes = OutcomeDrafter(engine, self._within_context, self._is_asked, num_outcomes)
        self._rounds = dict[str, RoundsAhead]()  # by session key; since the latest answer
        self._num_asking = 0

    async def propose(self, session: WorkerSession, request: DraftRequest, match: bool) -> DraftResult:
        """Draft K tokens, fewer where the context ends; hold the committed tokens and all draft tokens but the last."""
        request = self._within_context(request)
        self._num_asking += 1  # interrupts drafting ahead
        try:
            rounds, timings = await self._answered(session, request, match)
        except CacheMiss as miss:
            return DraftResult(NOTHING, miss.cached_len)
        finally:
            self._num_asking -= 1
        self._rounds[session.key] = rounds
        proposal = rounds.drafted.proposal
        METRICS.observe_round(len(proposal), timings)
        timing = Timing(timings.queue_s, timings.forward_s, timings.total_s)
        return DraftResult(proposal, request.committed_length + max(0, len(proposal) - 1), timing)

    def _within_context(self, request: DraftRequest) -> DraftRequest:
        """Limit K to the room in the context; the last draft token is never fed."""
        room = max(0, self.model.context_length + 1 - request.committed_length)
        return replace(request, num_draft_tokens=min(request.num_draft_tokens, room))

    async def _answered(
        self, session: WorkerSession, request: DraftRequest, match: bool
    ) -> tuple[RoundsAhead, TaskTimes]:
        """Answer a request with what was drafted ahead, as far as it is the round that is asked for."""
        began_s = time.perf_counter()
        before = self._rounds.pop(session.key, None)
        found = before.found(session, request) if before else NONE_FOUND
        if before and not found.is_whole:
            await before.ended()
            found = before.found(session, request)
        if before and before.rounds:
            count_ahead(len(before.rounds), found.ahead.seconds if found.ahead else None)
        if before and found.ahead and found.is_whole:
            before.stop()
            held, is_scattered = before.held_after(found.ahead, found.drafted.proposal)
            times = TaskTimes(total_s=time.perf_counter() - began_s)
            return RoundsAhead(session, request, found.drafted, held, is_scattered), times
        if before and before.is_scattered and (whole := before.held.request_from(request)) is not request:
            request, match = whole, True
        task = ProposeTask(session, request, match, found.drafted)
        await run_task(self._engine, task)
        length = request.committed_length
        held = HeldText(length, task.digest, task.drafted.proposal.tokens, length)
        return RoundsAhead(session, request, task.drafted, held), task.timings

    def draft_ahead(self, session: WorkerSession, request: DraftRequest, proposal: Proposal) -> None:
        """Draft the rounds that may follow `proposal`, unless a request is waiting. Returns at once."""
        rounds = self._rounds.get(session.key)
        is_idle = self._num_outcomes and not self._num_asking
        if rounds and rounds.session is session and rounds.drafted.proposal and is_idle:
            rounds.running = asyncio.create_task(self._outcomes.draft(rounds))

    def _is_asked(self) -> bool:
        """Return whether any session waits for its draft; called on the engine thread too."""
        return self._num_asking > 0

    def abandon(self, session: WorkerSession, is_latest: bool) -> None:
        """Stop drafting ahead for a stream that has ended, not for another one of the same session."""
        rounds = self._rounds.get(session.key)
        if rounds and rounds.session is session:
            self._rounds.pop(session.key).stop()
        if is_latest:
            self._engine.leave(session.key)  # its cache may make room for others at once

    def forget(self, session: WorkerSession) -> None:
        """Free the session's cache, and stop drafting ahead for any of its streams."""
        if rounds := self._rounds.pop(session.key, None):
            rounds.stop()
        self._engine.forget(session.key)
