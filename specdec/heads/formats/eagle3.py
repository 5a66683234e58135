"""EAGLE-3 heads in the format of `speculators`, and as their authors publish them (read only)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec.heads.eagle3 import Eagle3Head, Eagle3Shape
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

NAMES = {"midlayer.": "layers.0."}  # of the authors' checkpoints
NUM_TOKENS = 5  # that a head of ours is meant to draft
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def eagle3_shape(config: Mapping[str, Any], target: TargetFolder, folder: Path) -> Eagle3Shape:
    """Return the shape that a `config.json` defines. Raises HeadRefused."""
    layers = config.get("transformer_layer_config") or _original_layers(config)
    transformer = transformer_config(layers, folder)
    if transformer.num_hidden_layers != 1:
        raise HeadRefused(f"{folder} has {transformer.num_hidden_layers} layers; EAGLE-3 heads of one layer are served")
    if config.get("norm_before_fc") and config.get("fc_norm"):
        raise HeadRefused(f"{folder} has both norm_before_fc and fc_norm; a head has at most one of them")
    named = config.get("eagle_aux_hidden_state_layer_ids")
    named = named or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    shape = Eagle3Shape(
        transformer,
        draft_vocab_size=int(config.get("draft_vocab_size") or transformer.vocab_size),
        aux_layers=layer_ids(folder, named) if named else default_layers(target.num_layers),
        target_hidden_size=int(config.get("target_hidden_size") or transformer.hidden_size),
        **{name: bool(config.get(name, False)) for name in FLAGS},
    )
    check_fit(folder, target, shape.target_hidden_size, transformer.vocab_size, shape.aux_layers)
    return shape


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers that a head reads whose configuration names none: an early, a middle and a late one."""
    return 2, num_layers // 2, num_layers - 3


def _original_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer's configuration in a checkpoint of the authors: the top level, always of Llama's layers."""
    return {**config, "model_type": "llama"}


def load_eagle3(folder: str | Path, target: str | Path, dtype: torch.dtype = torch.float32) -> Eagle3Head:
    """Read a head in either format; what it lacks comes from the target's folder. Raises HeadRefused."""
    place, verifier = folder_of(str(folder), HEAD_PATTERNS), target_folder(str(target))
    config = read_config(place)
    check_kind(config, "eagle3", place)
    if "speculators_model_type" not in config:
        required(config, "draft_vocab_size", place)
    shape = eagle3_shape(config, verifier, place)
    tensors = renamed(read_tensors(place), NAMES, DROPPED)
    vocabulary = take_vocabulary(tensors, shape.draft_vocab_size, verifier.vocab_size, place)
    with torch.device("meta"):
        head = Eagle3Head(shape)
    head = with_rotary(head, shape.transformer)
    return filled(head, vocabulary, complete(tensors, verifier, vocabulary), place, dtype)


def save_eagle3(head: Eagle3Head, folder: str | Path, verifier: str, with_lm_head: bool) -> None:
    """Write a head in the format of `speculators`; `verifier` is the target's name.

    Without `with_lm_head` the output layer is left out: reading takes the target's.
    """
    shape = head.shape
    config = speculators_config("eagle3", shape.transformer, shape.draft_vocab_size, NUM_TOKENS, verifier)
    config |= {name: getattr(shape, name) for name in FLAGS}
    config |= {
        "architectures": ["Eagle3Speculator"],
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        "target_hidden_size": shape.target_hidden_size,
    }
    write(Path(folder), config, saved_tensors(head, with_lm_head))
