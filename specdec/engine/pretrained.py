"""Reading a transformers model from the hub or a folder, refusing what must not or cannot be served."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec.engine.errors import ModelRefused
from specdec.engine.layers import LayerStack, check_layers, class_with_layers
from specdec.engine.parallel import check_divisible, share_options

SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}  # the others keep state that cannot be truncated
MIN_BFLOAT16_WIDTH = 256  # on the CPU: below, a bfloat16 product's overhead (15 us) is more than its weights cost
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(device: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda"; raises ModelRefused for others and for absent ones."""
    if device not in ("auto", "cpu", "cuda"):
        raise ModelRefused(f"device {device!r} is unknown; use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelRefused("device 'cuda' was asked for but torch sees no GPU; use cpu, or install torch for CUDA")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(dtype: str, device: torch.device, width: int) -> torch.dtype:
    """Return the type for "auto", "float32" or "bfloat16"; auto is bfloat16 where the device computes it faster."""
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ModelRefused(f"dtype {dtype!r} is unknown; use auto, float32 or bfloat16")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if width >= MIN_BFLOAT16_WIDTH and _cpu_has_bfloat16() else torch.float32


def _cpu_has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "amx_tile", "bf16"))


def load_pretrained(
    name_or_path: str, device: torch.device, dtype: str, layers: Sequence[int] = (), num_shares: int = 1
) -> PreTrainedModel:
    """Return the model on `device` in evaluation mode, attending with transformers' own functions.

    With `layers`, in ascending order, only these are loaded; with `num_shares`, this process's share of the weights, as
    one of a group of so many. Raises ModelRefused if it cannot be loaded safely and served exactly, has no such layers,
    or cannot be shared.
    """
    name_or_path, config = _served_config(name_or_path, num_shares)
    check_layers(name_or_path, config, layers)
    kind: Any = class_with_layers(config, layers) if layers else AutoModelForCausalLM
    try:
        model: PreTrainedModel = kind.from_pretrained(
            name_or_path,
            config=config,
            dtype=choose_dtype(dtype, device, _width(config)),
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",
            **share_options(num_shares),
        )
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{name_or_path} cannot be loaded: {_first_line(error)}") from error
    except SafetensorError as error:
        raise ModelRefused(f"{_damaged_file(name_or_path)} is damaged ({error}); download or copy it again") from error
    _refuse_recurrent(name_or_path, model)
    if layers:
        LayerStack(model).keep(layers)
    if num_shares == 1:
        nn.Module.to(model, device)  # a share is there already
    return nn.Module.eval(model)


def check_shareable(name_or_path: str, num_shares: int) -> None:
    """Raise ModelRefused for a model that is not served, or cannot be divided into so many shares; read no weights."""
    _served_config(name_or_path, num_shares)


def _served_config(name_or_path: str, num_shares: int) -> tuple[str, PreTrainedConfig]:
    """Return the model's name, or its folder in full, and its configuration. Raises ModelRefused."""
    path = Path(name_or_path).expanduser()
    if looks_like_path(name_or_path):
        _refuse_bad_folder(path)
        name_or_path = str(path)
    config = _load_config(name_or_path)
    _refuse_unserved(name_or_path, config)
    if num_shares > 1:
        check_divisible(name_or_path, config, num_shares)
    return name_or_path, config


def text_config(name_or_path: str) -> PreTrainedConfig:
    """Return the configuration of a model's language model, of which no weights are read. Raises ModelRefused."""
    return _served_config(name_or_path, 1)[1].get_text_config(decoder=True)


def num_embeddings(model: PreTrainedModel) -> int:
    """Return how many token ids the model can read."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def _width(config: PreTrainedConfig) -> int:
    return getattr(config.get_text_config(decoder=True), "hidden_size", MIN_BFLOAT16_WIDTH)


def looks_like_path(name_or_path: str) -> bool:
    """Distinguish folders from hub ids; what looks like a folder is never looked up in the hub."""
    return name_or_path.startswith((".", "/", "~")) or name_or_path.count(os.sep) > 1 or Path(name_or_path).exists()


def _refuse_bad_folder(path: Path) -> None:
    if not path.is_dir():
        raise ModelRefused(f"the model folder {path} does not exist; give one that does, or a hub id like org/name")
    if not (path / "config.json").is_file():
        raise ModelRefused(f"the model folder {path} has no config.json; save the model with save_pretrained")
    if not any(path.glob("*.safetensors")):
        raise ModelRefused(
            f"the model folder {path} has no *.safetensors file, and pickled weights can run code when they are "
            "loaded; convert the model: load it where you trust it and call save_pretrained(folder)"
        )


def _load_config(name_or_path: str) -> PreTrainedConfig:
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name_or_path)
        _refuse_raw_config(name_or_path, raw)
        config: PreTrainedConfig = AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)
        return config
    except (OSError, ValueError) as error:
        reading = "" if Path(name_or_path).expanduser().is_dir() else " (no folder here, so taken as a hub id)"
        raise ModelRefused(
            f"the configuration of {name_or_path}{reading} cannot be read, from the hub or its local cache: "
            f"{_first_line(error)}; check the name and the network, or give a local folder"
        ) from error


def _refuse_raw_config(name: str, raw: dict[str, Any]) -> None:
    if "auto_map" in raw:
        raise ModelRefused(
            f"{name} brings its own code (auto_map in its config.json), which is never run; "
            "choose a model whose architecture is part of transformers"
        )
    if "quantization_config" in raw:
        raise ModelRefused(f"{name} is quantised (quantization_config in its config.json); choose unquantised weights")


def _refuse_unserved(name: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise ModelRefused(f"{name} is an encoder-decoder model; choose a decoder-only causal language model")
    text_config = config.get_text_config(decoder=True)
    unserved = sorted(set(getattr(text_config, "layer_types", None) or ()) - SERVED_LAYER_TYPES)
    if unserved:
        raise ModelRefused(
            f"{name} has {' and '.join(unserved)} layers, whose state cannot be rolled back when draft tokens are "
            "rejected; choose a model with full or sliding attention in every layer"
        )
    if getattr(text_config, "attention_chunk_size", None):
        raise ModelRefused(f"{name} attends in chunks (attention_chunk_size), which is not served; choose another")


def _refuse_recurrent(name: str, model: PreTrainedModel) -> None:
    if model._is_stateful:
        raise ModelRefused(
            f"{name} ({type(model).__name__}) keeps a recurrent state, which cannot be rolled back when draft tokens "
            "are rejected; choose a model with attention in every layer"
        )


def _damaged_file(name_or_path: str) -> str:
    """Name the weights file that cannot be opened, as far as it is known."""
    for file in sorted(Path(name_or_path).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return f"the weights file {file.name} in the model folder {name_or_path}"
    return f"a weights file of {name_or_path}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
