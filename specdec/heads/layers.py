"""The parts of a head's decoder layers. Parameter names are those of the published checkpoints.

What attends to what is the caller's business: a layer gives queries, keys and values, and takes what was attended.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine [..., head_size] of the angles by which positions turn queries and keys."""


@dataclass(frozen=True, slots=True)
class Projected:
    """What a position asks with, and what it offers to others."""

    query: torch.Tensor  # [..., heads, head_size]
    key: torch.Tensor  # [..., kv_heads, head_size]
    value: torch.Tensor  # [..., kv_heads, head_size]


class Norm(nn.RMSNorm):
    """Root mean square norm (Zhang and Sennrich 2019), in the type of its weight: autocast may hand it another."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., size] for rows [..., size]."""
        return super().forward(rows.to(self.weight.dtype))


class Rotary(nn.Module):
    """The angles of positions (Su et al. 2021), scaled as the configuration says."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self._embedding = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]  # any with rope_parameters

    def forward(self, positions: torch.Tensor) -> Angles:
        """Return the angles of positions [...], each [..., head_size], in float32."""
        example = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = self._embedding(example, positions.reshape(1, -1))
        size = (*positions.shape, cos.shape[-1])
        return cos.reshape(size), sin.reshape(size)


def turned(heads: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Turn heads [..., heads, head_size] by their positions' angles."""
    cos, sin = (values.unsqueeze(-2).to(heads.dtype) for values in angles)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Projections to and from heads; with norms of each head where the architecture has them (Qwen 3)."""

    def __init__(self, config: PretrainedConfig, input_size: int, has_head_norms: bool) -> None:
        super().__init__()
        size, bias = head_size(config), bool(getattr(config, "attention_bias", False))
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(input_size, self.num_heads * size, bias=bias)
        self.k_proj = nn.Linear(input_size, self.num_kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(input_size, self.num_kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * size, config.hidden_size, bias=bias)
        self.q_norm = Norm(size, config.rms_norm_eps) if has_head_norms else None
        self.k_norm = Norm(size, config.rms_norm_eps) if has_head_norms else None
        self._size = size

    def keys_and_values(self, rows: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what rows [..., input_size] offer: keys and values [..., kv_heads, head_size]."""
        key = self.k_proj(rows).unflatten(-1, (self.num_kv_heads, self._size))
        value = self.v_proj(rows).unflatten(-1, (self.num_kv_heads, self._size))
        return turned(self.k_norm(key) if self.k_norm else key, angles), value

    def forward(self, rows: torch.Tensor, angles: Angles) -> Projected:
        """Project rows [..., input_size]."""
        query = self.q_proj(rows).unflatten(-1, (self.num_heads, self._size))
        return Projected(
            turned(self.q_norm(query) if self.q_norm else query, angles), *self.keys_and_values(rows, angles)
        )


class Mlp(nn.Module):
    """The gated MLP."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self._activation = ACT2FN[config.hidden_act]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden_size] for rows [..., hidden_size]."""
        product: torch.Tensor = self.down_proj(self._activation(self.gate_proj(rows)) * self.up_proj(rows))
        return product


class Layer(nn.Module):
    """One decoder layer of a head."""

    def __init__(self, config: PretrainedConfig, input_size: int | None = None) -> None:
        super().__init__()
        has_head_norms = config.model_type.startswith("qwen3")
        self.self_attn = Attention(config, input_size or config.hidden_size, has_head_norms)
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def project(self, hidden: torch.Tensor, angles: Angles) -> Projected:
        """Normalise and project hidden states [..., hidden_size]."""
        projected: Projected = self.self_attn(self.input_layernorm(hidden), angles)
        return projected

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [..., hidden_size] from attended values [..., heads, head_size]."""
        hidden: torch.Tensor = residual + self.self_attn.o_proj(attended.flatten(-2))
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return [..., Q, heads, head_size] for queries of that shape, keys and values [..., L, kv_heads, head_size].

    `mask` [..., Q, L] is True where a query sees a key; None: everything.
    """
    output = functional.scaled_dot_product_attention(
        query.transpose(-3, -2),
        key.transpose(-3, -2),
        value.transpose(-3, -2),
        attn_mask=mask if mask is None else mask.unsqueeze(-3),
        enable_gqa=query.shape[-2] != key.shape[-2],
    )
    return output.transpose(-3, -2)


def head_size(config: PretrainedConfig) -> int:
    """Return the size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
