"""Drafting with a small language model: K forwards a round, batched with every other session that drafts.

Draft-ahead: while the target scores a proposal and nobody else asks, the worker assumes that all of it will be
accepted, guesses the token that will close the round, and drafts the round that would follow. It asks itself what the
coordinator would ask, with that round's keys: where the guess was right the answer is what it would draw now (bit for
bit, in forwards of the same shape); where it was wrong it is thrown away. This is a cache: no distribution and no
key depends on it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from draft_service.drafters import Drafted, DraftRequest
from draft_service.metrics import METRICS, count_ahead
from specdec.engine import CacheMiss, EngineError, EngineLoop, Task, Timings
from specdec.engine.held import HeldTokens
from specdec.errors import NonFiniteLogitsError
from specdec.exact.randomness import Purpose, uniforms
from specdec.exact.sampling import SamplingContext, draft_distributions, draw
from specdec.exact.values import Proposal, SparseDistribution, Timing
from specdec.serving.model_worker import run_task
from specdec.serving.session_stream import Session
from specdec.types import ModelInfo

NOTHING = Proposal()


class ProposeTask(Task[Proposal]):
    """One session's round in the engine: the committed tokens, then each draft token but the last.

    It goes on from `begun`, what was drafted of the round before, and ends early, with at least one more token, once
    `interrupted` says so.
    """

    def __init__(
        self,
        session: Session,
        ask: DraftRequest,
        held: HeldTokens,
        match: bool,
        begun: Proposal = NOTHING,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(session.session_id, ask.start, list(ask.tokens), min(1, ask.num_draft_tokens))
        self.session = session
        self.ask = ask
        self.uniforms = uniforms(session.seed, ask.committed_length, ask.num_draft_tokens, Purpose.DRAFT)
        self.drawn: list[int] = []
        self.rows: list[SparseDistribution] = []
        self._held = held
        self._match = match
        self._begun = begun
        self._interrupted = interrupted

    def prepare(self) -> None:
        """Truncate to `start`; keep what the cache holds of the tokens where a stream or `begun` says that it may."""
        self.drawn, self.rows = list(self._begun.tokens), list(self._begun.rows)
        tokens, match = [*self.ask.tokens, *self.drawn], self._match or bool(self.drawn)
        self.tokens = self._held.resume(self.sequence, self.start, tokens, self.num_rows, match)
        if not self.tokens:
            self.finish(NOTHING)

    def context(self) -> SamplingContext:
        """Return what the next row depends on."""
        sampling = self.session.sampling
        if not sampling.has_penalties:
            return SamplingContext(sampling)
        text, num_prompt = self._held.of(self.sequence), self.session.num_prompt_tokens
        return SamplingContext(sampling, text[:num_prompt], text[num_prompt:])

    def draw_from(self, row: SparseDistribution) -> None:
        """Draw from the row; go on with the token, or end with the K-th: nobody needs the state behind that one."""
        token = draw(row, self.uniforms[len(self.drawn)])
        self.drawn.append(token)
        self.rows.append(row)
        if len(self.drawn) == self.ask.num_draft_tokens or self._interrupted():
            self.finish(Proposal(tuple(self.drawn), tuple(self.rows)))
            return
        self._held.of(self.sequence).append(token)
        self.tokens, self.num_rows = [token], 1


class GuessTask(ProposeTask):
    """Reads a proposal's last token and guesses what the target will close the round with: the likeliest token.

    It draws nothing: a guess uses no key.
    """

    def draw_from(self, row: SparseDistribution) -> None:
        """End with the likeliest token."""
        _, token = max(zip(row.probs, row.token_ids, strict=True))
        self.finish(Proposal((token,), (row,)))


class DraftProcessor:
    """Turns logits into draft tokens; the engine's processor."""

    def __init__(self, vocab_size: int, support_mass: float, support_max: int) -> None:
        self._vocab_size = vocab_size
        self._support_mass = support_mass
        self._support_max = support_max

    def __call__(self, tasks: Sequence[ProposeTask], logits: torch.Tensor) -> None:
        """Give each task its next token from logits [number of tasks that want one, V]."""
        METRICS.observe_batch(len(tasks))
        drafting = [task for task in tasks if task.num_rows]
        for task in tasks:
            if not task.num_rows:
                task.finish(NOTHING)
        if not drafting:
            return
        contexts = [task.context() for task in drafting]
        rows = draft_distributions(logits, contexts, self._vocab_size, self._support_mass, self._support_max)
        for task, row in zip(drafting, rows, strict=True):
            if row.token_ids:
                task.draw_from(row)
            else:
                task.fail(NonFiniteLogitsError("the draft model's logits for this session are not finite"))


