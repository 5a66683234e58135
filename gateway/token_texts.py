"""The text of single tokens, as log probabilities name them: exact bytes where the tokenizer works on bytes."""

import json
import re

from tokenizers import Tokenizer

from specdec.serving.tokenizer import fingerprint

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
WORD_BEGIN = "\u2581"  # what SentencePiece has for a space


class TokenTexts:
    """Gives the text and the bytes of a token of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.fingerprint = fingerprint(tokenizer)
        self._tokenizer = tokenizer
        decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"], ensure_ascii=False)
        self._is_byte_level = '"ByteLevel"' in decoder
        self._has_byte_tokens = '"ByteFallback"' in decoder
        self._has_word_begins = WORD_BEGIN in decoder or '"Metaspace"' in decoder
        self._added = {token: entry.content for token, entry in tokenizer.get_added_tokens_decoder().items()}

    def text(self, token: int) -> str:
        """Return the text; bytes that are no whole character are shown as \\xe2."""
        return self.encoded(token).decode(errors="backslashreplace")

    def encoded(self, token: int) -> bytes:
        """Return the bytes."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token) or ""
        if self._is_byte_level and all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
        if self._has_byte_tokens and (found := BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        return (piece.replace(WORD_BEGIN, " ") if self._has_word_begins else piece).encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: those that can be printed are themselves, the others follow at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [number for number in range(256) if number not in printable]
    return {chr(number): number for number in printable} | {
        chr(256 + place): number for place, number in enumerate(others)
    }


_BYTES = _byte_alphabet()
