"""Tokens to text: whole characters only, the tokenizer's own text, and never part of a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from coordinator.text import StopText, StreamDetokenizer

CORPUS = ["the thing that they thought 🙂🙃 日本語の文 straße naïve, the the", "日本 🙂 👩‍👩‍👧 and the rest"] * 4
REPLACEMENT = "\ufffd"
# without the replacement character itself, which at the end of a text looks like half of another one
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT)
TEXTS = st.text(st.sampled_from("the ng日本語🙂👩‍ßïa,.\n") | CHARACTERS, max_size=30)


def byte_level() -> Tokenizer:
    """A byte-level BPE as GPT-2 has it, with merges, some of which end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A BPE as Llama 2 has it: a vocabulary of words, and byte tokens for everything else."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thenga,.日本", "▁t", "▁th"]
    merges = [("▁", "t"), ("▁t", "h")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
BOTH = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
PROPERTY = settings(deadline=None, derandomize=True, database=None)


def pieces(tokenizer: Tokenizer, tokens: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer, prompt or [])
    return [detokenizer.push(token) for token in tokens]


@BOTH
@PROPERTY
@given(text=TEXTS)
def test_the_pieces_are_the_tokenizer_s_own_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text).ids
    whole = tokenizer.decode(tokens)
    assert whole == text  # the control: these tokenizers lose nothing
    assert "".join(pieces(tokenizer, tokens)) == whole


@BOTH
@PROPERTY
@given(prompt=TEXTS, text=TEXTS)
def test_pieces_are_the_text_after_the_prompt(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    before, tokens = tokenizer.encode(prompt).ids, tokenizer.encode(text, add_special_tokens=False).ids
    added = tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]
    assert "".join(pieces(tokenizer, tokens, before)) == added


@BOTH
@PROPERTY
@given(text=TEXTS)
def test_pieces_never_split_a_character(tokenizer: Tokenizer, text: str) -> None:
    """Each piece ends where a character does; later tokens never change earlier pieces."""
    tokens = tokenizer.encode(text).ids
    said = ""
    for piece in pieces(tokenizer, tokens):
        assert REPLACEMENT not in piece
        said += piece
        assert tokenizer.decode(tokens).startswith(said)


def test_an_emoji_comes_with_its_last_byte() -> None:
    tokenizer = byte_fallback()
    tokens = [byte_token(tokenizer, byte) for byte in "🙂".encode()]
    assert pieces(tokenizer, tokens) == ["", "", "", "🙂"]
    assert pieces(tokenizer, tokens[2:], tokens[:2]) == ["", "🙂"]


@BOTH
@PROPERTY
@given(data=st.data())
def test_invalid_utf8_decodes_without_an_exception(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Random tokens, as at a high temperature: no exception, a pure function, and text again when there is text."""
    ids = st.integers(0, tokenizer.get_vocab_size() - 1)
    noise = data.draw(st.lists(ids, max_size=40))
    first, second = pieces(tokenizer, noise), pieces(tokenizer, noise)
    assert first == second
    "".join(first).encode()  # raises for half of a surrogate pair


def test_emitted_text_stays_when_broken_bytes_follow() -> None:
    """This decoder takes back a whole run of bytes: the text after it must not be lost with them."""
    tokenizer = byte_fallback()
    tokens = [byte_token(tokenizer, byte) for byte in "🙂".encode() + b"\x80"]
    after = [known_token(tokenizer, piece) for piece in ("▁th", "e")]
    assert pieces(tokenizer, [*tokens, *after]) == ["", "", "", "🙂", "", REPLACEMENT + " th", "e"]


@BOTH
@pytest.mark.parametrize(
    "noise", [[0xFF], [0xF0, 0x9F], [0x80] * 9, [0xE6, 0x41, 0xFF], [0xC3, 0x28, 0xF0, 0x9F, 0x99]]
)
def test_text_continues_after_broken_bytes(tokenizer: Tokenizer, noise: list[int]) -> None:
    tokens = [byte_token(tokenizer, byte) for byte in noise]
    after = tokenizer.encode(" then the thing").ids
    text = "".join(pieces(tokenizer, [*tokens, *after]))
    assert text.endswith("then the thing")


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    if (token := tokenizer.token_to_id(f"<0x{byte:02X}>")) is not None:
        return token
    # GPT-2's printable characters for bytes, in the order of its code
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    letter = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return known_token(tokenizer, letter)


def known_token(tokenizer: Tokenizer, piece: str) -> int:
    token = tokenizer.token_to_id(piece)
    assert token is not None
    return token


def test_special_tokens_have_no_text() -> None:
    tokenizer = TOKENIZERS["byte level"]
    tokens = [*tokenizer.encode("the").ids, known_token(tokenizer, "<end>"), *tokenizer.encode(" rest").ids]
    assert "".join(pieces(tokenizer, tokens)) == "the rest"


# ---- stop strings

STOP_LISTS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)
PIECES = st.lists(st.text("ab", max_size=3), max_size=12)


def pushed(stops: list[str], texts: list[str]) -> tuple[list[str], bool]:
    """Push pieces until a stop; flush where there was none."""
    stop_text = StopText(stops)
    said = []
    for text in texts:
        certain, stopped = stop_text.push(text)
        said.append(certain)
        if stopped:
            assert stop_text.held == ""
            return said, True
    return [*said, stop_text.flush()], False


def by_force(stops: list[str], texts: list[str]) -> tuple[str, bool]:
    """After each piece search the whole text so far."""
    for end in range(len(texts) + 1):
        whole = "".join(texts[:end])
        if found := [whole.index(stop) for stop in stops if stop in whole]:
            return whole[: min(found)], True
    return whole, False


@settings(PROPERTY, max_examples=300)
@given(STOP_LISTS, PIECES)
def test_stops_are_found_as_by_brute_force(stops: list[str], texts: list[str]) -> None:
    said, stopped = pushed(stops, texts)
    assert ("".join(said), stopped) == by_force(stops, texts)


@settings(PROPERTY, max_examples=300)
@given(STOP_LISTS, PIECES)
def test_no_text_is_held_back_needlessly(stops: list[str], texts: list[str]) -> None:
    """What is held is the longest end of the text that begins a stop string."""
    stop_text = StopText(stops)
    whole = ""
    for text in texts:
        _, stopped = stop_text.push(text)
        whole += text
        if stopped:
            return
        beginnings = {stop[:size] for stop in stops for size in range(len(stop))}
        assert stop_text.held == max((each for each in beginnings if whole.endswith(each)), key=len)


@pytest.mark.parametrize(
    ("stops", "texts", "said"),
    [
        (["</s>"], ["a <", "/", "s", "> b"], "a "),
        (["bc", "abcd"], ["abc", "d"], "a"),
        (["bc", "abcd"], ["abcd"], ""),
        (["\n\n"], ["one\n", "\ntwo"], "one"),
        (["aab"], ["aaa", "ab"], "aa"),
        (["x"], ["xx"], ""),
        (["🙂"], ["a🙂b"], "a"),
    ],
)
def test_stops(stops: list[str], texts: list[str], said: str) -> None:
    assert pushed(stops, texts) == ([*pushed(stops, texts)[0]], True)
    assert "".join(pushed(stops, texts)[0]) == said


def test_without_stops_nothing_is_held() -> None:
    stop_text = StopText([])
    assert (stop_text.push("any"), stop_text.held, stop_text.flush()) == (("any", False), "", "")
