"""What the target is asked to train its heads: instructions of every kind in turn, or passages of text files."""

import random
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from pathlib import Path

from tokenizers import Tokenizer

from coordinator.chat import ChatTemplate
from models.heads.samples import Instruction
from models.instructions import load_grammar, training_instructions

TEMPERATURES = (0.0, 1.0)  # in turn: greedy answers, and sampled ones


def from_grammar(tokenizer: Tokenizer, template: ChatTemplate | None, seed: int) -> Iterator[Instruction]:
    """Yield training instructions, endlessly; rendered by the chat template of a target that has one."""
    grammar = load_grammar()
    kinds = {kind: _endless(kind, seed) for kind in grammar.kinds}
    temperatures = cycle(TEMPERATURES)
    for round_temperature, kind in ((temperature, kind) for temperature in temperatures for kind in kinds):
        prompt = next(kinds[kind])
        text = template.render([("user", prompt)]) if template else prompt
        yield Instruction(kind, round_temperature, tokenizer.encode(text, add_special_tokens=not template).ids)


def _endless(kind: str, seed: int) -> Iterator[str]:
    for again in count():
        yield from training_instructions(kind, seed + again)


def from_texts(
    tokenizer: Tokenizer, files: Sequence[Path], min_tokens: int, max_tokens: int, seed: int
) -> Iterator[Instruction]:
    """Yield passages of the files, endlessly, each of `min_tokens` to `max_tokens` tokens. Raises ValueError."""
    texts = [tokenizer.encode(file.read_text(encoding="utf-8", errors="replace")).ids for file in files]
    texts = [tokens for tokens in texts if len(tokens) >= min_tokens]
    if not texts:
        raise ValueError(f"no text of at least {min_tokens} tokens among {len(files)} files; give longer ones")
    chooser = random.Random(seed)
    weights = [len(tokens) for tokens in texts]
    for temperature in cycle(TEMPERATURES):
        tokens = chooser.choices(texts, weights)[0]
        length = min(chooser.randint(min_tokens, max_tokens), len(tokens))
        begin = chooser.randint(0, len(tokens) - length)
        yield Instruction("text", temperature, tokens[begin : begin + length])
