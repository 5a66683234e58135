"""The text of a target's tokens in a draft's: the same bytes, however it was committed, at the cost of what is new."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from draft_service.model import reencoding
from draft_service.model.reencoding import MAX_SEGMENT_TOKENS, ReencodedText, Reencoder
from draft_service.model.vocabulary import byte_alphabet, shared_vocabulary, token_texts
from tests.support.other_tokenizer import DEMO_DRAFT, NUM_KEPT, save_draft_of_other_tokenizer

HELD_OUT = Path(__file__).parents[2] / "models" / "heldout"
TEXTS = [
    (HELD_OUT / "heapq.py").read_text()[:4000],
    "naïve café — 😀😀 \u200d日本語 \t\n\n  x" * 9,
    "x" * 300 + " " * 90 + "y",
]
END_OF_TEXT = 0  # the demo target's special token


@pytest.fixture(scope="module")
def target() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_DRAFT / "tokenizer.json"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = save_draft_of_other_tokenizer(tmp_path_factory.mktemp("other"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def reencoder(target: Tokenizer, draft: Tokenizer) -> Reencoder:
    return Reencoder(target, draft, NUM_KEPT)


def sentencepiece(*words: str) -> Tokenizer:
    """Return a tokenizer of SentencePiece's kind, with bytes to fall back to."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *sorted({sign for word in words for sign in word}),
    ]
    merged = [word[:end] for word in words for end in range(2, len(word) + 1)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, *merged]))}
    merges = [(word[: end - 1], word[end - 1]) for word in words for end in range(2, len(word) + 1)]
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def committed(reencoder: Reencoder, tokens: Sequence[int]) -> ReencodedText:
    """Return a text of these tokens."""
    text = ReencodedText(reencoder)
    for token in tokens:
        text.append(token)
    return text


texts_of = cache(token_texts)  # some milliseconds for a vocabulary


def bytes_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    """Return what tokens stand for, special ones by their names."""
    texts = texts_of(tokenizer)
    return b"".join(text.encode() if isinstance(text, str) else text for text in map(texts.__getitem__, tokens))


@pytest.mark.parametrize("content", TEXTS)
def test_draft_tokens_are_the_same_bytes(
    content: str, target: Tokenizer, draft: Tokenizer, reencoder: Reencoder
) -> None:
    """After each token, so also within characters; a whole text is encoded as the draft would encode it."""
    text = ReencodedText(reencoder)
    tokens = target.encode(content).ids
    for count, token in enumerate(tokens, start=1):
        text.append(token)
        assert bytes_of(draft, text.draft_tokens()) == bytes_of(target, tokens[:count])
    assert content.startswith("x") or text.draft_tokens() == draft.encode(content).ids


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_draft_tokens_depend_on_the_text_alone(reencoder: Reencoder, target: Tokenizer, data: st.DataObject) -> None:
    """However often a text was truncated and continued before."""
    tokens = target.encode(TEXTS[0] + TEXTS[1]).ids
    text, held = ReencodedText(reencoder), list[int]()
    for _ in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(0, len(held)))
        begin = data.draw(st.integers(0, len(tokens)))
        more = tokens[begin : begin + data.draw(st.integers(0, 200))]
        text.truncate(length)
        held = held[:length] + more
        for token in more:
            text.append(token)
        assert text.draft_tokens() == committed(reencoder, held).draft_tokens()


def test_finished_tokens_stay_as_they_are(reencoder: Reencoder, target: Tokenizer) -> None:
    text = ReencodedText(reencoder)
    for token in target.encode(TEXTS[0]).ids:
        before = text.draft_tokens()[: text.num_finished]
        text.append(token)
        assert text.draft_tokens()[: len(before)] == before
        assert text.draft_tokens(len(before)) == text.draft_tokens()[len(before) :]
    assert text.num_finished > 0.9 * len(text.draft_tokens())


