"""Instructions to train drafts on, of the kinds that the bench asks: endless, reproducible, and never a held-out one.

They are generated from `instruction_grammar.toml`. `benchmarks/instructions/held_out` has the instructions that must
stay unseen: what shares SHARED_WORDS consecutive words with one of them is dropped.
"""

import json
import random
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GRAMMAR_FILE = Path(__file__).parent / "instruction_grammar.toml"
HELD_OUT = Path(__file__).parent.parent / "benchmarks" / "instructions" / "held_out"
SHARED_WORDS = 7  # longer than any turn of phrase that the grammar and the held-out instructions have in common
MAX_USELESS_TRIES = 1000  # in a row: repetitions, or too close to a held-out instruction
SLOT = re.compile(r"\{(\w+)\}")

WordRun = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What each name may stand for."""

    kinds: Mapping[str, Sequence[str]]
    rules: Mapping[str, Sequence[str]]
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # whole numbers, first and last

    def expand(self, template: str, chooser: random.Random) -> str:
        """Replace each slot of a template by a choice, and the slots of that choice. Raises KeyError."""
        return SLOT.sub(lambda slot: self._choice(slot[1], chooser), template)

    def _choice(self, name: str, chooser: random.Random) -> str:
        if name in self.ranges:
            return str(chooser.randint(*self.ranges[name]))
        return self.expand(chooser.choice(self.rules[name]), chooser)


def load_grammar() -> Grammar:
    """Read the grammar."""
    content = tomllib.loads(GRAMMAR_FILE.read_text(encoding="utf-8"))
    return Grammar(
        content["kinds"], content["rules"], {name: (low, high) for name, (low, high) in content["ranges"].items()}
    )


def training_instructions(
    kind: str, seed: int, grammar: Grammar | None = None, held_out: Collection[str] | None = None
) -> Iterator[str]:
    """Yield instructions of a kind, each once, in an order that the seed decides; ends when hardly a new one is found.

    Raises KeyError for a kind or a rule that the grammar has not.
    """
    grammar = grammar or load_grammar()
    forbidden = {run for prompt in (held_out_prompts() if held_out is None else held_out) for run in word_runs(prompt)}
    chooser = random.Random(f"{kind} {seed}")
    seen: set[str] = set()
    num_useless = 0
    while num_useless < MAX_USELESS_TRIES:
        prompt = grammar.expand(chooser.choice(grammar.kinds[kind]), chooser)
        if prompt in seen or not forbidden.isdisjoint(word_runs(prompt)):
            num_useless += 1
            continue
        num_useless = 0
        seen.add(prompt)
        yield prompt


def held_out_prompts() -> list[str]:
    """Return every held-out instruction."""
    lines = [
        line for file in sorted(HELD_OUT.glob("*.jsonl")) for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return [json.loads(line)["prompt"] for line in lines]


def word_runs(text: str) -> set[WordRun]:
    """Return every run of SHARED_WORDS words, or all words of a text that has fewer; case and punctuation aside."""
    words = re.findall(r"\w+", text.casefold())
    last = max(len(words) - SHARED_WORDS, 0)
    return {tuple(words[begin : begin + SHARED_WORDS]) for begin in range(last + 1)}
