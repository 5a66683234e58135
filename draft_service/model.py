"""Drafting with a small language model: K forwards a round, batched with every other session that drafts."""

from collections.abc import Sequence
from typing import Any

import torch

from draft_service.drafters import Ask, Drafted
from draft_service.metrics import METRICS
from specdec.claims import Session
from specdec.engine import CacheMiss, EngineLoop, Task
from specdec.errors import NonFiniteRow
from specdec.held import HeldTokens
from specdec.randomness import Purpose, uniforms
from specdec.sampling import RowContext, drafting_rows, draw
from specdec.types import ModelInfo, Proposal, Row, Timing
from specdec.worker import run_task


class ProposeTask(Task[Proposal]):
    """One session's round in the engine: the committed tokens, then each draft token but the last."""

    def __init__(self, session: Session, ask: Ask, held: HeldTokens, match: bool) -> None:
        super().__init__(session.session_id, ask.start, list(ask.tokens), min(1, ask.num_draft_tokens))
        self.session = session
        self.ask = ask
        self.uniforms = uniforms(session.seed, ask.committed_length, ask.num_draft_tokens, Purpose.DRAFT)
        self.drawn: list[int] = []
        self.rows: list[Row] = []
        self._held = held
        self._match = match

    def prepare(self) -> None:
        """Truncate to `start`; where a stream begins, keep what the cache holds of its tokens already."""
        self.drawn, self.rows = [], []
        self.tokens = self._held.resume(self.sequence, self.start, self.tokens, self.num_rows, self._match)
        if not self.tokens:
            self.finish(Proposal())

    def context(self) -> RowContext:
        """Return what the next row depends on."""
        sampling = self.session.sampling
        if not sampling.has_penalties:
            return RowContext(sampling)
        text, num_prompt = self._held.of(self.sequence), self.session.num_prompt_tokens
        return RowContext(sampling, text[:num_prompt], text[num_prompt:])

    def draw_from(self, row: Row) -> None:
        """Draw from the row; go on with the token, or end with the K-th: nobody needs the state behind that one."""
        token = draw(row, self.uniforms[len(self.drawn)])
        self.drawn.append(token)
        self.rows.append(row)
        if len(self.drawn) == self.ask.num_draft_tokens:
            self.finish(Proposal(tuple(self.drawn), tuple(self.rows)))
            return
        self._held.of(self.sequence).append(token)
        self.tokens, self.num_rows = [token], 1


class RowDrawer:
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
                task.finish(Proposal())
        if not drafting:
            return
        contexts = [task.context() for task in drafting]
        rows = drafting_rows(logits, contexts, self._vocab_size, self._support_mass, self._support_max)
        for task, row in zip(drafting, rows, strict=True):
            if row.token_ids:
                task.draw_from(row)
            else:
                task.fail(NonFiniteRow("the draft model's logits for this session are not finite"))


class ModelDrafter:
    """Drafts with the engine's model."""

    name = "model"

    def __init__(self, engine: EngineLoop[Any], model: ModelInfo) -> None:
        self.model = model
        self._engine = engine
        self._held = HeldTokens()

    async def propose(self, session: Session, ask: Ask, match: bool) -> Drafted:
        """Draft K tokens, fewer where the context ends; hold the committed tokens and all draft tokens but the last."""
        # the last draft token is never fed
        room = max(0, self.model.context_length + 1 - ask.committed_length)
        ask = Ask(ask.start, ask.tokens, min(ask.num_draft_tokens, room))
        task = ProposeTask(session, ask, self._held, match)
        try:
            proposal = await run_task(self._engine, task)
        except CacheMiss as miss:
            return Drafted(Proposal(), miss.cached_length)
        METRICS.observe_round(len(proposal), task.timings)
        timing = Timing(task.timings.queue_s, task.timings.forward_s, task.timings.total_s)
        return Drafted(proposal, ask.committed_length + max(0, len(proposal) - 1), timing)

    def forget(self, session: Session) -> None:
        """Free the session's cache."""
        self._engine.forget(session.session_id)
