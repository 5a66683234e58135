"""A corpus to draft from: text files, read once when the worker starts."""

from collections.abc import Iterator
from pathlib import Path

from draft_service.context_index import ContextIndex

MAX_CORPUS_BYTES = 32 << 20  # some 8 million tokens: 100 MB of memory, and half a minute at the start


def corpus_files(place: Path) -> list[Path]:
    """Return a file, or all files under a folder but hidden ones, in order. Raises ValueError."""
    if not place.exists():
        raise ValueError(f"--suffix-corpus: there is no file or folder {place}")
    files = [place] if place.is_file() else sorted(_visible_files(place))
    if not files:
        raise ValueError(f"--suffix-corpus: {place} holds no files")
    size = sum(file.stat().st_size for file in files)
    if size > MAX_CORPUS_BYTES:
        raise ValueError(f"--suffix-corpus: {place} holds {size} bytes; the maximum is {MAX_CORPUS_BYTES}")
    return files


def _visible_files(folder: Path) -> Iterator[Path]:
    for entry in folder.rglob("*"):
        if entry.is_file() and not any(part.startswith(".") for part in entry.relative_to(folder).parts):
            yield entry


def read_text(file: Path) -> str:
    """Return a file's text. Raises ValueError for what cannot be read, or is not text."""
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--suffix-corpus: {file} is not text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"--suffix-corpus: cannot read {file} ({error.strerror})") from None
    if "\0" in text:
        raise ValueError(f"--suffix-corpus: {file} is not text: it has zero bytes")
    return text


def corpus_index(place: Path, tokenizer_name: str) -> ContextIndex:
    """Read, tokenize and index a corpus. Raises ValueError."""
    from specdec.serving.tokenizer import load_tokenizer  # a worker without a corpus needs no tokenizers

    texts = [read_text(file) for file in corpus_files(place)]
    encodings = load_tokenizer(tokenizer_name).encode_batch(texts, add_special_tokens=False)
    return ContextIndex.of(encoding.ids for encoding in encodings)
