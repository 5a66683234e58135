"""Fused forward for Llama-family models: the same sums as transformers' forward in a third of the calls, or in one.

A decoding forward reads each weight once for a handful of rows; the rest of its cost is the number of calls. So the
projections that read the same input are one product, the norm is one kernel, and nothing is wrapped. Every load
compares it with transformers' own forward (`check.py`); a model that fails the comparison is served through the latter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from specdec.engine.attention import AttentionOptions, current_attention
from specdec.engine.compiled import CompiledPlan
from specdec.engine.compiled_layers import compiled_layers
from specdec.engine.decoder import DecoderOutput, Indices, PackedRow, ReplaceLinear, on_device
from specdec.engine.layer_structs import LayerParts, ModelParts, NormParts
from specdec.engine.linear import pack_linears, try_prepack

FUSED_ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
STATIC_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # the others' angles depend on the text's length
TABLE_POSITIONS = 1024  # computed at once
PARALLEL_NUMBERS = 1 << 15  # from here on torch divides elementwise work among its threads

Rows = torch.Tensor  # [num_tokens, width]


def has_fused_forward(model: PreTrainedModel) -> bool:
    """Return whether `FusedDecoder` supports the model's architecture."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    return type(model).__name__ in FUSED_ARCHITECTURES and getattr(rotary, "rope_type", None) in STATIC_ROPE_TYPES


class FusedDecoder:
    """Computes a model's logits from its own weights, which it takes: the model cannot run any more."""

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.base_model
        self._embeddings: nn.Embedding = base.embed_tokens
        self._angles = _Angles(base.rotary_emb, self._embeddings.weight)
        self._layers = []
        for index, layer in enumerate(base.layers):
            self._layers.append(_Layer(layer))
            base.layers[index] = nn.Identity()  # frees the weights that were joined
        self._norm = _Norm(base.norm)
        pack_linears(model)
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._compiled = compiled_layers(self._parts())

    @property
    def is_compiled(self) -> bool:
        """Whether forwards on one thread are one call of our kernels: a token's bits depend on its own text alone."""
        return self._compiled is not None

    def _parts(self) -> ModelParts:
        layers = [layer.parts() for layer in self._layers]
        return ModelParts(self._embeddings.weight, layers, self._norm.parts(), self._head)

    def replace_linears(self, replace: ReplaceLinear) -> None:
        """See `Decoder`."""
        for layer in self._layers:
            layer.replace_linears(replace)
        self._head = replace(self._head)
        self._compiled = compiled_layers(self._parts())

    def cover(self, num_positions: int) -> None:
        """See `Decoder`."""
        self._angles.cover(num_positions)

    def __call__(self, row: PackedRow) -> DecoderOutput:
        """See `Decoder`."""
        plan = current_attention()
        if self._compiled is not None and isinstance(plan, CompiledPlan) and plan.is_whole:
            return self._compiled(row, self._angles.up_to(row.positions), plan)
        row.when_prepared()
        hidden, states = self._run_layers(row)
        if len(row.logit_rows) < len(row.tokens):
            hidden = hidden.index_select(0, self._indices(row.logit_rows))
        logits: Rows = self._head(self._norm(hidden))
        return logits, torch.stack(states, dim=1) if states else None

    def _run_layers(self, row: PackedRow) -> tuple[Rows, list[Rows]]:
        """Return what the last layer gives and, for each of `hidden_layers`, the states of `observed_rows`."""
        cos, sin = self._angles.at(row.positions)
        hidden: Rows = self._embeddings(self._indices(row.tokens))
        observed = self._indices(row.observed_rows) if row.hidden_layers else None
        states = []
        for number, layer in enumerate(self._layers):
            if number in row.hidden_layers:
                states.append(hidden[observed])
            hidden = layer(hidden, cos, sin)
        if len(self._layers) in row.hidden_layers:
            states.append(self._norm(hidden[observed]))
        return hidden, states

    def _indices(self, values: Indices) -> torch.Tensor:
        return on_device(values, self._embeddings.weight.device)


