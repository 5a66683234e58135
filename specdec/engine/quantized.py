"""Linear layers with weights of 8 or 4 bits, for the CPU.

int8 is for targets and drafts: weights with one scale a channel, activations of 16 bits with one scale a token, and
products in whole numbers (`integer.py`), so what a position gives does not depend on its batch. int4 is for drafts, of
which any is exact: scale and zero point for each group of a channel's weights, and activations in bfloat16. Its
products are torch's own; those of torchao 0.18, which run without compilation too, took 3 to 50 times as long.
"""

import logging
from typing import Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.engine.decoder import Decoder
from specdec.engine.errors import ModelRefused
from specdec.engine.helpers import ReadByHelpers
from specdec.engine.integer import (
    CHECKED_CHANNELS,
    CHECKED_ROWS,
    ZERO,
    PlainProduct,
    digits_of,
    integer_product,
    joined,
)
from specdec.engine.linear import Packed
from specdec.engine.native import Weight, has_bytes, in_tiles, multiply, num_lanes

logger = logging.getLogger(__name__)

Quantization = Literal["int8", "int4"]

KERNEL_DTYPES = (torch.float32, torch.bfloat16)
INT8_STEP = 4  # inputs that our kernel multiplies at once
MAX_INT8_INPUTS = 1 << 16  # so many products of 255 and 127 are less than 2 ** 31
GROUP_SIZE = 32  # weights of a channel that share scale and zero point in int4
SHAPE_MULTIPLES = (32, 16)  # of inputs and outputs in int4; torch's kernel reads past the end of other shapes
SHRINKINGS = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a group's range; the one with the least squared error is taken
MAX_ERROR = 0.3  # of the product's spread, root mean square: 4 bits give 0.06 to 0.12, a wrong kernel 1 and more


