"""The texts of single tokens: together they are the text, whatever the tokenizer's way of writing bytes."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel

from gateway.token_texts import TokenTexts

ROOT = Path(__file__).parents[2]
TEXT = "def f(x):\n\treturn 'é — 世界 \U0001f600'  # naïve\n"


@pytest.mark.parametrize("text", [TEXT, " leading", "\x00\x7f\xa0\xad"])
def test_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(ROOT / "models/target/tokenizer.json"))
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(map(texts.encoded, tokens)).decode() == text


def test_halves_of_characters_are_escaped() -> None:
    tokenizer = Tokenizer.from_file(str(ROOT / "models/target/tokenizer.json"))
    texts = TokenTexts(tokenizer)
    shown = [texts.text(token) for token in tokenizer.encode("\U0001f600", add_special_tokens=False).ids]
    assert len(shown) > 1
    assert shown[0].startswith("\\xf0")


def test_sentencepiece_has_spaces_and_bytes() -> None:
    vocabulary = {"\u2581hello": 0, "<0xE2>": 1, "\u2581": 2}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = TokenTexts(tokenizer)
    assert [texts.encoded(token) for token in range(3)] == [b" hello", b"\xe2", b" "]


def test_added_tokens_are_as_they_are() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.add_special_tokens(["<|end \u0120|>"])
    texts = TokenTexts(tokenizer)
    assert [texts.text(token) for token in (0, 1, 99)] == ["a", "<|end \u0120|>", ""]