class _Layer:
    """One decoder layer: attention, then the gated MLP, each added to the stream."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._head_size: int = attention.head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_size
        self._num_heads = attention.q_proj.out_features // self._head_size
        window = getattr(attention, "sliding_window", None)
        if type(attention).__name__ == "MistralAttention":
            window = attention.config.sliding_window
        self._options = AttentionOptions(attention.scaling, window)
        self._attention_norm = _Norm(layer.input_layernorm)
        self._to_heads = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._head_norm = _HeadNorm(attention, self._num_heads, self._num_kv_heads) if _has_head_norms(layer) else None
        self._from_heads = _joined(attention.o_proj)
        self._mlp_norm = _Norm(layer.post_attention_layernorm)
        self._to_mlp = _joined(mlp.gate_proj, mlp.up_proj)
        self._activation: Callable[[Rows], Rows] = mlp.act_fn
        self._from_mlp = _joined(mlp.down_proj)

    def replace_linears(self, replace: ReplaceLinear) -> None:
        """See `Decoder`."""
        self._to_heads, self._from_heads = replace(self._to_heads), replace(self._from_heads)
        self._to_mlp, self._from_mlp = replace(self._to_mlp), replace(self._from_mlp)

    def parts(self) -> LayerParts:
        """Return what the layer is made of."""
        return LayerParts(
            to_heads=self._to_heads,
            from_heads=self._from_heads,
            to_mlp=self._to_mlp,
            from_mlp=self._from_mlp,
            attention_norm=self._attention_norm.parts(),
            mlp_norm=self._mlp_norm.parts(),
            head_norm=self._head_norm.parts() if self._head_norm else None,
            activation=type(self._activation).__name__,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_size=self._head_size,
            scaling=self._options.scaling,
            window=self._options.window,
        )

    def __call__(self, hidden: Rows, cos: torch.Tensor, sin: torch.Tensor) -> Rows:
        hidden = hidden + self._attend(self._attention_norm(hidden), cos, sin)
        gate, up = self._to_mlp(self._mlp_norm(hidden)).chunk(2, dim=-1)
        added: Rows = self._from_mlp(_serially(self._activation, gate) * up)
        return hidden + added

    def _attend(self, rows: Rows, cos: torch.Tensor, sin: torch.Tensor) -> Rows:
        num_turned = self._num_heads + self._num_kv_heads
        heads = self._to_heads(rows).view(
            rows.shape[0], -1, self._head_size
        )  # [num_tokens, query + key + value heads, size]
        turned, value = heads[:, :num_turned], heads[:, num_turned:]
        if self._head_norm is not None:
            turned = self._head_norm(turned)
        turned = torch.addcmul(turned * cos, turned.roll(self._head_size // 2, -1), sin)
        query, key = turned[:, : self._num_heads], turned[:, self._num_heads :]
        output = current_attention().attend(query, key, value, self._options)
        added: Rows = self._from_heads(output.reshape(rows.shape[0], -1))
        return added


def _serially(function: Callable[[Rows], Rows], rows: Rows) -> Rows:
    """Apply an elementwise function so that threads do not divide a row.

    An exponential's last bit depends on whether it is one of the last few of its thread, which other rows decide.
    """
    most = max(1, (PARALLEL_NUMBERS - 1) // rows.shape[-1])
    if rows.is_cuda or len(rows) <= most or torch.get_num_threads() == 1:
        return function(rows)
    return torch.cat([function(piece) for piece in torch.split(rows, most)])


class _Angles:
    """The rotations of all positions, computed once by the model's own module."""

    def __init__(self, rotary: nn.Module, like: torch.Tensor) -> None:
        self._rotary = rotary
        self._like = like
        self._table = like.new_empty(0)  # [positions, cosine and signed sine, 1, head_size]

    def at(self, positions: Indices) -> tuple[torch.Tensor, ...]:
        """Return cosines and signed sines [num_tokens, 1, head_size]: a head x turns to x * cos + roll(x) * sin.

        Positions in a tensor must be covered.
        """
        table = self.up_to(positions)
        return table.index_select(0, on_device(positions, self._like.device)).unbind(1)

    def up_to(self, positions: Indices) -> torch.Tensor:
        """Return a table [positions, cosines and signed sines, 1, head_size]; positions in a tensor must be covered."""
        if isinstance(positions, list):
            self.cover(max(positions) + 1)
        return self._table

    def cover(self, num_positions: int) -> None:
        """Compute the first positions, if they are not yet."""
        while num_positions > self._table.shape[0]:
            self._extend()

    def _extend(self) -> None:
        """Compute the next positions, always as many: a kernel's last bits may depend on how many it is given."""
        begin = self._table.shape[0]
        positions = torch.arange(begin, begin + TABLE_POSITIONS, device=self._like.device)[None]
        cos, sin = (table[0][:, None] for table in self._rotary(self._like, position_ids=positions))
        signs = torch.ones_like(sin[:1])
        signs[..., : sin.shape[-1] // 2] = -1  # rotate_half negates the second half, which roll moves to the front
        self._table = torch.cat([self._table, torch.stack([cos, sin * signs], dim=1)])


class _Norm:
    """Root-mean-square norm over the last dimension.

    On the CPU torch computes `rms_norm` in eight steps but `layer_norm` in one; the mean of [x, -x] is 0 and its
    variance is the mean square of x, so the layer norm of that is the norm wanted.
    """

    def __init__(self, norm: Any) -> None:
        self._weight: torch.Tensor = norm.weight.detach()
        self._width = self._weight.shape[0]
        self._twice = torch.cat([self._weight, self._weight])
        self._eps: float = norm.variance_epsilon

    def parts(self) -> NormParts:
        """Return weight [width] and epsilon."""
        return NormParts(self._weight, self._eps)

    def __call__(self, rows: Rows) -> Rows:
        if rows.is_cuda:
            return functional.rms_norm(rows, self._weight.shape, self._weight, self._eps)
        mirrored = torch.cat([rows, -rows], dim=-1)
        return functional.layer_norm(mirrored, self._twice.shape, self._twice, None, self._eps)[:, : self._width]


class _HeadNorm:
    """Qwen3's norms of query and key heads, as one: each head by itself, with its own kind's weight."""

    def __init__(self, attention: Any, num_heads: int, num_kv_heads: int) -> None:
        query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        self._weight = torch.cat([query.expand(num_heads, -1), key.expand(num_kv_heads, -1)])  # [heads, size]
        self._eps: float = attention.q_norm.variance_epsilon

    def parts(self) -> NormParts:
        """Return weight [heads, size] and epsilon."""
        return NormParts(self._weight, self._eps)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(heads, heads.shape[-1:], None, self._eps) * self._weight


def _has_head_norms(layer: Any) -> bool:
    return hasattr(layer.self_attn, "q_norm")


def _joined(*linears: nn.Linear) -> nn.Module:
    """Return one linear layer that computes all of `linears` side by side."""
    joined = nn.Linear(1, 1, bias=False, device="meta")
    joined.in_features = linears[0].in_features
    joined.out_features = sum(linear.out_features for linear in linears)
    joined.weight = _frozen([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    joined.register_parameter("bias", _frozen(biases) if biases else None)
    return try_prepack(joined) or joined


def _frozen(parts: Sequence[torch.Tensor]) -> nn.Parameter:
    content = torch.cat([part.detach() for part in parts]) if len(parts) > 1 else parts[0].detach()
    return nn.Parameter(content, requires_grad=False)
