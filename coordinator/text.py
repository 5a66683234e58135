"""Prompts to tokens, and tokens back to text, one by one: never half a character, never part of a stop string.

Everything here is a pure function of the token sequence: a replayed session gives the same text, however it was cut
into chunks.
"""

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# enough of the prompt for decoders that treat a text's first token differently (leading spaces of SentencePiece)
PRIMING_TOKENS = 8


class Detokenizer(Protocol):
    """Gives the text that becomes certain with each token."""

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty while a character is unfinished."""
        ...


class StreamDetokenizer:
    """Detokenises with the tokenizer's own streaming decoder; special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = self._primed(prompt[-PRIMING_TOKENS:])

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty while a character is unfinished."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:
            # bytes that are no UTF-8 can leave the decoder without a valid prefix: begin afresh behind them
            self._stream = DecodeStream(skip_special_tokens=True)
            return ""

    def _primed(self, tokens: Sequence[int]) -> DecodeStream:
        stream = DecodeStream(skip_special_tokens=True)
        for token in tokens:
            try:
                stream.step(self._tokenizer, token)
            except Exception:
                stream = DecodeStream(skip_special_tokens=True)
        return stream


class StopText:
    """Finds stop strings in text that arrives in pieces, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    @property
    def held(self) -> str:
        """What is held back now."""
        return self._held

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is certain now, and whether a stop string was completed; it is cut before the first."""
        if not self._stops:
            return text, False
        whole = self._held + text
        found = [position for stop in self._stops if (position := whole.find(stop)) >= 0]
        if found:
            self._held = ""
            return whole[: min(found)], True
        keep = max(map(lambda stop: _overlap(whole, stop), self._stops))
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], False

    def flush(self) -> str:
        """Return what was held back; nothing will complete it any more."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
