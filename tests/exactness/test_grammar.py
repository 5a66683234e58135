"""Grammars: the mask is the grammar's own at every position, and what moves through it is never out of step."""

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from specdec.errors import InvalidArgumentError
from specdec.exact.grammar import Grammars, GrammarText
from specdec.exact.sampling import SamplingContext, draft_distributions, for_draft, next_token_distributions
from specdec.types import SamplingParams

TOKENS = ("a", "b", "c", "d", "END", "ab", "cd", "bb")
END, VOCAB_SIZE = 4, len(TOKENS) + 2  # the model has more tokens than the tokenizer
PROMPT = [3, 1]
NUM_LETTERS = 5
AMBIGUOUS = ("lark", 'start: s\ns: s s | s s s | "a"')
MODELS = Path(__file__).parents[2] / "models"
REGEXES = ("(a|b)*c?d", "a+b+", "[ab]{2}(c|d)*", "(ab|cd|bb)*", "(a|bb)(b|ab)c", "d?")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return new_grammars(TOKENS)


def new_grammars(tokens: tuple[str, ...]) -> Grammars:
    """Return the grammars of a byte-level tokenizer with these tokens, and END."""
    vocabulary = {text: token for token, text in enumerate(tokens)}
    merges = [(text[0], text[1]) for text in tokens if len(text) == 2]
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Grammars(tokenizer.to_str(), VOCAB_SIZE, [END])


def following(text: GrammarText | None, tokens: list[int], path: list[int] | None = None) -> np.ndarray | None:
    """Return what may follow a completion and a path."""
    assert text
    return text.follow(0, [*PROMPT, *tokens], len(PROMPT) + len(tokens), len(PROMPT)).allowed(path or [])


# ---- the masks


@cache
def matching(regex: str) -> frozenset[str]:
    """Return the texts of up to NUM_LETTERS letters that match, by Python's own engine."""
    texts = ("".join(letters) for size in range(NUM_LETTERS + 1) for letters in product("abcd", repeat=size))
    return frozenset(text for text in texts if re.fullmatch(regex, text))


def allowed_letters(regex: str, text: str) -> set[int]:
    """Return which single letters, or the end, may follow a text that is much shorter than NUM_LETTERS."""
    letters = {TOKENS.index(other[len(text)]) for other in matching(regex) if other[: len(text)] == text != other}
    return letters | ({END} if text in matching(regex) else set())


@pytest.mark.parametrize("regex", REGEXES)
def test_masks_equal_those_of_another_engine(regex: str) -> None:
    """Of a tokenizer of single letters, where a text has one way to be spelled, after every text of three letters."""
    grammars = new_grammars(TOKENS[:5])
    begun = {other[:size] for other in matching(regex) for size in range(min(len(other), NUM_LETTERS - 2) + 1)}
    assert begun
    for text in begun:
        allowed = following(grammars.text(("regex", regex)), [TOKENS.index(letter) for letter in text])
        assert allowed is not None
        assert set(np.flatnonzero(allowed)) == allowed_letters(regex, text), text


@pytest.mark.parametrize("regex", REGEXES)
def test_every_allowed_token_leaves_a_text(grammars: Grammars, regex: str) -> None:
    """With tokens of two letters: what is allowed begins a matching text, and the end is allowed where it is one."""
    for tokens in walks(grammars, regex, 3):
        text = "".join(TOKENS[token] for token in tokens)
        allowed = following(grammars.text(("regex", regex)), tokens)
        assert allowed is not None
        assert allowed[END] == bool(re.fullmatch(regex, text))
        assert allowed.any()
        for token in np.flatnonzero(allowed):
            longer = text + TOKENS[token]
            is_begun = any(other.startswith(longer) for other in matching(regex))
            assert token == END or is_begun or len(longer) > NUM_LETTERS - 2
        assert not allowed[len(TOKENS) :].any(), "tokens that the tokenizer lacks"


