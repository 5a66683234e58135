"""Medusa heads as vLLM reads them, and as their authors publish them (read only)."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec.heads.formats.files import (
    HEAD_PATTERNS,
    HeadRefused,
    Tensors,
    check_kind,
    folder_of,
    read_config,
    read_tensors,
    write,
)
from specdec.heads.formats.target import TargetFolder, target_folder
from specdec.heads.formats.transformer import check_fit, filled, take_vocabulary
from specdec.heads.medusa import MedusaHead, MedusaShape

MAX_HEADS, MAX_LAYERS = 32, 16


def medusa_shape(config: Mapping[str, Any], tensors: Tensors, target: TargetFolder, folder: Path) -> MedusaShape:
    """Return the shape that a configuration and tensors in our names define. Raises HeadRefused."""
    num_heads = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    if not 1 <= num_heads <= MAX_HEADS:  # counted, because published configurations are sometimes wrong
        raise HeadRefused(f"{folder} holds {num_heads} Medusa heads; 1 to {MAX_HEADS} are served")
    num_layers = _count(config, ("medusa_num_layers", "num_hidden_layers"), MAX_LAYERS, folder)
    draft_vocab_size = int(config.get("truncated_vocab_size") or target.vocab_size)
    shape = MedusaShape(
        hidden_size=int(config.get("hidden_size") or target.hidden_size),
        target_vocab_size=int(config.get("vocab_size") or target.vocab_size),
        draft_vocab_size=draft_vocab_size,
        num_heads=num_heads,
        num_layers=num_layers,
        has_own_lm_heads="lm_heads.1.weight" in tensors,
        has_bias=any(name.endswith("linear.bias") for name in tensors),
    )
    check_fit(folder, target, shape.hidden_size, shape.target_vocab_size, (target.num_layers,))
    return shape


def _count(config: Mapping[str, Any], names: tuple[str, ...], maximum: int, folder: Path) -> int:
    value = next((config[name] for name in names if name in config), None)
    if not isinstance(value, int) or not 1 <= value <= maximum:
        raise HeadRefused(f"{names[0]} of {folder} is {value!r}; it must be a number from 1 to {maximum}")
    return value


def own_names(tensors: Tensors, num_layers: int) -> Tensors:
    """Return tensors by the names of our network: vLLM's, or the authors' (`0.0.linear.weight`, `0.1.weight`)."""
    return {_own_name(name.removeprefix("medusa_heads."), num_layers): tensor for name, tensor in tensors.items()}


def _own_name(name: str, num_layers: int) -> str:
    if name == "lm_head.weight":
        return "lm_heads.0.weight"
    name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$", r"blocks.\1.\2.linear.\3", name)
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.\2.linear.\3", name)
    return re.sub(rf"^(\d+)\.{num_layers}\.weight$", r"lm_heads.\1.weight", name)


def load_medusa(folder: str | Path, target: str | Path, dtype: torch.dtype = torch.float32) -> MedusaHead:
    """Read heads in either format; an output layer that they lack is the target's. Raises HeadRefused."""
    place, verifier = folder_of(str(folder), HEAD_PATTERNS), target_folder(str(target))
    config = read_config(place)
    check_kind(config, "medusa", place)
    num_layers = _count(config, ("medusa_num_layers", "num_hidden_layers"), MAX_LAYERS, place)
    tensors = own_names(read_tensors(place), num_layers)
    shape = medusa_shape(config, tensors, verifier, place)
    if (token_map := tensors.pop("token_map", None)) is not None and shape.draft_vocab_size < verifier.vocab_size:
        tensors["d2t"] = token_map.long() - torch.arange(len(token_map))
    vocabulary = take_vocabulary(tensors, shape.draft_vocab_size, verifier.vocab_size, place)
    for name in [name for name in tensors if name.startswith("lm_heads.")]:
        if len(tensors[name]) == verifier.vocab_size:  # of all tokens, with a map
            tensors[name] = tensors[name][vocabulary.target_ids]
    if not shape.has_own_lm_heads and "lm_heads.0.weight" not in tensors:
        tensors["lm_heads.0.weight"] = verifier.output_rows(vocabulary.target_ids)
    with torch.device("meta"):
        head = MedusaHead(shape)
    return filled(head, vocabulary, tensors, place, dtype)


def save_medusa(head: MedusaHead, folder: str | Path, verifier: str, with_lm_head: bool) -> None:
    """Write heads as vLLM reads them; `verifier` is the target's name.

    Without `with_lm_head` the output layer is left out: reading takes the target's.
    """
    shape = head.shape
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": verifier,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.target_vocab_size,
        "truncated_vocab_size": shape.draft_vocab_size,
        "num_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "medusa_fc_bias": shape.has_bias,
        "original_lm_head": not shape.has_own_lm_heads,
        "dtype": "bfloat16",
    }
    write(Path(folder), config, _published(head, with_lm_head))


def _published(head: MedusaHead, with_lm_head: bool) -> Tensors:
    tensors: Tensors = {}
    for name, tensor in head.state_dict().items():
        if name.startswith("blocks."):
            tensors[re.sub(r"^blocks\.(\d+)\.(\d+)\.linear", r"blocks.\1.layers.\2", name)] = tensor
        elif name.startswith("lm_heads.") and (with_lm_head or head.shape.has_own_lm_heads):
            tensors[name] = tensor
    if head.vocabulary.is_reduced:
        tensors["token_map"] = head.vocabulary.target_ids
    return tensors
