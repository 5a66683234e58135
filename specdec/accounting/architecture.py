"""What a config.json says of a decoder's size: Llama-like models, with grouped heads, experts and tied embeddings."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.parameters import nearest_hint

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of a type differ from Llama, in the parameters of a layer."""

    has_qkv_bias: bool = False
    has_head_norms: bool = False  # of queries and keys, one head wide
    num_norms: int = 2  # as wide as the model


FAMILIES: Mapping[str, Family] = {
    "gemma": Family(),
    "gemma2": Family(num_norms=4),
    "gemma3_text": Family(num_norms=4, has_head_norms=True),
    "granite": Family(),
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "phi3": Family(),
    "qwen2": Family(has_qkv_bias=True),
    "qwen3": Family(has_head_norms=True),
    "qwen3_moe": Family(has_head_norms=True),
    "smollm3": Family(),
}


class NotUnderstood(ValueError):
    """A configuration is not one of a model whose bytes can be counted. The message says why."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a decoder."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int  # of one expert, where there are experts
    vocab_size: int
    is_tied: bool = False  # the output head is the embedding
    num_experts: int = 0  # 0: dense
    num_active_experts: int = 0
    num_bias_values: int = 0  # a layer
    num_norm_values: int = 0  # a layer
    num_windowed_layers: int = 0  # that attend to a window only
    window: int = 0  # tokens

    @property
    def embedding(self) -> int:
        """Values of the embedding, and of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def attention(self) -> int:
        """Values of a layer's four projections."""
        return self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def expert(self) -> int:
        """Values of a gated MLP; of one expert, where there are experts."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def router(self) -> int:
        """Values that choose a layer's experts."""
        return self.hidden_size * self.num_experts

    @property
    def small(self) -> int:
        """Values of norms and biases, of all layers and after the last."""
        return self.num_layers * (self.num_norm_values + self.num_bias_values) + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All values of the model."""
        layer = self.attention + self.router + max(self.num_experts, 1) * self.expert
        return self.num_layers * layer + self.small + self.embedding * (1 if self.is_tied else 2)

    @property
    def kv_values(self) -> int:
        """Values that a token keeps in the cache of one layer."""
        return 2 * self.num_kv_heads * self.head_size

    def cached_tokens(self, context: int) -> int:
        """Return the tokens that all layers together attend to."""
        windowed = self.num_windowed_layers * min(context, self.window)
        return windowed + (self.num_layers - self.num_windowed_layers) * context


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration in a folder. Raises NotUnderstood."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotUnderstood(f"{file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise NotUnderstood(f"{file} is no configuration of a model")
    return config


def models_beside(name: str) -> list[str]:
    """Return the models beside a folder that is not there: then it is mistyped, and no hub id."""
    return sorted(str(each.parent) for each in Path(name).expanduser().parent.glob(f"*/{CONFIG_FILE}")) * ("/" in name)


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the sizes that a config.json gives. Raises NotUnderstood."""
    config = config.get("text_config") or config
    kind = config.get("model_type", "llama")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise NotUnderstood(f"model_type is {kind!r}{nearest_hint(str(kind), list(FAMILIES))}; counted are {known}")
    if missing := [name for name in SIZES if name not in config]:
        raise NotUnderstood(f"the configuration has no {', '.join(missing)}; add it with --set NAME=NUMBER")
    _refuse_odd_sizes(config)
    return _sized(config, FAMILIES[kind])


def _refuse_odd_sizes(config: Mapping[str, Any]) -> None:
    optional = ("num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "num_experts_per_tok")
    for name in (*SIZES, *optional):
        value = config.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise NotUnderstood(f"{name} is {value!r}; give a whole number of at least 1")
    if not config.get("head_dim") and config["hidden_size"] < config["num_attention_heads"]:
        raise NotUnderstood("there are more num_attention_heads than hidden_size; set head_dim if that is right")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise NotUnderstood("some of the model's layers have experts and some have none, which is not counted")


def _sized(config: Mapping[str, Any], family: Family) -> Architecture:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
    num_windowed, window = _windows(config)
    queries, keys = heads * head_size, kv_heads * head_size
    biases = (queries + 2 * keys) * bool(family.has_qkv_bias or config.get("attention_bias"))
    biases += hidden * bool(config.get("attention_bias") and not family.has_qkv_bias)
    intermediate = (config.get("moe_intermediate_size") if num_experts else None) or config["intermediate_size"]
    biases += (2 * intermediate + hidden) * bool(config.get("mlp_bias"))
    return Architecture(
        hidden_size=hidden,
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=intermediate,
        vocab_size=config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings", config.get("model_type", "").startswith("gemma"))),
        num_experts=num_experts,
        num_active_experts=min(config.get("num_experts_per_tok") or 2, num_experts),
        num_bias_values=biases,
        num_norm_values=family.num_norms * hidden + 2 * head_size * family.has_head_norms,
        num_windowed_layers=num_windowed,
        window=window,
    )


def _windows(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many layers attend to a window only, and its tokens."""
    window = config.get("sliding_window") or 0
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    return sum(kind == "sliding_attention" for kind in kinds), window
