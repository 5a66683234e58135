"""A head's layers as few, large steps: for some rows of a draft, each step of torch costs more than its arithmetic.

The results are those of `layers.py`, up to rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from specdec.engine import Quantization
from specdec.engine.layer_structs import LayerParts, NormParts
from specdec.engine.linear import try_prepack
from specdec.engine.quantized import try_quantize
from specdec.heads.layers import Layer, Rotary

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosine and signed sine [N, 1, head_size]: heads x turn to x * cosine + roll(x) * sine."""

MIN_POSITIONS = 1024  # of a table of angles


class Heads(NamedTuple):
    """What N rows ask with, and what they offer to others."""

    query: torch.Tensor  # [N, heads, head_size]
    key: torch.Tensor  # [N, kv_heads, head_size]
    value: torch.Tensor  # [N, kv_heads, head_size]


class Norm:
    """Root-mean-square norm over the last dimension.

    On the CPU torch takes many steps for `rms_norm` and one for `layer_norm`; the mean of [x, -x] is 0, its variance is
    the mean square of x, so the layer norm of that is the norm wanted.
    """

    def __init__(self, norm: nn.RMSNorm) -> None:
        self._weight = norm.weight.detach()
        self._twice = torch.cat([self._weight, self._weight])
        self._eps = float(norm.eps or 0.0)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise rows [..., width]."""
        if rows.is_cuda:
            return functional.rms_norm(rows, self._weight.shape, self._weight, self._eps)
        mirrored = torch.cat((rows, -rows), dim=-1)
        return functional.layer_norm(mirrored, self._twice.shape, self._twice, None, self._eps)[..., : rows.shape[-1]]

    @property
    def parts(self) -> NormParts:
        """What it is made of."""
        return NormParts(self._weight, self._eps)


class AngleTable:
    """The angles of all positions so far, computed once."""

    def __init__(self, rotary: Rotary, like: torch.Tensor) -> None:
        self._rotary, self._like = rotary, like
        self._table = like.new_empty(0, 2, 1, 1)  # [positions, cosine and signed sine, 1, head_size]

    def at(self, positions: Sequence[int]) -> Angles:
        """Return the angles of positions [N]."""
        places = torch.tensor(positions, dtype=torch.long, device=self._like.device)
        cosine, sine = self.covering(positions).index_select(0, places).unbind(1)
        return cosine, sine

    def covering(self, positions: Sequence[int]) -> torch.Tensor:
        """Return the angles of all positions from 0 on, these among them, [positions, 2, 1, head_size]."""
        end = max(positions, default=0) + 1
        if end > len(self._table):
            self._extend(max(MIN_POSITIONS, 2 * end))
        return self._table

    def _extend(self, num_positions: int) -> None:
        cos, sin = self._rotary(torch.arange(num_positions, device=self._like.device))
        signs = torch.ones_like(sin[:1])
        signs[..., : sin.shape[-1] // 2] = -1  # the half that `roll` brings to the front is subtracted
        self._table = torch.stack((cos, sin * signs), dim=1).unsqueeze(2).to(self._like.dtype)


class FastLayer:
    """A decoder layer: joined projections, and the gated MLP."""

    def __init__(self, layer: Layer, quantization: Quantization | None = None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_size = attention.q_proj.out_features // attention.num_heads
        self.input_norm = Norm(layer.input_layernorm)
        self._to_heads = joined(attention.q_proj, attention.k_proj, attention.v_proj, quantization=quantization)
        self._head_norms = _head_norms(attention)
        self._from_heads = joined(attention.o_proj, quantization=quantization)
        self._mlp_norm = Norm(layer.post_attention_layernorm)
        self._to_mlp, self._from_mlp = (
            joined(mlp.gate_proj, mlp.up_proj, quantization=quantization),
            joined(mlp.down_proj, quantization=quantization),
        )
        self._activation: Any = mlp._activation

    @property
    def parts(self) -> LayerParts:
        """What it is made of."""
        return LayerParts(
            to_heads=self._to_heads,
            from_heads=self._from_heads,
            to_mlp=self._to_mlp,
            from_mlp=self._from_mlp,
            attention_norm=self.input_norm.parts,
            mlp_norm=self._mlp_norm.parts,
            head_norm=NormParts(*self._head_norms) if self._head_norms else None,
            activation=type(self._activation).__name__,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scaling=self.head_size**-0.5,
            window=None,
        )

    def project(self, rows: torch.Tensor, angles: Angles) -> Heads:
        """Project normalised rows [N, input_size]."""
        num_turned = self.num_heads + self.num_kv_heads
        heads = self._to_heads(rows).view(len(rows), -1, self.head_size)
        turned = heads[:, :num_turned]
        if self._head_norms is not None:
            weights, eps = self._head_norms
            turned = functional.rms_norm(turned, (self.head_size,), None, eps) * weights
        cosine, sine = angles
        turned = torch.addcmul(turned * cosine, turned.roll(self.head_size // 2, -1), sine)
        return Heads(turned[:, : self.num_heads], turned[:, self.num_heads :], heads[:, num_turned:])

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [N, hidden_size] from attended values [N, heads, head_size]."""
        hidden = residual + self._from_heads(attended.flatten(-2))
        gate, up = self._to_mlp(self._mlp_norm(hidden)).chunk(2, dim=-1)
        output: torch.Tensor = hidden + self._from_mlp(self._activation(gate) * up)
        return output


def _head_norms(attention: Any) -> tuple[torch.Tensor, float] | None:
    """Return the weights [heads + kv_heads, head_size] of the norms of queries and keys, and their epsilon."""
    if attention.q_norm is None:
        return None
    query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    weights = torch.cat((query.expand(attention.num_heads, -1), key.expand(attention.num_kv_heads, -1)))
    return weights, float(attention.q_norm.eps)


def joined(*linears: nn.Linear, quantization: Quantization | None = None) -> nn.Module:
    """Return one linear layer that computes all of `linears` side by side.

    Its weight is rounded where that is asked for and possible, else packed where that is faster.
    """
    biases = [linear.bias for linear in linears if linear.bias is not None]
    whole = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears), device="meta")
    whole.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    whole.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False) if biases else None  # type: ignore[assignment]
    rounded = try_quantize(whole, quantization) if quantization else None
    return rounded or try_prepack(whole) or whole


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [Q, heads, head_size] for queries of that shape, keys and values [kv_heads, L, head_size].

    `mask` [Q, L] is True where a query sees a key; None: everything. Queries that share keys are put side by side.
    """
    num_queries, num_heads, size = query.shape
    num_sharing = num_heads // len(keys)
    rows = query.view(num_queries, len(keys), num_sharing, size).permute(1, 2, 0, 3)
    rows = rows.reshape(1, len(keys), num_sharing * num_queries, size)
    if mask is not None:
        mask = mask.repeat(num_sharing, 1)
    output = functional.scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask)
    return output.view(len(keys), num_sharing, num_queries, size).permute(2, 0, 1, 3).reshape(query.shape)
