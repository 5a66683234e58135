"""DFlash heads in the format of `speculators`, and as their authors publish them (read only)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec.heads.dflash import DFlashHead, DFlashShape
from specdec.heads.formats.files import (
    HEAD_PATTERNS,
    HeadRefused,
    check_kind,
    folder_of,
    read_config,
    read_tensors,
    required,
    write,
)
from specdec.heads.formats.target import TargetFolder, target_folder
from specdec.heads.formats.transformer import (
    DROPPED,
    check_fit,
    complete,
    filled,
    layer_ids,
    renamed,
    saved_tensors,
    speculators_config,
    take_vocabulary,
    transformer_config,
    with_rotary,
)

MAX_BLOCK_SIZE = 64


def dflash_shape(config: Mapping[str, Any], target: TargetFolder, folder: Path) -> DFlashShape:
    """Return the shape that a `config.json` defines. Raises HeadRefused."""
    shape = _speculators_shape(config, folder) if "speculators_model_type" in config else _original(config, folder)
    if not 2 <= shape.block_size <= MAX_BLOCK_SIZE:
        raise HeadRefused(f"{folder} has a block of {shape.block_size}; blocks of 2 to {MAX_BLOCK_SIZE} are served")
    if not 0 <= shape.mask_token_id < target.vocab_size:
        raise HeadRefused(f"{folder} has the mask token {shape.mask_token_id}, which the target does not have")
    check_fit(folder, target, shape.target_hidden_size, shape.transformer.vocab_size, shape.aux_layers)
    return shape


def _speculators_shape(config: Mapping[str, Any], folder: Path) -> DFlashShape:
    if config.get("sample_from_anchor"):
        raise HeadRefused(f"{folder} predicts from its anchor (sample_from_anchor), which is not served")
    transformer = transformer_config(required(config, "transformer_layer_config", folder), folder)
    return DFlashShape(
        transformer,
        draft_vocab_size=int(config.get("draft_vocab_size") or transformer.vocab_size),
        aux_layers=layer_ids(folder, config.get("aux_hidden_state_layer_ids")),
        target_hidden_size=int(config.get("target_hidden_size") or transformer.hidden_size),
        block_size=int(required(config, "block_size", folder)),
        mask_token_id=int(required(config, "mask_token_id", folder)),
    )


def _original(config: Mapping[str, Any], folder: Path) -> DFlashShape:
    """Return the shape of a checkpoint of the authors, where layer i means the state after it, and so i + 1 layers."""
    own = required(config, "dflash_config", folder)
    transformer = transformer_config(config, folder)
    return DFlashShape(
        transformer,
        draft_vocab_size=transformer.vocab_size,
        aux_layers=tuple(layer + 1 for layer in layer_ids(folder, own.get("target_layer_ids"))),
        target_hidden_size=int(transformer.hidden_size),
        block_size=int(config.get("block_size") or required(own, "block_size", folder)),
        mask_token_id=int(required(own, "mask_token_id", folder)),
    )


def load_dflash(folder: str | Path, target: str | Path, dtype: torch.dtype = torch.float32) -> DFlashHead:
    """Read a head in either format; what it lacks comes from the target's folder. Raises HeadRefused."""
    place, verifier = folder_of(str(folder), HEAD_PATTERNS), target_folder(str(target))
    config = read_config(place)
    check_kind(config, "dflash", place)
    shape = dflash_shape(config, verifier, place)
    tensors = renamed(read_tensors(place), {}, DROPPED)
    vocabulary = take_vocabulary(tensors, shape.draft_vocab_size, verifier.vocab_size, place)
    with torch.device("meta"):
        head = DFlashHead(shape)
    head = with_rotary(head, shape.transformer)
    return filled(head, vocabulary, complete(tensors, verifier, vocabulary), place, dtype)


def save_dflash(head: DFlashHead, folder: str | Path, verifier: str, with_lm_head: bool) -> None:
    """Write a head in the format of `speculators`; `verifier` is the target's name.

    Without `with_lm_head` the output layer is left out: reading takes the target's.
    """
    shape = head.shape
    config = speculators_config("dflash", shape.transformer, shape.draft_vocab_size, shape.block_size - 1, verifier)
    config |= {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": list(shape.aux_layers),
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "target_hidden_size": shape.target_hidden_size,
    }
    write(Path(folder), config, saved_tensors(head, with_lm_head))
