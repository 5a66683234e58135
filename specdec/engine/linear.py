"""Linear layers whose weight is packed once for the CPU.

`torch.nn.functional.linear` reorders a weight for its kernel at every call; for the few rows of a decoding forward that
costs more than the product itself. A weight that was packed once is ready to be multiplied.

A packed product is close to the plain one, not equal: kernels differ in the order of their sums, and which kernel runs
depends on the processor. A worker agrees with itself: the same weights and shapes give the same bits. Which product it
is depends on type, shape and processor alone, never on a measurement.
"""

import torch
from torch import nn

from specdec.engine.helpers import ReadByHelpers
from specdec.engine.native import Weight, has_pairs, in_tiles, multiply, num_lanes

MIN_FLOAT32_LANES = 8  # narrower vectors have no kernel of ours
# Against plain float32, one thread, 135M Llama. EPYC (Zen 5): whole forwards 1.65 times as fast with 1 row and
# 2.65 with 3, the plain product at its slowest. Xeon with AVX-512: products 0.9 of the speed with 1 to 3 rows, 1.35 to
# 1.55 times as fast with 4 to 9, no gain below half a million weights.
MIN_FLOAT32_WEIGHTS = 1 << 19
LOWER_HALF = 0xFFFF
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # of the product's spread, largest difference


class PackedLinear(nn.Module):
    """Computes what the `nn.Linear` it replaces computes, up to rounding, with its weight packed once, by oneDNN."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was before packing, [out_features, in_features]; computed at each reading."""
        return self._packed.to_dense()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows @ weight.T + bias: [..., in_features] -> [..., out_features]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return product


class KernelLinear(ReadByHelpers, nn.Module):
    """As `PackedLinear`, by our own kernel (`linear_kernel.c`): a row's bits depend on it alone.

    With vectors of 512 bits up to 14 rows take about as long as one, which is as long as the weight takes to be read;
    with the matrix unit 32. It runs on one thread, and on those that help it (`helpers.py`).

    A weight of float32 that `can_be_halved`, as that of a model published in bfloat16, is read in half the bytes; what
    is computed stays float32, to the bit.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.dtype = linear.weight.dtype
        is_bf16, is_halved = self.dtype == torch.bfloat16, can_be_halved(linear.weight)
        self._step = 2 if is_bf16 or is_halved else 1  # inputs that are read at once
        self._channels = 2 * num_lanes()  # that lie together
        extra = -self.out_features % self._channels
        stored = linear.weight.detach().to(torch.bfloat16 if is_halved else self.dtype)
        weight = nn.functional.pad(stored, (0, 0, 0, extra))
        blocks = weight.view(-1, self._channels, self.in_features // self._step, self._step)
        self._blocks = blocks.transpose(1, 2).contiguous()  # [blocks of channels, steps, channels, inputs of a step]
        self._bias = None if self.bias is None else nn.functional.pad(self.bias.detach().float(), (0, extra))
        self.as_read = Weight(
            numbers=self._blocks.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_in=self.in_features,
            num_out=self.out_features,
            is_bf16=is_bf16,
            is_halved=is_halved,
            lanes=num_lanes(),
            has_tiles=is_bf16 and in_tiles(2 * self.in_features),
        )

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was before packing, [out_features, in_features]; computed at each reading."""
        stored = self._blocks.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]
        return stored.to(self.dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows @ weight.T + bias: [..., in_features] -> [..., out_features].

        Raises ValueError for rows of another type or size, whose memory the kernel would misread.
        """
        if rows.dtype != self.dtype or rows.shape[-1] != self.in_features:
            raise ValueError(f"rows of {rows.dtype} {list(rows.shape)} for {self.in_features} inputs of {self.dtype}")
        return multiply(self.as_read, rows)


Packed = PackedLinear | KernelLinear


def can_be_halved(weight: torch.Tensor) -> bool:
    """Return whether a weight [out, in] is one of float32 that the upper halves of its numbers give, two by two."""
    if weight.dtype != torch.float32 or weight.shape[1] % 2:
        return False
    return not (weight.detach().contiguous().view(torch.int32) & LOWER_HALF).any()


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` that `try_prepack` packs; return how many."""
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = try_prepack(child)
            if packed is not None:
                setattr(parent, name, packed)
                num_packed += 1
    return num_packed


def try_prepack(module: nn.Module) -> Packed | None:
    """Return the module with its weight packed, or None where that is not faster or not supported.

    Not supported: other modules, other types, GPUs, a torch without oneDNN, a processor without the instructions, or
    a packed product that is not close to the plain one.
    """
    if type(module) is not nn.Linear or not _gains(module):
        return None
    try:
        packed = KernelLinear(module) if _takes_kernel(module) else PackedLinear(module)
        is_close = all(_is_close(module, packed, num_rows) for num_rows in (1, 5))
    except (RuntimeError, AttributeError, NotImplementedError):
        return None
    return packed if is_close else None


def _takes_kernel(linear: nn.Linear) -> bool:
    """Whether our own kernel serves the layer."""
    if linear.weight.dtype == torch.float32:
        return num_lanes() >= MIN_FLOAT32_LANES
    return linear.in_features % 2 == 0 and has_pairs()


def _gains(linear: nn.Linear) -> bool:
    """Whether a packed product is faster than the plain one."""
    weight = linear.weight
    if weight.device.type != "cpu":
        return False
    if weight.dtype == torch.float32:
        return _takes_kernel(linear) or weight.numel() >= MIN_FLOAT32_WEIGHTS
    return weight.dtype == torch.bfloat16


@torch.no_grad()
def _is_close(linear: nn.Linear, packed: Packed, num_rows: int) -> bool:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(1, num_rows, linear.in_features, generator=generator).to(linear.weight.dtype)
    plain = linear(rows).float()
    difference = (packed(rows).float() - plain).abs().max()
    return bool(difference <= TOLERANCES[linear.weight.dtype] * max(float(plain.std()), 1e-30))
