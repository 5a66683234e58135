"""A head's decoder layers in its configuration, and how a head is filled with tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from specdec.heads.formats.files import HeadRefused, Tensors, refuse_others
from specdec.heads.formats.target import TargetFolder
from specdec.heads.layers import Rotary
from specdec.heads.vocabulary import DraftVocabulary

SERVED_TYPES = ("llama", "qwen3")
SPECULATORS_VERSION = "0.9.0"  # whose format is written
DROPPED = (
    "verifier_",
    "rotary_emb.inv_freq",
    "rotary_emb.original_inv_freq",
)  # tensors of checkpoints that are not the head's

HeadT = TypeVar("HeadT", bound=nn.Module)


def transformer_config(values: Mapping[str, Any], folder: Path) -> PretrainedConfig:
    """Return the configuration of a head's layers. Raises HeadRefused for layers that are not served."""
    model_type = values.get("model_type", "qwen3")
    if model_type not in SERVED_TYPES:
        raise HeadRefused(f"{folder} has {model_type} layers; heads of {' and '.join(SERVED_TYPES)} layers are served")
    kept = {name: value for name, value in values.items() if name not in ("model_type", "transformers_version")}
    config: PretrainedConfig = AutoConfig.for_model(model_type, **kept)
    sliding = [name for name in (getattr(config, "layer_types", None) or ()) if name != "full_attention"]
    if sliding:
        raise HeadRefused(f"{folder} has {sliding[0]} layers, which are not served; choose a head with full attention")
    return config


def speculators_config(
    kind: str, shape_config: PretrainedConfig, draft_vocab_size: int, num_tokens: int, verifier: str
) -> dict[str, Any]:
    """Return what the configurations of all kinds of heads have in common, in the format of `speculators`.

    `num_tokens` is how many tokens the head is meant to draft, `verifier` the target's name.
    """
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    layers = shape_config.to_diff_dict()
    return {
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": draft_vocab_size,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


def check_fit(folder: Path, target: TargetFolder, target_hidden_size: int, vocab_size: int, layers: object) -> None:
    """Raise HeadRefused unless a head that reads these layers is one for this target."""
    remedy = "give it the target that it was trained for, or choose another head"
    if target_hidden_size != target.hidden_size:
        sizes = f"states of size {target_hidden_size}; those of {target.folder} have {target.hidden_size}"
        raise HeadRefused(f"{folder} reads {sizes}; {remedy}")
    if vocab_size != target.vocab_size:
        sizes = f"a vocabulary of {vocab_size}; {target.folder} has one of {target.vocab_size}"
        raise HeadRefused(f"{folder} is a head for {sizes}; {remedy}")
    wrong = [layer for layer in _layers(folder, layers) if layer > target.num_layers]
    if wrong:
        raise HeadRefused(f"{folder} reads layer {wrong[0]}; {target.folder} has {target.num_layers}; {remedy}")


def layer_ids(folder: Path, layers: object) -> tuple[int, ...]:
    """Return the layers that a head reads. Raises HeadRefused for what names no layers."""
    return _layers(folder, layers)


def _layers(folder: Path, layers: object) -> tuple[int, ...]:
    is_list = isinstance(layers, list | tuple) and bool(layers)
    if not is_list or not all(isinstance(layer, int) and layer >= 0 for layer in layers):  # type: ignore[attr-defined]
        raise HeadRefused(f"{folder} names {layers!r} as the layers that it reads; that must be a list of numbers")
    if len(set(layers)) != len(layers):  # type: ignore[call-overload, arg-type]
        raise HeadRefused(f"{folder} names a layer twice: {layers!r}; choose another head")
    return tuple(layers)  # type: ignore[arg-type]


def renamed(tensors: Tensors, names: Mapping[str, str], dropped: tuple[str, ...]) -> Tensors:
    """Return tensors with the beginnings of names replaced, without those that begin or end with a dropped part."""
    kept: Tensors = {}
    for name, tensor in tensors.items():
        if name.startswith(dropped) or name.endswith(dropped):
            continue
        begin = next((old for old in names if name.startswith(old)), None)
        kept[name if begin is None else names[begin] + name.removeprefix(begin)] = tensor
    return kept


def take_vocabulary(tensors: Tensors, draft_vocab_size: int, vocab_size: int, folder: Path) -> DraftVocabulary:
    """Return the vocabulary, taking its tensors out of `tensors`. Raises HeadRefused where it is no vocabulary."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    vocabulary = DraftVocabulary(draft_vocab_size, vocab_size)
    if d2t is None:
        if draft_vocab_size != vocab_size:
            raise HeadRefused(f"{folder} does not say which tokens of the target its {draft_vocab_size} are (no d2t)")
        return vocabulary
    target_ids = d2t.long() + torch.arange(len(d2t))
    is_valid = len(d2t) == draft_vocab_size and len(set(target_ids.tolist())) == draft_vocab_size
    if not is_valid or target_ids.min() < 0 or target_ids.max() >= vocab_size:
        raise HeadRefused(f"{folder} maps its tokens to some that are not among the target's {vocab_size} (d2t)")
    if t2d is not None and len(t2d) != vocab_size:
        raise HeadRefused(f"{folder} is a head for a vocabulary of {len(t2d)}, by its t2d, and of {vocab_size}")
    vocabulary.d2t.copy_(d2t)
    vocabulary.t2d.zero_()
    vocabulary.t2d[target_ids] = True
    return vocabulary


def filled(head: HeadT, vocabulary: DraftVocabulary, tensors: Tensors, folder: Path, dtype: torch.dtype) -> HeadT:
    """Fill a head that was made on the meta device; what is missing or has another size raises HeadRefused."""
    head.vocabulary = vocabulary
    wanted = {name: value for name, value in head.state_dict().items() if not name.startswith("vocabulary.")}
    refuse_others(folder, wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys())
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            sizes = f"{list(tensor.shape)} and not {list(wanted[name].shape)}"
            raise HeadRefused(f"{name} of {folder} has the size {sizes}; is it a head for another hidden size?")
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    head.load_state_dict(stored | _buffers(vocabulary), assign=True)
    return head.eval().requires_grad_(False)


def with_rotary(head: HeadT, config: PretrainedConfig) -> HeadT:
    """Give a head that was made on the meta device the angles of positions, which no checkpoint holds."""
    head.rotary = Rotary(config)
    return head


def complete(tensors: Tensors, target: TargetFolder, vocabulary: DraftVocabulary) -> Tensors:
    """Add the target's embeddings, and its output rows of the vocabulary, where a checkpoint has none."""
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = target.embeddings()
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target.output_rows(vocabulary.target_ids)
    return tensors


def _buffers(vocabulary: DraftVocabulary) -> Tensors:
    return {f"vocabulary.{name}": value for name, value in vocabulary.state_dict().items()}


def saved_tensors(head: nn.Module, with_lm_head: bool) -> Tensors:
    """Return what a checkpoint holds: no embeddings, and the output layer only where it is not the target's."""
    vocabulary = head.vocabulary
    assert isinstance(vocabulary, DraftVocabulary)
    left_out = ("vocabulary.", "embed_tokens.") if with_lm_head else ("vocabulary.", "embed_tokens.", "lm_head.")
    tensors = {name: value for name, value in head.state_dict().items() if not name.startswith(left_out)}
    if vocabulary.is_reduced:
        tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    return tensors
