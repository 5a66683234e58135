"""The files of a head: its configuration and its tensors."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, get_args

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specdec.serving.settings import HeadKind

Tensors = dict[str, torch.Tensor]

HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
PICKLED_FILES = ("pytorch_model.bin", "medusa_lm_head.pt")  # read as tensors alone, so that they can run no code
HEAD_PATTERNS = ["*.json", "*.safetensors", *PICKLED_FILES]


class HeadRefused(ValueError):
    """A head cannot be used. The message says what is wrong, and what to do."""


def folder_of(name: str, patterns: list[str]) -> Path:
    """Return a folder, fetched from the hub unless it is one already. Raises HeadRefused."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise HeadRefused(f"the folder {name} does not exist; give one that does, or a hub id like org/name")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadRefused(f"no folder {name} here, and the hub did not give it: {reason}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a folder. Raises HeadRefused."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise HeadRefused(f"{folder} has no {CONFIG_FILE}; give the folder of a published head") from None
    except (OSError, ValueError) as error:
        raise HeadRefused(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise HeadRefused(f"{file} holds no object; give the folder of a published head")
    return config


def read_tensors(folder: Path) -> Tensors:
    """Return all tensors of a folder. Raises HeadRefused."""
    safe = sorted(folder.glob("*.safetensors"))
    pickled = [folder / name for name in PICKLED_FILES if (folder / name).is_file()]
    if not safe and not pickled:
        raise HeadRefused(f"{folder} holds no weights (*.safetensors, or {' or '.join(PICKLED_FILES)})")
    tensors: Tensors = {}
    for file in safe or pickled[:1]:
        tensors |= _read(file)
    return tensors


def _read(file: Path) -> Tensors:
    try:
        tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadRefused(f"{file} is damaged, or no file of tensors: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise HeadRefused(f"{file} holds other things than tensors by name")
    return tensors


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Write a head's configuration and tensors, floating-point ones in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor.detach()).contiguous().cpu()
        for name, tensor in tensors.items()
    }
    save_file(stored, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def check_kind(config: Mapping[str, Any], given: HeadKind, folder: Path) -> None:
    """Raise HeadRefused if a configuration says that it is of another kind than the head was given as."""
    stated = config.get("speculators_model_type")
    kind = stated or config.get("model_type")  # of which only Medusa's heads have one that says what they are
    if kind == given:
        return
    if kind in HEAD_KINDS:
        raise HeadRefused(
            f"{folder} is a head of the kind {kind}; give it as --{kind}-head, or with --head-kind {kind}"
        )
    if stated:
        raise HeadRefused(f"{folder} is a head of the kind {kind}; heads of {', '.join(HEAD_KINDS)} are served")


def required(config: Mapping[str, Any], name: str, folder: Path) -> Any:
    """Return an entry of a configuration. Raises HeadRefused where it is missing."""
    if config.get(name) is None:
        raise HeadRefused(f"the {CONFIG_FILE} of {folder} has no {name}; give the folder of a published head")
    return config[name]


def refuse_others(folder: Path, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise HeadRefused if tensors are missing, or there are some that the network has no place for."""
    for problem, names in (("lacks", sorted(missing)), ("has, and this kind of head has not,", sorted(unexpected))):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            listed = ", ".join(names[:3]) + more
            raise HeadRefused(f"{folder} {problem} the weights {listed}; is it a head of this kind?")
