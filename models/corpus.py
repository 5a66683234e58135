"""The corpus: the running Python's standard library, without the files held out for the demo and the benchmarks."""

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
WINDOW = 512  # tokens of a training sequence: a prompt of 400 tokens and 100 new ones
HELD_OUT_MODULES = (
    "bisect", "calendar", "cmd", "configparser", "csv", "fileinput", "fnmatch", "graphlib",
    "heapq", "queue", "reprlib", "sched", "shlex", "statistics", "string", "textwrap",
)  # fmt: skip
HELD_OUT_TESTS = ("test_bisect", "test_fileinput", "test_queue", "test_sched")
HELD_OUT_STEMS = {*HELD_OUT_MODULES, *(f"test_{module}" for module in HELD_OUT_MODULES)}
# Generated tables, build configuration and third-party packages: not typical source code.
LEFT_OUT_FOLDERS = {"site-packages", "encodings", "pydoc_data", "lib-dynload", "__pycache__"}
LEFT_OUT_PREFIXES = ("config-", "_sysconfigdata")
TEST_FOLDERS = {"test", "tests", "idle_test"}

Tokens = NDArray[np.uint16]


def library_root() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_training_file(path: Path) -> bool:
    """Return whether a file, relative to the library, is not generated, held out, or the test of a held-out module."""
    if LEFT_OUT_FOLDERS & set(path.parts) or path.parts[0].startswith(LEFT_OUT_PREFIXES):
        return False
    top_level = len(path.parts) == 1 or path.parts[0] == "test"
    return not (top_level and path.stem in HELD_OUT_STEMS)


def read_source(path: Path) -> str:
    """Return a file's text, or an empty text if it is not UTF-8 (the tests of codecs)."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def training_texts() -> dict[str, list[str]]:
    """Read every training file: the library's own modules, and their tests."""
    root = library_root()
    texts: dict[str, list[str]] = {"library": [], "tests": []}
    for path in sorted(path.relative_to(root) for path in root.rglob("*.py")):
        if is_training_file(path):
            texts["tests" if TEST_FOLDERS & set(path.parts) else "library"].append(read_source(root / path))
    return texts


def copy_held_out(folder: Path) -> None:
    """Copy the held-out files; tests get another prefix, so that no test runner collects them."""
    folder.mkdir(parents=True, exist_ok=True)
    for module in HELD_OUT_MODULES:
        shutil.copyfile(library_root() / f"{module}.py", folder / f"{module}.py")
    for test in HELD_OUT_TESTS:
        name = test.replace("test_", "tests_of_")
        shutil.copyfile(library_root() / "test" / f"{test}.py", folder / f"{name}.py")


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train a byte-level BPE of 4,096 tokens whose id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    """Concatenate documents in a fixed shuffled order, each followed by the end-of-text token: [tokens]."""
    order = np.random.default_rng(0).permutation(len(texts))
    encodings = tokenizer.encode_batch([texts[index] for index in order if texts[index]])
    return np.concatenate([np.array([*encoding.ids, END_OF_TEXT_ID], np.uint16) for encoding in encodings])


def prepare(work: Path) -> None:
    """Write the token streams of library and tests, and the tokenizer: a given one, or else a new one."""
    texts, given = training_texts(), work / "start" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(given)) if given.exists() else train_tokenizer(iter(texts["library"]))
    for kind, documents in texts.items():
        stream = token_stream(tokenizer, documents)
        np.save(work / f"{kind}.npy", stream)
        print(f"{kind}: {len(documents)} files, {len(stream)} tokens", flush=True)
    tokenizer.save(str(work / "tokenizer.json"))


def windows(stream: Tokens, offset: int) -> Tokens:
    """Cut a stream, from the offset on, into windows that overlap by one token: [windows, WINDOW + 1]."""
    count = (len(stream) - offset - 1) // WINDOW
    starts = offset + WINDOW * np.arange(count)
    cut: Tokens = stream[starts[:, None] + np.arange(WINDOW + 1)]
    return cut


def epoch(work: Path, number: int, random: np.random.Generator) -> Tokens:
    """Return one shuffled pass over the library and over every other window of its tests: [windows, WINDOW + 1]."""
    offset = int(random.integers(WINDOW))
    library = windows(np.load(work / "library.npy"), offset)
    half_of_tests = windows(np.load(work / "tests.npy"), offset)[number % 2 :: 2]
    return random.permutation(np.concatenate([library, half_of_tests]))
