"""Drafting by retrieval: what followed the longest matches of the text's end, in all text that the worker knows.

That is the session itself, finished sessions of the same target, and a corpus given at the start. Long matches give
long drafts, frequencies choose where they part, and the draft is a tree (Oliaro et al. 2024, "SuffixDecoding"; Hu et
al. 2024, "SAM Decoding"; He et al. 2023, "REST"). It needs no model, and serves any target.
"""

from contextlib import AsyncExitStack
from pathlib import Path

from pydantic import BaseModel, Field

from draft_service.context_index import ContextIndex
from draft_service.corpus import corpus_files, corpus_index
from draft_service.drafter import DrafterKind
from draft_service.finished_texts import FinishedTexts
from draft_service.found import found_before, found_in
from draft_service.session_texts import MAX_HELD_TOKENS, TextDrafter
from specdec.drafting.candidate_tree import grow, no_successors
from specdec.exact.values import Proposal
from specdec.serving.background import in_background
from specdec.serving.process import supervised
from specdec.serving.server import Server
from specdec.serving.session_stream import WorkerSession


class SuffixSettings(BaseModel):
    """Settings of the drafter `suffix`."""

    suffix_shared_tokens: int = Field(
        1 << 18, ge=0, le=1 << 24, description="tokens of finished sessions that the drafter `suffix` finds; 0: none"
    )
    suffix_corpus: Path | None = Field(None, description="text file, or folder of them, that `suffix` finds text in")
    suffix_tokenizer: str | None = Field(None, description="hub id or folder of the target; for --suffix-corpus")


class SuffixDrafter(TextDrafter[ContextIndex]):
    """Drafts a tree of what followed before."""

    def __init__(
        self,
        finished: FinishedTexts,
        corpus: ContextIndex | None = None,
        max_held_tokens: int = MAX_HELD_TOKENS,
    ) -> None:
        super().__init__("suffix", ContextIndex, max_held_tokens)
        self._finished_texts = finished
        self._corpora = [corpus] if corpus else []

    def draft(
        self, session: WorkerSession, text: ContextIndex, num_draft_tokens: int, stop_below: float = 0.0
    ) -> Proposal:
        """Return a tree of at most `num_draft_tokens` tokens."""
        context = text.context()
        continuations = found_before(text, num_draft_tokens)
        for other in [*self._finished_texts.visible_to(session), *self._corpora]:
            continuations += found_in(other, context, num_draft_tokens)
        return grow(continuations, text.tokens[-1], no_successors, num_draft_tokens, stop_below)

    def finished(self, session: WorkerSession, text: ContextIndex) -> None:
        """Keep the text for others."""
        self._finished_texts.add(session, text.tokens)


async def build(settings: SuffixSettings, server: Server, stack: AsyncExitStack) -> SuffixDrafter:
    """Read the corpus and return the drafter. Raises ValueError for a corpus that cannot be used."""
    finished = FinishedTexts(settings.suffix_shared_tokens)
    place, tokenizer = settings.suffix_corpus, settings.suffix_tokenizer
    corpus = await in_background(lambda: corpus_index(place, tokenizer)) if place and tokenizer else None
    await stack.enter_async_context(supervised(server, "indexing of finished texts", finished.keep_indexing()))
    return SuffixDrafter(finished, corpus)


def check(settings: SuffixSettings) -> None:
    """Raise ValueError for a corpus that is not there, or cannot be tokenized."""
    if settings.suffix_corpus is None:
        return
    corpus_files(settings.suffix_corpus)
    if not settings.suffix_tokenizer:
        raise ValueError("--suffix-corpus needs --suffix-tokenizer, the target's folder or hub id")


KIND = DrafterKind("suffix", SuffixSettings, build, check)
