"""Held-out instructions and generated ones: of the same kinds, and disjoint."""

from itertools import islice

import pytest

from benchmarks.instructions import KINDS, held_out
from models.instructions import (
    SHARED_WORDS,
    SLOT,
    Grammar,
    held_out_prompts,
    load_grammar,
    training_instructions,
    word_runs,
)

NUM_GENERATED = 1500  # of each kind


def generated(kind: str, seed: int = 0) -> list[str]:
    return list(islice(training_instructions(kind, seed), NUM_GENERATED))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_held_out_instructions(kind: str) -> None:
    found = held_out(kind)
    assert len(found) >= 10
    assert len({each.name for each in found}) == len({each.prompt for each in found}) == len(found)


def test_both_readers_see_the_same_instructions() -> None:
    assert sorted(held_out_prompts()) == sorted(each.prompt for kind in KINDS for each in held_out(kind))


def test_the_grammar_has_the_kinds_of_the_bench() -> None:
    assert set(load_grammar().kinds) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_generated_instructions_are_not_held_out(kind: str) -> None:
    """Independent of `word_runs`: whole texts, and runs of words as text."""
    prompts = generated(kind)
    assert len(set(prompts)) == NUM_GENERATED
    unseen = [" ".join(prompt.lower().split()) for prompt in held_out_prompts()]
    runs = {run for text in unseen for run in runs_of(text)}
    assert not [prompt for prompt in prompts if not runs.isdisjoint(runs_of(prompt.lower()))]


def runs_of(text: str) -> set[str]:
    words = text.split()
    return {" ".join(words[begin : begin + SHARED_WORDS]) for begin in range(len(words) - SHARED_WORDS + 1)}


@pytest.mark.parametrize("kind", KINDS)
def test_no_slot_stays_open(kind: str) -> None:
    assert not [prompt for prompt in generated(kind) if SLOT.search(prompt)]


def test_every_slot_has_a_rule() -> None:
    grammar = load_grammar()
    templates = [text for group in (grammar.kinds, grammar.rules) for texts in group.values() for text in texts]
    used = {name for text in templates for name in SLOT.findall(text)}
    assert used == grammar.rules.keys() | grammar.ranges.keys()


def test_the_seed_decides() -> None:
    assert generated("chat", 1)[:20] == generated("chat", 1)[:20] != generated("chat", 2)[:20]


LEAKY = Grammar(
    {"chat": ["{opening} one two three four five six seven", "something else"]}, {"opening": ["Say", "Tell"]}
)


def test_a_grammar_that_leaks_is_stopped() -> None:
    """The control: without the held-out text the same grammar yields both templates."""
    unseen = ["please: One, two three four five six SEVEN!"]
    assert list(training_instructions("chat", 0, LEAKY, unseen)) == ["something else"]
    assert len(list(training_instructions("chat", 0, LEAKY, []))) == 3


def test_short_texts_are_compared_whole() -> None:
    assert word_runs("Hello, World") == {("hello", "world")}
    leaky = Grammar({"chat": ["hello world!", "hello moon"]}, {})
    assert list(training_instructions("chat", 0, leaky, ["Hello, World"])) == ["hello moon"]


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(KeyError, match="poetry"):
        next(training_instructions("poetry", 0))
