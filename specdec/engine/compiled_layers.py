"""A Llama-family forward in one call of our C code, where attention and products are our own kernels.

Between the products of a decoding forward there is little arithmetic: calling it step by step takes longer than
computing it. `fused.py` computes the same with torch's steps, and serves where this cannot.
"""

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from specdec.engine.compiled import CompiledPlan
from specdec.engine.decoder import DecoderOutput, PackedRow
from specdec.engine.linear import KernelLinear
from specdec.engine.native import Weight, has_tiles, kernels, num_lanes
from specdec.engine.quantized import KernelInt8Linear

_POINTER = ctypes.c_void_p
_NUMBER = ctypes.c_int64


class _Norm(ctypes.Structure):
    """The C struct `Norm`."""

    _fields_: ClassVar = (("weight", _POINTER), ("eps", ctypes.c_float))


class _Layer(ctypes.Structure):
    """The C struct `Layer`."""

    _fields_: ClassVar = (
        *((name, Weight) for name in ("to_heads", "from_heads", "to_mlp", "from_mlp")),
        *((name, _Norm) for name in ("attention_norm", "mlp_norm", "head_norm")),
        *((name, _POINTER) for name in ("keys", "values")),
        ("window", _NUMBER),
    )


class _Model(ctypes.Structure):
    """The C struct `Model`."""

    _fields_: ClassVar = (
        *((name, _POINTER) for name in ("embeddings", "layers")),
        ("norm", _Norm),
        ("head", Weight),
        *((name, _NUMBER) for name in ("num_layers", "width", "head_size", "num_heads", "num_kv_heads")),
        ("scaling", ctypes.c_float),
        *((name, _NUMBER) for name in ("is_bf16", "lanes", "has_tiles")),
    )


class _Forward(ctypes.Structure):
    """The C struct `Forward`."""

    _fields_: ClassVar = (
        *((name, _POINTER) for name in ("tokens", "positions", "slots", "angles", "rows", "paths")),
        *((name, _POINTER) for name in ("logit_rows", "observed_rows", "hidden_layers")),
        *((name, _NUMBER) for name in ("num_tokens", "num_logit_rows", "num_observed", "num_hidden_layers")),
        *((name, _POINTER) for name in ("logits", "states")),
    )