@dataclass(frozen=True, slots=True)
class Ahead:
    """A round that was drafted, or begun, before anybody asked for it."""

    session: Session
    ask: DraftRequest
    proposal: Proposal

    def answers(self, session: Session, ask: DraftRequest) -> bool:
        """Say whether this is the round that is asked for; how many tokens it may have does not change them."""
        return session == self.session and replace(ask, num_draft_tokens=self.ask.num_draft_tokens) == self.ask


class ModelDrafter:
    """Drafts with the engine's model."""

    name = "model"

    def __init__(self, engine: EngineLoop[Any], model: ModelInfo, draft_ahead: bool) -> None:
        self.model = model
        self._engine = engine
        self._held = HeldTokens()
        self._draft_ahead = draft_ahead
        self._ahead: dict[str, tuple[Session, asyncio.Task[Ahead | None]]] = {}  # by session id; the stream's Session
        self._num_asking = 0

    async def propose(self, session: Session, ask: DraftRequest, match: bool) -> Drafted:
        """Draft K tokens, fewer where the context ends; hold the committed tokens and all draft tokens but the last."""
        began_s = time.perf_counter()
        ask = self._within_context(ask)
        self._num_asking += 1  # whoever drafts ahead makes way
        try:
            begun = await self._begun(session, ask)
            if ask.num_draft_tokens and len(begun) == ask.num_draft_tokens:
                proposal, timings = begun, Timings(total_s=time.perf_counter() - began_s)
            else:
                task = ProposeTask(session, ask, self._held, match, begun)
                proposal, timings = await run_task(self._engine, task), task.timings
        except CacheMiss as miss:
            return Drafted(NOTHING, miss.cached_len)
        finally:
            self._num_asking -= 1
        METRICS.observe_round(len(proposal), timings)
        timing = Timing(timings.queue_s, timings.forward_s, timings.total_s)
        return Drafted(proposal, ask.committed_length + max(0, len(proposal) - 1), timing)

    def _within_context(self, ask: DraftRequest) -> DraftRequest:
        """DraftRequest for no more than the context has room for; the last draft token is never fed."""
        room = max(0, self.model.context_length + 1 - ask.committed_length)
        return replace(ask, num_draft_tokens=min(ask.num_draft_tokens, room))

    async def _begun(self, session: Session, ask: DraftRequest) -> Proposal:
        """Return what was drafted ahead of this round; whatever it is, it is not used again."""
        _, running = self._ahead.pop(session.session_id, (None, None))
        ahead = await running if running else None
        if ahead is None:
            return NOTHING
        hit = ahead.answers(session, ask)
        count_ahead(hit)
        tokens, rows = ahead.proposal.tokens, ahead.proposal.rows
        return Proposal(tokens[: ask.num_draft_tokens], rows[: ask.num_draft_tokens]) if hit else NOTHING

    def go_ahead(self, session: Session, ask: DraftRequest, proposal: Proposal) -> None:
        """Draft the round that would follow `proposal`, unless somebody is asking now. Returns at once."""
        # what the coordinator asks behind full acceptance: the last draft token, which was not fed, and the closing one
        start = ask.committed_length + len(proposal) - 1
        if self._draft_ahead and proposal and not self._num_asking and start < self.model.context_length:
            following = DraftRequest(start, proposal.tokens[-1:], ask.num_draft_tokens)
            self._ahead[session.session_id] = session, asyncio.create_task(self._drafted_ahead(session, following))

    async def _drafted_ahead(self, session: Session, ask: DraftRequest) -> Ahead | None:
        """Guess the closing token and draft behind it until somebody asks; None if nothing came of it."""
        if self._is_asked():
            return None
        with suppress(EngineError, NonFiniteLogitsError):
            guessing = GuessTask(session, replace(ask, num_draft_tokens=1), self._held, match=False)
            guess: Proposal = await self._engine.run(guessing)
            ask = self._within_context(DraftRequest(ask.start, [*ask.tokens, *guess.tokens], ask.num_draft_tokens))
            if ask.num_draft_tokens and not self._is_asked():
                task = ProposeTask(session, ask, self._held, match=False, interrupted=self._is_asked)
                return Ahead(session, ask, await self._engine.run(task))
        return None

    def _is_asked(self) -> bool:
        """Say whether any session waits for its draft; called on the engine thread too."""
        return self._num_asking > 0

    def leave(self, session: Session) -> None:
        """Stop drafting ahead for a stream that has ended, not for another one of the same session."""
        owner, running = self._ahead.get(session.session_id, (None, None))
        if running and owner is session:
            del self._ahead[session.session_id]
            running.cancel()

    def forget(self, session: Session) -> None:
        """Free the session's cache."""
        self._engine.forget(session.session_id)
