"""Tokenizers without torch: where they lie, how many tokens they have, and a fingerprint to compare two by."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, HTTPError
from tokenizers import Tokenizer

logging.getLogger("huggingface_hub").handlers.clear()  # its own handler prints each line a second time

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "config.json"
# every file besides the weights that defines a model's tokens
FILES = (TOKENIZER_FILE, "tokenizer_config.json", "chat_template.jinja", CONFIG_FILE, "generation_config.json")


class TokenizerMissing(ValueError):
    """There is no tokenizer under this name. The message says what would be right."""


def tokenizer_folder(name_or_path: str) -> Path:
    """Return the folder that holds a model's tokenizer, fetched from the hub unless it is a folder already.

    Raises TokenizerMissing.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
            raise TokenizerMissing(f"the folder {name_or_path} does not exist; give one that does, or a hub id")
        folder = _fetched(name_or_path)
    if not (folder / TOKENIZER_FILE).is_file():
        raise TokenizerMissing(
            f"{name_or_path} has no {TOKENIZER_FILE}; save it: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return folder


def config_folder(name_or_path: str) -> Path:
    """Return the folder of a hub model's configuration, fetched without the rest. Raises TokenizerMissing."""
    return _fetched(name_or_path, (CONFIG_FILE,))


def is_here(name_or_path: str) -> bool:
    """Return whether a model is a folder, or a hub model of which something is in the local cache."""
    if Path(name_or_path).expanduser().is_dir() or name_or_path.count("/") > 1:
        return True
    try:
        return isinstance(try_to_load_from_cache(name_or_path, CONFIG_FILE), str)
    except HFValidationError:
        return True  # no hub id at all, which the loader says better


def _fetched(name: str, files: Sequence[str] = FILES) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (HTTPError, HFValidationError, OSError) as error:  # a connection's own errors are no OSError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TokenizerMissing(f"no folder {name} here, and the hub did not give it: {reason}") from error


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """Return the tokenizer of a folder or hub id. Raises TokenizerMissing."""
    file = tokenizer_folder(name_or_path) / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerMissing(f"{file} is not a tokenizer: {error}") from error
    # some files ask for both, and a prompt would be truncated silently
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash of the vocabulary: two tokenizers with the same one give every token the same id."""
    pairs = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def num_token_ids(tokenizer: Tokenizer) -> int:
    """Return the end of the real vocabulary: one more than the highest id, as ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
