"""The models that are checked: tiny ones whose heads have the sizes of real ones, and one of a real one's shape."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE, CONTEXT_LENGTH, WINDOW = 512, 2048, 100
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def _config(kind: str, **special: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, kind)(**{**_COMMON, **special})


ARCHITECTURES = {
    "llama": _config("LlamaConfig"),
    "qwen3": _config("Qwen3Config"),
    "mistral": _config("MistralConfig", sliding_window=WINDOW),
    "gemma2": _config("Gemma2Config", query_pre_attn_scalar=64, **_MIXED),
    "gpt_oss": _config("GptOssConfig", num_local_experts=4, **_MIXED),
    "phi": _config("PhiConfig", num_key_value_heads=4, hidden_size=256),
}


def save(name: str, folder: Path) -> Path:
    """Save a tiny random model, with sinks and norms that are not constants."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(ARCHITECTURES[name](), dtype=torch.float32)  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder / name)
    return folder / name


LARGE: dict[str, Any] = {  # Llama 3.1 8B
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16_384,  # of 131,072: more are not measured
    "rope_theta": 500_000.0,
}
SMALL: dict[str, Any] = {
    **LARGE,
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def layer_bytes(shape: dict[str, Any]) -> int:
    """Return the bytes of one layer's weights in bfloat16."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = 2 * hidden * hidden * (1 + shape["num_key_value_heads"] / heads)
    return int(2 * (attention + 3 * hidden * shape["intermediate_size"]))


def random_model(shape: dict[str, Any], device: str, num_layers: int) -> PreTrainedModel:
    """Return a model of random weights in bfloat16, made on the device."""
    config = transformers.LlamaConfig(**{**shape, "num_hidden_layers": num_layers})
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    return nn.Module.eval(model)