@dataclass(frozen=True, slots=True)
class NormParts:
    """A root-mean-square norm's weight, and what is added to the mean square."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What one layer is made of."""

    to_heads: nn.Module
    from_heads: nn.Module
    to_mlp: nn.Module
    from_mlp: nn.Module
    attention_norm: NormParts
    mlp_norm: NormParts
    head_norm: NormParts | None
    activation: str  # the name of its class
    num_heads: int
    num_kv_heads: int
    head_size: int
    scaling: float
    window: int | None

    @property
    def linears(self) -> tuple[nn.Module, ...]:
        """The layer's products."""
        return self.to_heads, self.from_heads, self.to_mlp, self.from_mlp

    @property
    def shape(self) -> tuple[float, ...]:
        """What all layers of a model must share."""
        return self.num_heads, self.num_kv_heads, self.head_size, self.scaling


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a model is made of."""

    embeddings: torch.Tensor
    layers: Sequence[LayerParts]
    norm: NormParts
    head: nn.Module

    @property
    def linears(self) -> Iterator[nn.Module]:
        """All products."""
        yield self.head
        for layer in self.layers:
            yield from layer.linears


KERNEL_LAYERS = (KernelLinear, KernelInt8Linear)
ACTIVATIONS = {"SiLUActivation", "SiLU"}


def compiled_layers(parts: ModelParts) -> "CompiledLayers | None":
    """Return the forward of such a model in one call, or None where a part of it has no kernel of ours."""
    if not all(isinstance(linear, KERNEL_LAYERS) for linear in parts.linears):
        return None
    has_one_shape = len({layer.shape for layer in parts.layers}) == 1
    has_kernels = all(layer.activation in ACTIVATIONS and layer.head_size % 2 == 0 for layer in parts.layers)
    return CompiledLayers(parts) if has_one_shape and has_kernels else None


class CompiledLayers:
    """Runs a model's layers and head through the kernels."""

    def __init__(self, parts: ModelParts) -> None:
        """`parts` have products of our own kernel alone."""
        self._kept: list[object] = [parts]  # what the structs point to
        self._vocab_size = int(_weight(parts.head).num_out)
        self._layers = (_Layer * len(parts.layers))(*map(self._layer, parts.layers))
        self._like, first = parts.embeddings.detach(), parts.layers[0]
        self._width = self._like.shape[1]
        self._model = _Model(
            embeddings=self._like.data_ptr(),
            layers=ctypes.addressof(self._layers),
            norm=self._norm(parts.norm),
            head=_weight(parts.head),
            num_layers=len(parts.layers),
            width=self._width,
            head_size=first.head_size,
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            scaling=first.scaling,
            is_bf16=self._like.dtype == torch.bfloat16,
            lanes=num_lanes(),
            has_tiles=has_tiles(),
        )
        self._room = torch.empty(0, dtype=torch.uint8)
        self._stored_in: object = None  # the cache that the layers' keys and values point into

    def _layer(self, parts: LayerParts) -> _Layer:
        to_heads, from_heads, to_mlp, from_mlp = map(_weight, parts.linears)
        return _Layer(
            to_heads=to_heads,
            from_heads=from_heads,
            to_mlp=to_mlp,
            from_mlp=from_mlp,
            attention_norm=self._norm(parts.attention_norm),
            mlp_norm=self._norm(parts.mlp_norm),
            head_norm=self._norm(parts.head_norm),
            window=parts.window or 0,
        )

    def _norm(self, parts: NormParts | None) -> _Norm:
        if parts is None:
            return _Norm(None, 0.0)
        weight = parts.weight.detach().float().contiguous()
        self._kept.append(weight)
        return _Norm(weight.data_ptr(), parts.eps)

    def __call__(self, row: PackedRow, angles: torch.Tensor, plan: CompiledPlan) -> DecoderOutput:
        """Run the model over a row of lists whose attention is all the kernel's.

        `angles` [positions, cosine and signed sine, 1, head_size] cover the row's positions.
        """
        assert angles.shape[1:] == (2, 1, self._model.head_size)
        self._store_in(plan)
        logits = self._like.new_empty(len(row.logit_rows), self._vocab_size)
        states = self._like.new_empty(len(row.observed_rows), len(row.hidden_layers), self._width)
        tokens, positions, logit_rows, observed_rows, hidden_layers = (
            array("q", numbers)
            for numbers in (row.tokens, row.positions, row.logit_rows, row.observed_rows, row.hidden_layers)
        )
        forward = _Forward(
            tokens=_address(tokens),
            positions=_address(positions),
            slots=_address(plan.slots),
            angles=angles.data_ptr(),
            rows=_address(plan.rows.numbers),
            paths=_address(plan.rows.paths),
            logit_rows=_address(logit_rows),
            observed_rows=_address(observed_rows),
            hidden_layers=_address(hidden_layers),
            num_tokens=len(tokens),
            num_logit_rows=len(logit_rows),
            num_observed=len(observed_rows),
            num_hidden_layers=len(hidden_layers),
            logits=logits.data_ptr(),
            states=states.data_ptr(),
        )
        self._run(forward)
        return logits, states if hidden_layers else None

    def _run(self, forward: _Forward) -> None:
        library, model = kernels(), ctypes.addressof(self._model)
        assert library is not None, "without it no plan is whole"
        num_bytes = library.specdec_forward_room(model, forward.num_tokens)
        if self._room.nbytes < num_bytes:
            self._room = torch.empty(num_bytes, dtype=torch.uint8)
        library.specdec_forward(model, ctypes.addressof(forward), self._room.data_ptr())

    def _store_in(self, plan: CompiledPlan) -> None:
        """Let the layers use the plan's cache, which stays the same and where it is from the first forward on."""
        if self._stored_in is plan.pool:
            return
        for layer, storage in zip(self._layers, plan.pool.layers, strict=True):
            assert storage.keys.dtype == self._like.dtype
            layer.keys, layer.values = storage.keys.data_ptr(), storage.values.data_ptr()
        self._stored_in = plan.pool


def _weight(linear: nn.Module) -> Weight:
    assert isinstance(linear, KERNEL_LAYERS), "checked by compiled_layers"
    return linear.as_read


def _address(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]
