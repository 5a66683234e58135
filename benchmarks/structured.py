"""Structured output: do all texts have their form, and is it faster with drafts than without?

python -m benchmarks.structured --model smollm2 --generations 200

Texts under five JSON schemas and two grammars, judged by other programs than the one that masks: jsonschema, Python's
own parser, an XML parser. A text that reaches the limit of tokens is cut, and counted apart. Each prompt is completed
with drafts and without them, in turn, by the services' own choice of drafter.
"""

import argparse
import ast
import asyncio
import json
import statistics
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from benchmarks.measure import hardware
from benchmarks.served import Served, demo_pair, smollm2
from specdec import AsyncClient, Completion, FinishReason, SamplingParams, SpeculationParams
from specdec.serving.child import print_errors
from specdec.serving.local import CannotRun, running

MODELS = {"demo": demo_pair, "smollm2": smollm2}
NAME = {"type": "string", "minLength": 1, "maxLength": 30}


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of these properties, and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS = {
    "person": closed(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 120}, city=NAME),
    "booking": closed(
        guest=NAME,
        room={"enum": ["single", "double", "suite"]},
        nights={"type": "integer", "minimum": 1, "maximum": 30},
        breakfast={"type": "boolean"},
        notes={"type": ["string", "null"], "maxLength": 40},
    ),
    "recipe": closed(
        title=NAME, ingredients={"type": "array", "items": closed(item=NAME, grams={"type": "integer"}), "maxItems": 3}
    ),
    "verdict": closed(sentiment={"enum": ["positive", "neutral", "negative"]}, score={"type": "number"}),
    "shape": {
        "anyOf": [
            closed(kind={"const": "circle"}, radius={"type": "number"}),
            closed(kind={"const": "rectangle"}, width={"type": "number"}, height={"type": "number"}),
        ]
    },
}
ARITHMETIC = """
start: sum
sum: product ((" + " | " - ") product)~0..2
product: factor (" * " factor)~0..2
factor: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""
MARKUP = """
start: "<list>" item~1..4 "</list>"
item: "<item>" TEXT "</item>" | "<item><b>" TEXT "</b></item>"
TEXT: /[a-z ]{1,20}/
"""
PROMPTS = {
    "person": "Describe an invented person as a JSON object with name, age and city.",
    "booking": "Write a hotel booking as a JSON object.",
    "recipe": "Write a short recipe as a JSON object with a title and ingredients.",
    "verdict": "Is this review positive? 'The soup was cold and the waiter rude.' Answer as a JSON object.",
    "shape": "Describe a shape as a JSON object.",
    "arithmetic": "Write an arithmetic expression with several numbers.",
    "markup": "Write a list of things to buy as XML, with a tag for each item.",
}


def is_arithmetic(text: str) -> bool:
    """Return whether Python reads a text as an expression."""
    return isinstance(ast.parse(text, mode="eval"), ast.Expression)


def is_markup(text: str) -> bool:
    """Return whether a text is XML of the expected root."""
    return ET.fromstring(text).tag == "list"


def is_valid(schema: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return what judges texts by a schema."""

    def judge(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return judge


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    **{name: ({"json_schema": schema}, is_valid(schema)) for name, schema in SCHEMAS.items()},
    "arithmetic": ({"lark": ARITHMETIC}, is_arithmetic),
    "markup": ({"lark": MARKUP}, is_markup),
}
SPECULATIONS = {"plain": SpeculationParams(num_draft_tokens=0), "drafted": SpeculationParams()}


@dataclass
class Found:
    """What the texts of one form came to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    speeds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SPECULATIONS})
    tokens_per_round: list[float] = field(default_factory=list)

    def add(self, kind: str, outcome: str, completion: Completion, elapsed_s: float) -> None:
        """Add a text."""
        self.outcomes[outcome] += 1
        self.speeds[kind].append(len(completion.tokens) / elapsed_s)
        if kind == "drafted":
            self.tokens_per_round.append(completion.statistics.tokens_per_round)


def judged(name: str, completion: Completion) -> str:
    """Return what a text is: right, cut at the limit of tokens, or wrong."""
    if completion.finish_reason is not FinishReason.EOS:
        return "cut"
    try:
        return "right" if FORMS[name][1](completion.text) else "wrong"
    except (ValueError, SyntaxError, ET.ParseError, jsonschema.ValidationError):
        return "wrong"


async def generate(client: AsyncClient, name: str, seed: int, flags: argparse.Namespace, found: Found) -> None:
    """Complete a prompt with drafts and without, in an order that alternates."""
    sampling = SamplingParams(seed=seed, temperature=flags.temperature, max_new_tokens=flags.tokens, **FORMS[name][0])
    for kind in list(SPECULATIONS)[:: 1 if seed % 2 else -1]:
        begin = time.perf_counter()
        given: dict[str, Any] = {"sampling": sampling, "speculation": SPECULATIONS[kind]}
        if flags.model == "smollm2":
            completion = await client.chat([("user", PROMPTS[name])], **given)
        else:
            completion = await client.complete(PROMPTS[name], **given)
        outcome = judged(name, completion)
        if outcome == "wrong":
            print(f"wrong {name}: {completion.text!r}", file=sys.stderr)
        found.add(kind, outcome, completion, time.perf_counter() - begin)


async def measure(flags: argparse.Namespace) -> int:
    """Print a table; return how many texts were wrong."""
    served: Served = MODELS[flags.model]()
    print(f"{hardware()}; {flags.model}, temperature {flags.temperature:g}, at most {flags.tokens} tokens")
    print("| form | right | cut | wrong | tokens/s plain | tokens/s drafted | ratio | tokens a round |\n|" + "---|" * 8)
    total = Counter[str]()
    async with running(served.options, print_errors) as stack, AsyncClient(stack.address, timeout_s=600) as client:
        for name in FORMS:
            found = Found()
            await generate(client, name, 0, flags, Found())  # the first one compiles
            for seed in range(1, 1 + -(-flags.generations // (2 * len(FORMS)))):
                await generate(client, name, seed, flags, found)
            plain, drafted = (statistics.median(speeds) for speeds in found.speeds.values())
            ratio = statistics.median(b / a for a, b in zip(*found.speeds.values(), strict=True))
            counts = " | ".join(str(found.outcomes[outcome]) for outcome in ("right", "cut", "wrong"))
            rounds = statistics.mean(found.tokens_per_round)
            print(f"| {name} | {counts} | {plain:.1f} | {drafted:.1f} | {ratio:.2f} | {rounds:.2f} |", flush=True)
            total += found.outcomes
    print(f"{total.total()} texts: {total['right']} right, {total['cut']} cut, {total['wrong']} wrong")
    return total["wrong"]


def main() -> None:
    """Read the flags and run; exit with 1 if a text is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="(default: %(default)s)")
    parser.add_argument("--generations", type=int, default=200, help="of all forms together (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=160, help="of each text, at most (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="(default: %(default)s)")
    try:
        sys.exit(1 if asyncio.run(measure(parser.parse_args())) else 0)
    except CannotRun as error:
        sys.exit(f"structured: {error}")


if __name__ == "__main__":
    main()
