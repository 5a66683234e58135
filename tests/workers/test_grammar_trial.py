"""Trials of grammars: what would take minutes, or end the process, ends a process of its own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.errors import InvalidArgumentError
from specdec.serving.grammar_trial import GrammarTrial
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.tokenizer import load_tokenizer
from specdec.types import SamplingParams

TAKES_TOO_MUCH = "takes more than 2 seconds|takes too much memory"  # which limit comes first, the machine decides
TARGET = Path(__file__).parents[2] / "models" / "target"
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    tokenizer = load_tokenizer(str(TARGET))
    trial = GrammarTrial(tokenizer.to_str(), tokenizer.get_vocab_size(), (0,))
    yield trial
    trial.close()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (
            "json_schema",
            json.dumps({"type": "integer", "multipleOf": 9_999_991}),
            TAKES_TOO_MUCH,
        ),
        ("regex", ".?" * 30_000, TAKES_TOO_MUCH),
        ("lark", CHAIN, "nested too deeply"),
        ("regex", "(a", "unclosed group"),
    ],
)
def test_a_hostile_grammar_ends_only_its_trial(trial: GrammarTrial, field: str, value: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        trial.check((field, value))
    trial.check(("regex", "a+"))


@pytest.mark.asyncio
async def test_a_compiler_tries_what_clients_send() -> None:
    tokenizer = load_tokenizer(str(TARGET))
    compiler = GrammarCompiler(tokenizer.to_str, tokenizer.get_vocab_size(), (0,), tries=True)
    with pytest.raises(InvalidArgumentError, match="nested too deeply"):
        await compiler.text(SamplingParams(lark=CHAIN))
    assert await compiler.text(SamplingParams(regex="a+"))
    compiler.close()
