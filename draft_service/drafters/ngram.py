"""Drafting by looking up: what followed the last time that the text's end occurred in it (prompt lookup).

It needs no model and no vocabulary: it serves any target, and costs microseconds.
Saxena 2023, "Prompt lookup decoding".
"""

from array import array
from contextlib import AsyncExitStack

from pydantic import BaseModel, Field

from draft_service.drafter import DrafterKind
from draft_service.session_texts import MAX_HELD_TOKENS, TextDrafter
from specdec.exact.values import Proposal, one_hot
from specdec.serving.server import Server
from specdec.serving.session_stream import WorkerSession


class NgramSettings(BaseModel):
    """Settings of the drafter `ngram`."""

    ngram_max: int = Field(4, ge=1, le=32, description="longest suffix that the drafter `ngram` looks up, in tokens")
    ngram_min: int = Field(1, ge=1, le=32, description="shortest suffix that the drafter `ngram` looks up, in tokens")


class SuffixIndex:
    """A text, and for each suffix of each length where it last occurred before; append and truncate are cheap."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.tokens: array[int] = array("I")
        self._lengths = range(longest, shortest - 1, -1)
        # where the token after the latest occurrence of an n-gram is
        self._latest: dict[tuple[int, ...], int] = {}
        # for each length and each token: the occurrence before the one that this token recorded; 0: none
        self._earlier: dict[int, array[int]] = {length: array("I") for length in self._lengths}

    def append(self, token: int) -> None:
        """Add a token: it follows the n-grams that end before it."""
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

        Where that reaches the text's end it repeats what it returned: a loop is continued as a loop.
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


class NgramDrafter(TextDrafter[SuffixIndex]):
    """Drafts the continuation of the text's longest suffix that occurred before; no draw, so each token is one-hot."""

    def __init__(self, shortest: int, longest: int, max_held_tokens: int = MAX_HELD_TOKENS) -> None:
        super().__init__("ngram", lambda: SuffixIndex(shortest, longest), max_held_tokens)

    def draft(
        self, session: WorkerSession, text: SuffixIndex, num_draft_tokens: int, stop_below: float = 0.0
    ) -> Proposal:
        """Return a chain of at most `num_draft_tokens` tokens."""
        tokens = tuple(text.continuation(num_draft_tokens))
        return Proposal(tokens, tuple(map(one_hot, tokens)))


async def build(settings: NgramSettings, server: Server, stack: AsyncExitStack) -> NgramDrafter:
    """Return the drafter."""
    return NgramDrafter(settings.ngram_min, settings.ngram_max)


def check(settings: NgramSettings) -> None:
    """Raise ValueError for lengths that contradict each other."""
    if settings.ngram_min > settings.ngram_max:
        raise ValueError(f"--ngram-min {settings.ngram_min} is more than --ngram-max {settings.ngram_max}")


KIND = DrafterKind("ngram", NgramSettings, build, check)
