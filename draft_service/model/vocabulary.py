"""What the tokens of two vocabularies have in common (Timor et al. 2025, token-level intersection).

Tokens are compared by the bytes that they stand for, so that "Ġthe" of a byte-level vocabulary is "▁the" of another. A
special token stands for itself alone, never for text that looks like it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

SPACE_MARK = "▁"  # stands for a space in SentencePiece vocabularies

TokenText = bytes | str  # the bytes of a token; the name of a special one


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """Tokens that target and draft share, and how many ids the target has."""

    draft_of: Mapping[int, int]  # the draft's id of each shared target id, ascending
    num_target_ids: int


def shared_vocabulary(target: Tokenizer, draft: Tokenizer, num_draft_ids: int) -> SharedVocabulary:
    """Return what a target and a draft share, of the draft's first `num_draft_ids` ids.

    Raises ValueError where they share nothing, or a vocabulary is of an unknown kind.
    """
    texts = token_texts(target)
    draft_ids = {
        text: token for token, text in sorted(token_texts(draft).items(), reverse=True) if token < num_draft_ids
    }
    target_ids = {text: token for token, text in sorted(texts.items(), reverse=True)}
    shared = sorted((token, draft_ids[text]) for text, token in target_ids.items() if text in draft_ids)
    if not shared:
        raise ValueError("the draft's vocabulary and the target's have no token in common; serve another draft")
    return SharedVocabulary(dict(shared), max(texts) + 1)


def token_texts(tokenizer: Tokenizer) -> Mapping[int, TokenText]:
    """Return what each token id stands for. Raises ValueError for a vocabulary of an unknown kind."""
    special = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    plain = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items() if not added.special}
    bytes_of = _bytes_of(tokenizer)
    texts: dict[int, TokenText] = {token: bytes_of(text) for text, token in tokenizer.get_vocab().items()}
    texts |= {token: text.encode() for token, text in plain.items()}
    return {token: text for token, text in (texts | special).items() if text}


def _bytes_of(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """Return the function from a token's written form to its bytes."""
    decoders = list(_parts(json.loads(tokenizer.to_str())["decoder"], "decoders"))
    if any(part["type"] == "ByteLevel" for part in decoders):
        alphabet = byte_alphabet()
        return lambda text: b"".join(bytes([alphabet[sign]]) if sign in alphabet else sign.encode() for sign in text)
    if any(SPACE_MARK in json.dumps(part, ensure_ascii=False) for part in decoders):
        return _sentencepiece_bytes
    raise ValueError(
        "a tokenizer is neither byte-level nor of SentencePiece's kind, so it cannot be compared with another; "
        "serve a draft of the target's family"
    )


def _parts(part: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """Yield a part of a tokenizer's description, and those that it is made of."""
    if part:
        yield part
        for inner in part.get(name, ()):
            yield from _parts(inner, name)


def byte_alphabet() -> Mapping[str, int]:
    """Return the byte that each sign of byte-level vocabularies stands for (Radford et al. 2019, GPT-2)."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _sentencepiece_bytes(text: str) -> bytes:
    """Return the bytes of a SentencePiece token; <0x0A> is a byte."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace(SPACE_MARK, " ").encode()