def walks(grammars: Grammars, regex: str, num_tokens: int) -> Iterator[list[int]]:
    """Yield every completion of up to so many tokens that the masks allow."""
    waiting: list[list[int]] = [[]]
    for tokens in waiting:
        yield tokens
        allowed = following(grammars.text(("regex", regex)), tokens)
        assert allowed is not None
        if len(tokens) < num_tokens:
            waiting += [[*tokens, int(token)] for token in np.flatnonzero(allowed) if token != END]


TEXTS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)  # also of tokens that the tokenizer lacks


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(REGEXES), st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6))
def test_a_moved_text_equals_a_new_one(
    grammars: Grammars, regex: str, moves: list[tuple[list[int], list[int]]]
) -> None:
    """Whatever completions and draft paths came before, fitting or not, rolled back or not."""
    moved = grammars.text(("regex", regex))
    for tokens, path in moves:
        results = [mask_or_error(text, tokens, path) for text in (moved, grammars.text(("regex", regex)))]
        assert results[0] == results[1]


def mask_or_error(text: GrammarText, tokens: list[int], path: list[int]) -> tuple[list[bool] | None, list[int], bool]:
    allowed = following(text, tokens, path)
    forced = text.forced(4)
    try:
        text.check_fits()
    except InvalidArgumentError:
        return None if allowed is None else allowed.tolist(), forced, False
    return None if allowed is None else allowed.tolist(), forced, True


def test_known_tokens_are_not_read_again(grammars: Grammars) -> None:
    """A round sends its own tokens: those before its start are taken as they are held."""
    text = grammars.text(("regex", "a+b+"))
    text.follow(0, [*PROMPT, 0, 0], 4, 2)
    unread = [9, 9, 9, 9, 1]  # as if the caller had lost them
    allowed = text.follow(4, unread, 5, 2).allowed()
    assert allowed is not None
    assert set(np.flatnonzero(allowed)) == {1, END, 7}


def test_forced_text_is_spelled_and_nothing_else(grammars: Grammars) -> None:
    text = grammars.text(("regex", "abcd(a|b)"))
    assert text.follow(0, PROMPT, 2, 2).forced(8) == [5, 6]
    assert text.forced(1) == [5]
    assert text.follow(2, [*PROMPT, 5, 6], 4, 2).forced(8) == []


def test_an_end_within_a_draft_is_taken_back(grammars: Grammars) -> None:
    """Also where the grammar itself has the end: llguidance takes back one token too many there."""
    text = grammars.text(("lark", f"start: /a+/ <[{END}]> /b+/"))
    begun = following(text, [0])
    assert following(text, [0], [END, 1]) is None
    assert np.array_equal(following(text, [0]), begun)  # type: ignore[arg-type]


def test_an_unknown_token_of_a_draft_does_not_end_the_session(grammars: Grammars) -> None:
    text = grammars.text(("regex", "a+b"))
    begun = following(text, [0])
    assert following(text, [0], [VOCAB_SIZE - 1]) is None
    assert np.array_equal(following(text, [0]), begun)  # type: ignore[arg-type]


