"""A session's text in the draft's tokens: what the target committed, decoded to bytes and encoded again.

The text is cut into segments, where words begin, and each segment is encoded by itself; what is committed later leaves
the finished segments as they are. So a round encodes what is new and a short tail, and the draft's cache stays valid.
Where the text is cut is a function of its tokens alone, so a text has the same draft tokens however it was committed.
"""

from collections.abc import Iterator, Mapping, Sequence

from tokenizers import Tokenizer

from draft_service.model.vocabulary import TokenText, token_texts

MIN_SEGMENT_TOKENS = 12  # of the target, before a segment ends at the beginning of a word
MAX_SEGMENT_TOKENS = 64  # then it ends at the beginning of any character
MAX_MORE_BYTES = 3  # of a character after its first


class Reencoder:
    """Translates a target's tokens into a draft's."""

    def __init__(self, target: Tokenizer, draft: Tokenizer, num_draft_ids: int) -> None:
        self._texts = token_texts(target)
        self._draft = draft
        self._num_draft_ids = num_draft_ids
        ids = {text: token for token, text in token_texts(draft).items() if token < num_draft_ids}
        self._special: Mapping[str, int] = {text: token for text, token in ids.items() if isinstance(text, str)}
        self._bytes: Mapping[bytes, int] = {text: token for text, token in ids.items() if isinstance(text, bytes)}
        self.prefix = self._known(draft.encode("").ids)  # a token that begins each text, where the draft has one

    def text(self, token: int) -> TokenText:
        """Return what a target token stands for; nothing for an id without a token."""
        return self._texts.get(token, b"")

    def encode(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft's tokens of some text."""
        ids: list[int] = []
        waiting = b""
        for token in tokens:
            text = self.text(token)
            if isinstance(text, bytes):
                waiting += text
                continue
            ids += [*self._encoded(waiting), *self._encoded_special(text)]
            waiting = b""
        return ids + self._encoded(waiting)

    def _encoded_special(self, name: str) -> list[int]:
        """Return the draft's own token of that name, or the name as text."""
        return [self._special[name]] if name in self._special else self._encoded(name.encode())

    def _encoded(self, content: bytes) -> list[int]:
        """Return the tokens of bytes, of which some may be part of a character: those become tokens of one byte."""
        ids: list[int] = []
        for part in _characters(content):
            if isinstance(part, str):
                ids += self._known(self._draft.encode(part, add_special_tokens=False).ids)
            else:
                ids += [self._bytes[part[at : at + 1]] for at in range(len(part)) if part[at : at + 1] in self._bytes]
        return ids

    def _known(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that the draft model can read."""
        return [token for token in ids if token < self._num_draft_ids]


def _characters(content: bytes) -> Iterator[str | bytes]:
    """Yield content as text, and as bytes where it is no text."""
    while content:
        try:
            yield content.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield content[: error.start].decode()
            yield content[error.start : error.end]
            content = content[error.end :]


class ReencodedText:
    """A session's tokens, and the draft's tokens of the same text."""

    def __init__(self, reencoder: Reencoder) -> None:
        self.tokens: list[int] = []
        self.num_sent = 0  # draft tokens of finished segments that the draft model was given
        self._reencoder = reencoder
        self._segments: list[tuple[int, int]] = []  # where each finished one ends: in `tokens`, and in `_finished`
        self._finished = list(reencoder.prefix)  # draft tokens of the finished segments

    @property
    def num_finished(self) -> int:
        """Draft tokens that do not change any more, however the text goes on."""
        return len(self._finished)

    def append(self, token: int) -> None:
        """Add a target token; the segment before it may be finished by that."""
        begin = self._open_from
        if len(self.tokens) > begin and self._ends_before(token, len(self.tokens) - begin):
            self._finished += self._reencoder.encode(self.tokens[begin:])
            self._segments.append((len(self.tokens), len(self._finished)))
        self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Keep the first `length` target tokens."""
        del self.tokens[length:]
        # the token after a segment finished it
        while self._segments and self._segments[-1][0] >= length:
            self._segments.pop()
        del self._finished[self._segments[-1][1] if self._segments else len(self._reencoder.prefix) :]
        self.num_sent = min(self.num_sent, len(self._finished))

    def draft_tokens(self, start: int = 0) -> list[int]:
        """Return the draft's tokens of the text, from the `start`-th on, which is finished."""
        return self._finished[start:] + self._reencoder.encode(self.tokens[self._open_from :])

    @property
    def _open_from(self) -> int:
        return self._segments[-1][0] if self._segments else 0

    def _ends_before(self, token: int, length: int) -> bool:
        """Return whether an open segment of that length ends before a token."""
        before, text = self._reencoder.text(self.tokens[-1]), self._reencoder.text(token)
        if isinstance(before, str) or isinstance(text, str):
            return True
        if length >= MAX_SEGMENT_TOKENS:
            begins_character = text[:1] < b"\x80" or text[:1] >= b"\xc0"
            return begins_character or length >= MAX_SEGMENT_TOKENS + MAX_MORE_BYTES
        return length >= MIN_SEGMENT_TOKENS and _begins_word(text) and not before[-1:].isspace()


def _begins_word(text: bytes) -> bool:
    """Return whether text begins with a single space: vocabularies of either kind split there."""
    return text[:1] == b" " and len(text) > 1 and not text[1:2].isspace()
