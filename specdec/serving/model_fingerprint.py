"""A hash of everything that a model's output depends on: two workers with the same one serve the same model.

It covers the bytes of the weights, the configuration, the number type, the quantisation, and the tokenizer with the
tokens that end a text. It does not cover the folder's path, nor the processor, whose rounding may differ.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

VERSION = "specdec model 1"
CHUNK_BYTES = 64 << 20  # hashed at once: threads share a file's chunks
NUM_THREADS = 4  # about 1 GB/s each
INDEX_FILE, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "generation_config.json")
# written by the program that saved the model: they change nothing that it computes
IRRELEVANT_KEYS = frozenset({"_name_or_path", "transformers_version"})


def model_fingerprint(folder: Path, numbers: Mapping[str, str]) -> str:
    """Return the fingerprint of the model in a folder; `numbers` says how it is computed: number type, quantisation."""
    digest = hashlib.blake2b(VERSION.encode(), digest_size=16)
    for name in ("config.json", *TOKENIZER_FILES):
        _add(digest, name, json.dumps(_relevant(folder / name), sort_keys=True))
    for name, value in sorted(numbers.items()):
        _add(digest, name, value)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="fingerprint") as pool:
        for file in weight_files(folder):
            chunks = pool.map(lambda begin, file=file: _chunk_digest(file, begin), _starts(file))
            _add(digest, file.name, "".join(chunks))
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights, in a fixed order."""
    index = _read(folder / INDEX_FILE)
    if index:
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    single = folder / WEIGHTS_FILE
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _add(digest: Any, name: str, value: str) -> None:
    """Hash a named value; the length keeps neighbours apart."""
    digest.update(f"{name} {len(value)} {value}\n".encode())


def _relevant(file: Path) -> dict[str, Any]:
    return {name: value for name, value in _read(file).items() if name not in IRRELEVANT_KEYS}


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return content


def _starts(file: Path) -> Iterable[int]:
    return range(0, file.stat().st_size, CHUNK_BYTES)


def _chunk_digest(file: Path, begin: int) -> str:
    with file.open("rb") as opened:
        opened.seek(begin)
        return hashlib.blake2b(opened.read(CHUNK_BYTES), digest_size=32).hexdigest()
