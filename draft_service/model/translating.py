"""Drafting with a model of another tokenizer (Timor et al. 2025, token-level intersection).

The draft model reads the session's text in its own tokens. Its distribution is restricted to the tokens that both
vocabularies have, moved to the target's ids, put under the sampling parameters there, and drawn from: it depends on
committed text and on the draft's own tokens alone, so the text's distribution stays the target's.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from draft_service.metrics import METRICS
from draft_service.model.reencoding import ReencodedText
from draft_service.model.tasks import DraftProcessor, ProposeTask
from draft_service.model.vocabulary import SharedVocabulary
from draft_service.session_texts import TextDrafter
from specdec.drafting.request import DraftRequest
from specdec.engine import CacheMiss, EngineLoop
from specdec.exact.randomness import Purpose, uniforms
from specdec.exact.sampling import SamplingContext
from specdec.exact.values import Proposal
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.model_worker import run_task
from specdec.serving.session_stream import WorkerSession
from specdec.types import ModelInfo


class TranslatedTask(ProposeTask):
    """A round whose drafts are the target's tokens and whose forwards read the draft's."""

    def __init__(
        self, session: WorkerSession, given: DraftRequest, committed: Sequence[int], vocabulary: SharedVocabulary
    ) -> None:
        super().__init__(session, given, match=True)
        # keys and races are the round's, as the coordinator counts its tokens
        self.uniforms = uniforms(session.seed, len(committed), given.num_draft_tokens, Purpose.DRAFT)
        self.place = len(committed)
        self._committed = committed
        self._draft_of = vocabulary.draft_of

    def context(self) -> SamplingContext:
        """Return what the next distribution depends on, in the target's tokens."""
        sampling, num_prompt = self.session.sampling, self.session.num_prompt_tokens
        completion, grammar = self._committed[num_prompt:], self.session.grammar.text
        known = 0, self._committed, len(self._committed), num_prompt
        allowed = grammar.allowed_in_draft(*known, self.drawn) if grammar else None
        return SamplingContext(sampling, self._committed[:num_prompt], [*completion, *self.drawn], allowed=allowed)

    def to_feed(self, token: int) -> int:
        """Return the draft's id of a drawn token."""
        return self._draft_of[token]


class TranslatingProcessor(DraftProcessor):
    """Turns logits of the draft's vocabulary into draft tokens of the target's."""

    def __init__(self, vocabulary: SharedVocabulary, support_mass: float, support_max: int) -> None:
        super().__init__(vocabulary.num_target_ids, support_mass, support_max)
        self._target_ids = torch.tensor(list(vocabulary.draft_of))
        self._draft_ids = torch.tensor(list(vocabulary.draft_of.values()))

    def in_target_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Move logits [N, draft's V] of shared tokens to the target's ids [N, target's V]; others are impossible."""
        moved = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        moved[:, self._target_ids.to(logits.device)] = logits[:, self._draft_ids.to(logits.device)]
        return moved


class TranslatingDrafter(TextDrafter[ReencodedText]):
    """Drafts with the engine's model, whose tokenizer is not the target's; nothing is drafted ahead."""

    def __init__(
        self,
        name: str,
        engine: EngineLoop[Any],
        model: ModelInfo,
        vocabulary: SharedVocabulary,
        new_text: Callable[[], ReencodedText],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        super().__init__(name, new_text)
        self.grammars = grammars
        self._context_length = model.context_length
        # sessions are checked in the target's tokens, of which there may be more than the draft's context holds
        self.model = replace(model, vocab_size=vocabulary.num_target_ids, context_length=self.model.context_length)
        self._engine = engine
        self._vocabulary = vocabulary

    async def drafted(
        self, session: WorkerSession, text: ReencodedText, num_draft_tokens: int, stop_below: float = 0.0
    ) -> Proposal:
        """Return a chain of at most K tokens, fewer where the draft's context ends."""
        request = DraftRequest(text.num_sent, (), num_draft_tokens, stop_below=stop_below)
        try:
            return await self._drafted(session, text, request)
        except CacheMiss:
            return await self._drafted(session, text, replace(request, start=0))

    async def _drafted(self, session: WorkerSession, text: ReencodedText, request: DraftRequest) -> Proposal:
        """Feed the text's draft tokens from the request's start on, and draft. Raises CacheMiss."""
        start, tokens = request.start, text.draft_tokens(request.start)
        count = min(request.num_draft_tokens, self._context_length + 1 - start - len(tokens))
        if count < 1 or not start + len(tokens):
            return Proposal()
        given = replace(request, tokens=tokens, num_draft_tokens=count)
        task = TranslatedTask(session, given, list(text.tokens), self._vocabulary)
        proposal: Proposal = await run_task(self._engine, task)
        text.num_sent = text.num_finished
        METRICS.observe_round(len(proposal), task.timings)
        return proposal

    def forget(self, session: WorkerSession) -> None:
        """Free the session's text and cache."""
        super().forget(session)
        self._engine.forget(session.key)
