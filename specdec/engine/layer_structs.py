"""What the compiled layers read (`layers_kernel.c`): a model's parts, and the C structs made of them."""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from specdec.engine.linear import KernelLinear
from specdec.engine.native import Weight, has_tiles, kernels, num_lanes
from specdec.engine.quantized import KernelInt8Linear

KERNEL_LAYERS = (KernelLinear, KernelInt8Linear)
ACTIVATIONS = {"SiLUActivation", "SiLU"}
_POINTER = ctypes.c_void_p
_NUMBER = ctypes.c_int64


class NormStruct(ctypes.Structure):
    """The C struct `Norm`."""

    _fields_: ClassVar = (("weight", _POINTER), ("eps", ctypes.c_float))


class LayerStruct(ctypes.Structure):
    """The C struct `Layer`."""

    _fields_: ClassVar = (
        *((name, Weight) for name in ("to_heads", "from_heads", "to_mlp", "from_mlp")),
        *((name, NormStruct) for name in ("attention_norm", "mlp_norm", "head_norm")),
        *((name, _POINTER) for name in ("keys", "values")),
        ("window", _NUMBER),
    )


class ModelStruct(ctypes.Structure):
    """The C struct `Model`."""

    _fields_: ClassVar = (
        *((name, _POINTER) for name in ("embeddings", "layers")),
        ("norm", NormStruct),
        ("head", Weight),
        *((name, _NUMBER) for name in ("num_layers", "width", "head_size", "num_heads", "num_kv_heads")),
        ("scaling", ctypes.c_float),
        *((name, _NUMBER) for name in ("is_bf16", "lanes", "has_tiles")),
    )


class ForwardStruct(ctypes.Structure):
    """The C struct `Forward`."""

    _fields_: ClassVar = (
        *((name, _POINTER) for name in ("tokens", "positions", "slots", "angles", "rows", "paths")),
        *((name, _POINTER) for name in ("logit_rows", "observed_rows", "hidden_layers")),
        *(
            (name, _NUMBER)
            for name in ("num_tokens", "num_paths", "num_logit_rows", "num_observed", "num_hidden_layers")
        ),
        *((name, _POINTER) for name in ("logits", "states")),
    )


class GroupStruct(ctypes.Structure):
    """The C struct `Group`."""

    _fields_: ClassVar = (
        *((name, _POINTER) for name in ("keys", "values")),
        *((name, _NUMBER) for name in ("first", "count")),
    )


class PairsStruct(ctypes.Structure):
    """The C struct `Pairs`."""

    _fields_: ClassVar = (
        ("state_norm", NormStruct),
        ("adds_to_normalised", _NUMBER),
        *((name, _POINTER) for name in ("states", "outputs")),
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
    def has_kernels(self) -> bool:
        """Whether the C code computes it."""
        return self.activation in ACTIVATIONS and self.head_size % 2 == 0 and all(map(has_kernel, self.linears))

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


def has_kernel(linear: nn.Module) -> bool:
    """Return whether a linear layer is computed by our own kernel."""
    return isinstance(linear, KERNEL_LAYERS)


def layer_struct(parts: LayerParts, kept: list[object]) -> LayerStruct:
    """Return a layer's struct without keys and values; `kept` gets what it points to, and must outlive it."""
    to_heads, from_heads, to_mlp, from_mlp = map(weight_of, parts.linears)
    return LayerStruct(
        to_heads=to_heads,
        from_heads=from_heads,
        to_mlp=to_mlp,
        from_mlp=from_mlp,
        attention_norm=norm_struct(parts.attention_norm, kept),
        mlp_norm=norm_struct(parts.mlp_norm, kept),
        head_norm=norm_struct(parts.head_norm, kept),
        window=parts.window or 0,
    )


def model_struct(embeddings: torch.Tensor, layers: "ctypes.Array[LayerStruct]", parts: LayerParts) -> ModelStruct:
    """Return the struct of layers of one shape, that of `parts`, without last norm and head."""
    return ModelStruct(
        embeddings=embeddings.data_ptr(),
        layers=ctypes.addressof(layers),
        num_layers=len(layers),
        width=embeddings.shape[1],
        head_size=parts.head_size,
        num_heads=parts.num_heads,
        num_kv_heads=parts.num_kv_heads,
        scaling=parts.scaling,
        is_bf16=embeddings.dtype == torch.bfloat16,
        lanes=num_lanes(),
        has_tiles=has_tiles(),
    )


class Room:
    """Memory for what lies between the products of a model's forwards."""

    def __init__(self, model: ModelStruct) -> None:
        self._model = model
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, num_tokens: int) -> int:
        """Return the address of room for a forward of so many tokens."""
        library = kernels()
        assert library is not None, "the parts have kernels"
        num_bytes = library.specdec_forward_room(ctypes.addressof(self._model), num_tokens)
        if self._bytes.nbytes < num_bytes:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes.data_ptr()


def norm_struct(parts: NormParts | None, kept: list[object]) -> NormStruct:
    """Return a norm's struct; `kept` gets what it points to."""
    if parts is None:
        return NormStruct(None, 0.0)
    weight = parts.weight.detach().float().contiguous()
    kept.append(weight)
    return NormStruct(weight.data_ptr(), parts.eps)


def weight_of(linear: nn.Module) -> Weight:
    """Return a linear layer's struct; `has_kernel` must hold."""
    assert isinstance(linear, KERNEL_LAYERS)
    return linear.as_read


def address(numbers: "array[int]") -> int:
    """Return where numbers lie."""
    return numbers.buffer_info()[0]
