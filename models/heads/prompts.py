"""What the target is asked to train its heads: instructions of every kind in turn, or passages of text files."""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, cycle
from pathlib import Path

from tokenizers import Tokenizer

from coordinator.chat import ChatTemplate
from models.corpus import training_texts
from models.heads.samples import Instruction
from models.instructions import load_grammar, training_instructions

PYTHON = "python"
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


def mixed(one: Iterator[Instruction], other: Iterator[Instruction], part: float) -> Iterator[Instruction]:
    """Yield from both, endlessly; `part` of what is yielded comes from `other`, evenly."""
    owed = 0.0
    while True:
        owed += part
        yield next(other if owed >= 1 else one)
        owed -= owed >= 1


def from_texts(
    tokenizer: Tokenizer, texts: Iterable[str], min_tokens: int, max_tokens: int, seed: int
) -> Iterator[Instruction]:
    """Yield passages of texts, endlessly, each of `min_tokens` to `max_tokens` tokens. Raises ValueError."""
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    encoded = [tokens for tokens in encoded if len(tokens) >= min_tokens]
    if not encoded:
        raise ValueError(f"no text has {min_tokens} tokens or more; give longer ones")
    return _passages(encoded, min_tokens, max_tokens, seed)


def _passages(texts: Sequence[list[int]], min_tokens: int, max_tokens: int, seed: int) -> Iterator[Instruction]:
    chooser = random.Random(seed)
    weights = [len(tokens) for tokens in texts]
    for temperature in cycle(TEMPERATURES):
        tokens = chooser.choices(texts, weights)[0]
        length = min(chooser.randint(min_tokens, max_tokens), len(tokens))
        begin = chooser.randint(0, len(tokens) - length)
        yield Instruction("text", temperature, tokens[begin : begin + length])


def read_texts(names: Sequence[str]) -> list[str]:
    """Return the texts of files, and of all files in folders; "python" is the running Python's library.

    Raises ValueError for a file that is missing or not UTF-8.
    """
    texts: list[str] = []
    for name in names:
        if name == PYTHON:
            texts += [text for kind in training_texts().values() for text in kind if text]
            continue
        path = Path(name)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_dir():
                texts.append(_read(file))
    return texts


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as text: {error}; give UTF-8 text files") from error
