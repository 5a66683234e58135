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
REPLACEMENT = "\ufffd"  # decoded from bytes that are not UTF-8


class Detokenizer(Protocol):
    """Gives the text that becomes certain with each token."""

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty while a character is unfinished."""
        ...


class StreamDetokenizer:
    """Detokenises with the tokenizer's own streaming decoder; special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = self._primed(prompt)
        self._pending: list[int] = []  # tokens whose text is still to come

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty while a character is unfinished."""
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:
            # bytes that are not UTF-8 can spoil the text of those before them: start again after the last certain text
            self._stream, text = self._begun(self._pending)
        if text:
            self._pending.clear()
        return text or ""

    def _primed(self, prompt: Sequence[int]) -> DecodeStream:
        """Begin a little before the prompt's end, where a character begins: half of one would spoil what follows."""
        for size in range(PRIMING_TOKENS, 2 * PRIMING_TOKENS):
            stream, text = self._begun(prompt[-size:])
            if size >= len(prompt) or (text and not text.startswith(REPLACEMENT)):
                break
        return stream

    def _begun(self, tokens: Sequence[int]) -> tuple[DecodeStream, str]:
        """Return a stream that has seen these tokens, and their text."""
        stream, text = DecodeStream(skip_special_tokens=True), ""
        for token in tokens:
            try:
                text += stream.step(self._tokenizer, token) or ""
            except Exception:
                stream = DecodeStream(skip_special_tokens=True)
        return stream, text


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