class Int8Linear(nn.Module):
    """A linear layer with weights of 8 bits and one scale a channel; each row is rounded to 16 bits by itself."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._product = integer_product(*rounded_channels(weight))

    @property
    def weight(self) -> torch.Tensor:
        """The rounded weight, float32 [out, in]; computed at each reading."""
        return self._times(torch.eye(self.in_features)).T

    @property
    def is_fast(self) -> bool:
        """Whether this processor and torch have a kernel for the products; without one, they are as fast as float32."""
        return not isinstance(self._product, PlainProduct)

    @property
    def num_bytes(self) -> int:
        """Memory of weight and scales."""
        return self._product.num_bytes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows @ weight.T + bias: [..., in] -> [..., out], in the type of the rows."""
        flat = rows.reshape(-1, rows.shape[-1]).float()
        result = self._times(flat).to(rows.dtype).view(*rows.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias

    def _times(self, rows: torch.Tensor) -> torch.Tensor:
        digits, scales = digits_of(rows)
        return joined(self._product(digits), scales)


class KernelInt8Linear(ReadByHelpers, nn.Module):
    """As `Int8Linear`, the same bits, by our own kernel for bytes (`linear_int8.h`)."""

    is_fast = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias, self.dtype = bias, weight.dtype
        levels, scales = rounded_channels(weight)
        extra = -self.out_features % (2 * num_lanes())
        levels = nn.functional.pad(levels, (0, 0, 0, extra))
        blocks = levels.view(-1, 2 * num_lanes(), self.in_features // INT8_STEP, INT8_STEP)
        self._blocks = blocks.transpose(1, 2).contiguous()  # [blocks of channels, steps, channels, inputs of a step]
        self._scales = nn.functional.pad(scales, (0, extra))
        self._zeros = ZERO * levels.sum(-1, dtype=torch.int32)
        self._bias = None if bias is None else nn.functional.pad(bias.detach().float(), (0, extra))
        self.as_read = Weight(
            numbers=self._blocks.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            scales=self._scales.data_ptr(),
            zeros=self._zeros.data_ptr(),
            num_in=self.in_features,
            num_out=self.out_features,
            is_bf16=self.dtype == torch.bfloat16,
            lanes=num_lanes(),
            has_tiles=in_tiles(self.in_features),
        )

    @property
    def weight(self) -> torch.Tensor:
        """The rounded weight, float32 [out, in]; computed at each reading."""
        levels = self._blocks.transpose(1, 2).reshape(-1, self.in_features)
        return (levels * self._scales[:, None])[: self.out_features]

    @property
    def num_bytes(self) -> int:
        """Memory of weight and scales."""
        return self._blocks.nbytes + self._scales.nbytes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows @ weight.T + bias: [..., in] -> [..., out], in the type of the rows."""
        return multiply(self.as_read, rows.to(self.dtype)).to(rows.dtype)


class Int4Linear(nn.Module):
    """A linear layer with weights of 4 bits, and scale and zero point for each GROUP_SIZE weights of a channel."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        levels, scales, zeros = _rounded_groups(weight.float().view(self.out_features, -1, GROUP_SIZE))
        self._packed = torch._convert_weight_to_int4pack_for_cpu(levels.flatten(1), 1)
        self._scales_and_zeros = torch.stack([scales, zeros], -1).transpose(0, 1).contiguous()  # [groups, out, 2]

    @property
    def weight(self) -> torch.Tensor:
        """The rounded weight, bfloat16 [out, in]; computed at each reading."""
        return self._product(torch.eye(self.in_features, dtype=torch.bfloat16)).T

    @property
    def num_bytes(self) -> int:
        """Memory of weight, scales and zero points."""
        return self._packed.nbytes + self._scales_and_zeros.nbytes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows @ weight.T + bias: [..., in] -> [..., out], in the type of the rows."""
        flat = rows.reshape(-1, rows.shape[-1]).to(torch.bfloat16).contiguous()
        result = self._product(flat).to(rows.dtype).view(*rows.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return torch._weight_int4pack_mm_for_cpu(rows, self._packed, GROUP_SIZE, self._scales_and_zeros)


Quantized = Int8Linear | KernelInt8Linear | Int4Linear


def quantize(decoder: Decoder, quantization: Quantization, name: str) -> None:
    """Replace the decoder's linear layers, in place, by ones with rounded weights.

    A layer that cannot be rounded stays as it is. Raises ModelRefused where that is each of them.
    """
    rounded: list[Quantized] = []

    def replaced(module: nn.Module) -> nn.Module:
        layer = try_quantize(module, quantization)
        if layer is None:
            return module
        rounded.append(layer)
        return layer

    decoder.replace_linears(replaced)
    if not rounded:
        raise ModelRefused(f"{name} has no linear layer on the CPU that {quantization} fits; leave quantisation out")
    num_slow = sum(isinstance(layer, Int8Linear) and not layer.is_fast for layer in rounded)
    if num_slow:
        reason = "this processor or torch lacks an exact kernel for int8 (VNNI): the same numbers, at float32's speed"
        logger.warning("int8_without_kernel", extra={"model": name, "num_layers": num_slow, "reason": reason})


@torch.no_grad()
def try_quantize(module: nn.Module, quantization: Quantization) -> Quantized | None:
    """Return a linear layer with rounded weights, or None for another module, or device.

    In int4, None also for another shape, and where this processor's kernel does not give the rounded weights' product.
    """
    if not isinstance(module, nn.Linear | Packed | Conv1D):
        return None
    weight = module.weight.detach().T if isinstance(module, Conv1D) else module.weight.detach()
    if weight.device.type != "cpu":
        return None
    return _int8(weight, module.bias) if quantization == "int8" else _try_int4(weight, module.bias)


def has_fast_int8(device: torch.device) -> bool:
    """Return whether int8 is computed by our own kernel, which is the fastest product where it runs."""
    return device.type == "cpu" and has_bytes()


def rounded_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [out, in] rounded to int8, and the scales of its channels, float32 [out]."""
    scales = (weight.float().abs().amax(-1) / 127).clamp(min=1e-12)
    return (weight.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def _int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Int8Linear | KernelInt8Linear:
    """Return the layer by our own kernel, where there is one that gives the bits of the other."""
    num_in = weight.shape[1]
    takes_kernel = num_in % INT8_STEP == 0 and num_in <= MAX_INT8_INPUTS and weight.dtype in KERNEL_DTYPES
    if takes_kernel and has_fast_int8(weight.device):
        ours = KernelInt8Linear(weight, bias)
        if _has_bits_of_plain(ours, weight, bias):
            return ours
    return Int8Linear(weight, bias)


def _has_bits_of_plain(ours: KernelInt8Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Compare the first and the last channels with the plain product; the first row has the largest sums."""
    generator = torch.Generator().manual_seed(0)
    levels, channel_scales = rounded_channels(weight)
    for ends in (slice(0, CHECKED_CHANNELS), slice(-CHECKED_CHANNELS, None)):
        product, added = PlainProduct(levels[ends], channel_scales[ends]), None if bias is None else bias[ends]
        for num_rows in CHECKED_ROWS:
            rows = torch.randn(num_rows, ours.in_features, generator=generator).to(ours.dtype)
            rows[0] = weight[ends][0].sign()
            digits, scales = digits_of(rows.float())
            plain = joined(product(digits), scales).to(ours.dtype)
            if not torch.equal(ours(rows)[:, ends], plain if added is None else plain + added):
                return False
    return True


def _try_int4(weight: torch.Tensor, bias: torch.Tensor | None) -> Int4Linear | None:
    if any(size % by for size, by in zip(weight.shape[::-1], SHAPE_MULTIPLES, strict=True)):
        return None
    try:
        rounded = Int4Linear(weight, bias)
        return rounded if _is_close(rounded, weight) else None
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


def _is_close(rounded: Int4Linear, weight: torch.Tensor) -> bool:
    """Compare a product of a few rows with that of the plain weights, which rounding moves by far less than half."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, rounded.in_features, generator=generator)
    plain = nn.functional.linear(rows, weight.float(), None if rounded.bias is None else rounded.bias.float())
    return bool((rounded(rows) - plain).pow(2).mean().sqrt() <= MAX_ERROR * plain.std().clamp(min=1e-30))


def _rounded_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return levels 0 to 15 of weights [out, groups, GROUP_SIZE], int32, and scales and zero points [out, groups].

    A level stands for (level - 8) * scale + zero point.
    """
    middle, reach = (groups.amax(-1) + groups.amin(-1)) / 2, (groups.amax(-1) - groups.amin(-1)) / 15
    chosen, least = reach, torch.full_like(reach, torch.inf)
    for shrinking in SHRINKINGS:
        levels, scales, zeros = _rounded_to(groups, middle, shrinking * reach)
        error = (_restored(levels, scales, zeros) - groups).square().sum(-1)
        chosen, least = torch.where(error < least, shrinking * reach, chosen), torch.minimum(error, least)
    return _rounded_to(groups, middle, chosen)


def _restored(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return what levels stand for, [out, groups, GROUP_SIZE]."""
    return (levels - 8) * scales.float()[..., None] + zeros.float()[..., None]


def _rounded_to(
    groups: torch.Tensor, middle: torch.Tensor, reach: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to 16 levels that lie `reach` apart around `middle` [out, groups]; scales are bfloat16 before that."""
    scales = reach.clamp(min=1e-12).to(torch.bfloat16)
    zeros = (middle + scales.float() / 2).to(torch.bfloat16)
    levels = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round().clamp(-8, 7) + 8
    return levels.to(torch.int32), scales, zeros