@pytest.mark.parametrize("content", TEXTS)
def test_rounds_encode_what_is_new(content: str, target: Tokenizer, draft: Tokenizer) -> None:
    """Each encoding is of one segment, however long the text is."""
    lengths = []

    class Recording(Reencoder):
        def encode(self, tokens: Sequence[int]) -> list[int]:
            lengths.append(len(tokens))
            return super().encode(tokens)

    text, tokens = ReencodedText(Recording(target, draft, NUM_KEPT)), target.encode(content).ids
    for token in tokens:
        text.append(token)
    assert sum(lengths) <= len(tokens), "each token once, when its segment is finished"
    text.draft_tokens(text.num_finished)
    assert max(lengths) <= MAX_SEGMENT_TOKENS + 3, "a character has at most 4 bytes"


def test_endless_characters_are_cut_too(target: Tokenizer, reencoder: Reencoder) -> None:
    (continuation,) = (token for token, text in token_texts(target).items() if text == b"\x80")
    text = committed(reencoder, [continuation] * 500)
    assert len(text.draft_tokens(text.num_finished)) <= MAX_SEGMENT_TOKENS + 3


def test_special_tokens_stay_special(reencoder: Reencoder, target: Tokenizer, draft: Tokenizer) -> None:
    """The draft's own token stands for the target's; text that looks like it is text."""
    (name,) = (added.content for added in target.get_added_tokens_decoder().values() if added.special)
    own = draft.token_to_id(name)
    assert own is not None
    draft.encode_special_tokens = True
    typed = [token for sign in name for token in target.encode(sign).ids]
    ids = committed(reencoder, [*typed, END_OF_TEXT, *typed]).draft_tokens()
    assert ids.count(own) == 1
    assert bytes_of(draft, ids) == 3 * name.encode()


def test_names_of_unknown_special_tokens_are_text(draft: Tokenizer) -> None:
    target = Tokenizer.from_str(draft.to_str())
    target.add_special_tokens([AddedToken("<|user|>", special=True)])
    token = target.token_to_id("<|user|>")
    assert token is not None
    ids = Reencoder(target, draft, NUM_KEPT).encode([token])
    assert bytes_of(draft, ids) == b"<|user|>"


def test_kinds_of_vocabularies_are_compared_by_bytes(target: Tokenizer) -> None:
    other = sentencepiece("▁the", "▁return", "é")
    shared = shared_vocabulary(target, other, other.get_vocab_size())
    pairs = {target.id_to_token(one): other.id_to_token(two) for one, two in shared.draft_of.items()}
    assert {"Ġthe": "▁the", "Ġreturn": "▁return", "Ċ": "<0x0A>"}.items() <= pairs.items()
    assert pairs["Ġ"] in ("▁", "<0x20>")
    tokens = target.encode("the return é\n the").ids
    assert (
        bytes_of(other, Reencoder(target, other, other.get_vocab_size()).encode(tokens))
        == "the return é\n the".encode()
    )


def test_shared_tokens_are_those_the_model_reads(target: Tokenizer, draft: Tokenizer) -> None:
    whole, half = (shared_vocabulary(target, draft, size) for size in (NUM_KEPT, NUM_KEPT // 2))
    assert len(whole.draft_of) == NUM_KEPT
    assert half.draft_of == {one: two for one, two in whole.draft_of.items() if two < NUM_KEPT // 2}
    assert whole.num_target_ids == 4096


def test_byte_alphabet_is_the_one_of_tokenizers() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_unusable_vocabularies_are_refused(target: Tokenizer) -> None:
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(ValueError, match=r"neither byte-level nor of SentencePiece's kind.*serve a draft"):
        shared_vocabulary(target, words, 2)
    strange = Tokenizer(BPE({"Ωψξ": 0}, []))
    strange.decoder = decoders.ByteLevel()
    with pytest.raises(ValueError, match="no token in common; serve another draft"):
        shared_vocabulary(target, strange, 1)


def test_text_cut_anywhere_keeps_its_bytes(
    target: Tokenizer, draft: Tokenizer, reencoder: Reencoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reencoding, "MAX_SEGMENT_TOKENS", 2)
    tokens = [random.Random(3).choice(target.encode(TEXTS[1]).ids) for _ in range(300)]
    assert bytes_of(draft, committed(reencoder, tokens).draft_tokens()) == bytes_of(target, tokens)
