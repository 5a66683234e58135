"""Tiny random models of many architectures, with the features of their published configurations.

`build(name, folder)` saves one as safetensors. Weights have a large variance, so that logits are far from flat and a
wrong position, mask or head is visible.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

VOCAB_SIZE = 320
CONTEXT_LENGTH = 128
SLIDING_WINDOW = 7  # shorter than the tests' texts

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.25,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


def _like_llama(kind: str, **special: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, kind)(**{**_COMMON, **special})


def _gpt2(kind: str) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, kind)(
        vocab_size=VOCAB_SIZE,
        n_embd=48,
        n_layer=3,
        n_head=4,
        n_positions=CONTEXT_LENGTH,
        initializer_range=0.25,
        bos_token_id=0,
        eos_token_id=0,
    )


SERVED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _like_llama("LlamaConfig", tie_word_embeddings=True),
    "qwen2": _like_llama("Qwen2Config", use_sliding_window=True, sliding_window=SLIDING_WINDOW, max_window_layers=1),
    "qwen3": _like_llama("Qwen3Config", head_dim=16),
    "mistral": _like_llama("MistralConfig", head_dim=12, sliding_window=SLIDING_WINDOW),
    "gemma2": _like_llama(
        "Gemma2Config", head_dim=16, query_pre_attn_scalar=24, sliding_window=SLIDING_WINDOW, layer_types=_ALTERNATING
    ),
    "gemma3": _like_llama(
        "Gemma3TextConfig",
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=SLIDING_WINDOW,
        layer_types=_ALTERNATING,
    ),
    "phi": _like_llama("PhiConfig", num_key_value_heads=4, partial_rotary_factor=0.5),
    "phi3": _like_llama("Phi3Config", sliding_window=SLIDING_WINDOW),
    "gpt2": _gpt2("GPT2Config"),
    "gpt_bigcode": _gpt2("GPTBigCodeConfig"),
    "gpt_neox": _like_llama("GPTNeoXConfig"),
    "gpt_oss": _like_llama(
        "GptOssConfig", head_dim=16, sliding_window=SLIDING_WINDOW, num_local_experts=4, layer_types=_ALTERNATING
    ),
    "opt": _like_llama("OPTConfig", ffn_dim=64, word_embed_proj_dim=48, init_std=0.25, pad_token_id=1),
    "olmo2": _like_llama("Olmo2Config"),
    "mixtral": _like_llama("MixtralConfig", num_local_experts=4, sliding_window=SLIDING_WINDOW),
    "qwen3_moe": _like_llama(
        "Qwen3MoeConfig", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "cohere": _like_llama("CohereConfig", logit_scale=0.25),
    "cohere2": _like_llama("Cohere2Config", logit_scale=0.5, sliding_window=SLIDING_WINDOW, layer_types=_ALTERNATING),
    "granite": _like_llama("GraniteConfig", logits_scaling=2.0, attention_multiplier=0.2, residual_multiplier=0.7),
    "starcoder2": _like_llama("Starcoder2Config", sliding_window=SLIDING_WINDOW),
    "smollm3": _like_llama("SmolLM3Config", no_rope_layers=[1, 0, 1]),
    "glm4": _like_llama("Glm4Config", head_dim=12, partial_rotary_factor=0.5),
    "stablelm": _like_llama("StableLmConfig", partial_rotary_factor=0.5),
    "deepseek_v3": _like_llama(
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}

REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "falcon": _like_llama("FalconConfig", alibi=False, new_decoder_architecture=True, num_kv_heads=2),
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=48, n_layer=3, n_head=4),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=VOCAB_SIZE, n_embd=48, n_layer=3, n_head=4, n_positions=CONTEXT_LENGTH, rotary_dim=4
    ),
    "mamba": lambda: transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=3, state_size=4),
    "lfm2": _like_llama("Lfm2Config", layer_types=["conv", "full_attention", "conv"]),
    "qwen3_next": _like_llama(
        "Qwen3NextConfig", head_dim=16, layer_types=["linear_attention", "full_attention", "linear_attention"]
    ),
}

RECURRENT = {
    "mamba",
    "lfm2",
    "qwen3_next",
}  # the others are refused because they bypass the attention interface


def build(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Save the tiny model `name`, in float32 with fixed weights, and return `folder`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config({**SERVED, **REFUSED}[name](), dtype=torch.float32)  # type: ignore[no-untyped-call]
        _stir(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def _stir(model: torch.nn.Module) -> None:
    """Randomise what is initialised to constants (norms, biases, sinks), which would hide bugs."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