# ---- wrong grammars


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (("regex", "(a"), "unclosed group"),
        (("lark", "start: missing"), "unknown name"),
        (("lark", ""), "is wrong"),
        (("json_schema", '{"type"'), "is wrong"),
        (("json_schema", '{"type": "colour"}'), "colour"),
        (("json_schema", '{"$ref": "https://example.org/schema"}'), "is wrong"),
        (("lark", "start: t\nt[max_tokens=3]: /a*/"), "rollback not supported"),
        (("regex", "x"), "no token of this model"),
    ],
)
def test_wrong_grammars_get_one_sentence(grammars: Grammars, grammar: tuple[str, str], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(words)) as caught:
        grammars.text(grammar)
    assert str(caught.value).startswith(f"sampling.{grammar[0]} ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_an_ambiguous_grammar_is_refused_before_it_takes_long() -> None:
    """Its parser's work grows with the cube of the text; everybody who shares the worker would wait for it."""
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    (letter,) = tokenizer.encode("a").ids
    text = Grammars(tokenizer.to_str(), tokenizer.get_vocab_size(), [0]).text(AMBIGUOUS)
    sizes = []

    def grow() -> None:
        for size in range(1, 300):
            sizes.append(size)
            text.follow(size - 1, [letter] * size, size, 0).allowed()

    with pytest.raises(InvalidArgumentError, match="takes too much work"):
        grow()
    assert sizes[-1] < 200
    assert text.allowed_in_draft(0, [letter] * sizes[-1], sizes[-1], 0) is None, "a draft goes on without it"
    assert text.allowed_in_draft(0, [letter], 1, 0) is not None, "another one need not"


def test_large_schemas_are_within_the_limits() -> None:
    properties = {f"p{number}": {"type": "boolean"} for number in range(140)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    text = Grammars(tokenizer.to_str(), tokenizer.get_vocab_size(), [0]).text(("json_schema", json.dumps(schema)))
    tokens = tokenizer.encode('{"p0": true, "p139": false}').ids
    for size in range(len(tokens) + 1):
        assert text.follow(0, tokens, size, 0).allowed() is not None


def test_a_text_that_nothing_can_continue_is_refused(grammars: Grammars) -> None:
    """The grammar wants a letter for which the model has no token."""
    text = grammars.text(("regex", "a(x|y)"))
    text.follow(0, [*PROMPT, 0], 3, 2)
    with pytest.raises(InvalidArgumentError, match="no token of this model can continue"):
        text.allowed()
    held = 0, [*PROMPT], 2, 2
    assert text.allowed_in_draft(*held, [0]) is None
    assert text.allowed_in_draft(*held, []) is not None, "only that draft has no form"


def test_a_completion_of_another_form_is_refused(grammars: Grammars) -> None:
    text = grammars.text(("regex", "a+b"))
    with pytest.raises(InvalidArgumentError, match="from its token 1 on"):
        text.follow(0, [*PROMPT, 0, 3, 0], 5, 2).check_fits()
    assert text.allowed() is None
    text.follow(0, [*PROMPT, 0], 3, 2).check_fits()


# ---- distributions


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_masked_distributions_are_the_renormalised_rest(temperature: float) -> None:
    """A token that is not allowed has probability 0, also with a bias for it; the others keep their proportions."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, VOCAB_SIZE, generator=generator)
    allowed = np.zeros(VOCAB_SIZE, np.bool_)
    allowed[[1, 4, 6]] = True
    sampling = SamplingParams(temperature=temperature, logit_bias={0: 100.0, 6: 0.5}, top_k=2)
    contexts = [SamplingContext(sampling, allowed=allowed), SamplingContext(sampling), SamplingContext(sampling)]
    before = logits.clone()
    rows = next_token_distributions(logits, contexts, VOCAB_SIZE)
    assert torch.equal(logits, before)
    biased = logits[0].clone()
    biased[6] += 0.5
    best = sorted([1, 4, 6], key=lambda token: float(biased[token]))[1:]
    expected = torch.zeros(VOCAB_SIZE)
    if temperature:
        expected[best] = (biased[best] / temperature).softmax(-1)
    else:
        expected[best[-1]] = 1.0
    torch.testing.assert_close(rows[0], expected)
    unmasked = next_token_distributions(logits, [SamplingContext(sampling)] * 3, VOCAB_SIZE)
    assert torch.equal(rows[1:], unmasked[1:])


def test_a_draft_that_knows_no_allowed_token_is_not_masked() -> None:
    """As a head with a reduced vocabulary may: it drafts something instead of failing."""
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, :3] = -torch.inf
    allowed = np.arange(VOCAB_SIZE) < 2
    contexts = for_draft(
        logits, [SamplingContext(SamplingParams(), allowed=allowed), SamplingContext(SamplingParams())]
    )
    assert [context.allowed is None for context in contexts] == [True, True]
    drafted = draft_distributions(logits, [SamplingContext(SamplingParams(), allowed=allowed)] * 2, VOCAB_SIZE, 1.0, 64)
    assert all(len(row.token_ids) == VOCAB_SIZE - 3 for row in drafted)
