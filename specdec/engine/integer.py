"""Products of 8-bit weights and 16-bit rows in whole numbers: the same bits for any number of rows, on any processor.

Each row of activations is rounded to 16 bits with a scale of its own, so a row does not depend on its batch. A number
of 16 bits is two digits of 8, and the products of both digits' rows with the weights are sums of whole numbers, which
are exact whatever their order. oneDNN computes them for both digits at once, as twice as many rows; rows of unsigned
bytes around 128 are what its fast kernels take. Where a processor has no such kernel, or one that saturates, float32
does it: the sum of at most EXACT_INPUTS products has 24 bits.
"""

from typing import Protocol

import torch
from torch import nn

ZERO = 128  # what a digit of 0 is stored as
MAX_LEVEL = 127 * 256 + 127  # the largest number whose two digits lie in -128 to 127, like those of its negative
ROUNDING = torch.tensor(ZERO * 256 + ZERO + 0.5)
EXACT_INPUTS = 1024  # 1024 * 128 * 127 < 2 ** 24
CHECKED_ROWS, CHECKED_CHANNELS = (1, 2, 10, 33), 128  # kernels differ by the number of rows, and in a weight's ends


class IntegerProduct(Protocol):
    """Computes float32(digits @ weight.T) * scales, with the sums exact before they are rounded to float32."""

    num_bytes: int

    def __call__(self, digits: torch.Tensor) -> torch.Tensor:
        """Return the product of digits, stored as digit + ZERO: uint8 [num_rows, in] -> float32 [num_rows, out]."""
        ...


class OneDnnProduct:
    """An `IntegerProduct` by oneDNN, with the weight packed once."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        self._scales, self._zeros = scales, torch.zeros(len(scales), dtype=torch.int32)
        self.num_bytes = weight.nbytes + scales.nbytes

    def __call__(self, digits: torch.Tensor) -> torch.Tensor:
        """See `IntegerProduct`."""
        scaled_to = (self._packed, self._scales, self._zeros)
        product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            digits, 1.0, ZERO, *scaled_to, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return product


class PlainProduct:
    """An `IntegerProduct` by float32 products of pieces that are short enough to be exact."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self._pieces = [piece.float() for piece in torch.split(weight, EXACT_INPUTS, dim=1)]
        self._scales = scales
        self.num_bytes = sum(piece.nbytes for piece in self._pieces) + scales.nbytes

    def __call__(self, digits: torch.Tensor) -> torch.Tensor:
        """See `IntegerProduct`."""
        rows = torch.split(digits.float() - ZERO, EXACT_INPUTS, dim=1)
        sums = [nn.functional.linear(*pair).int() for pair in zip(rows, self._pieces, strict=True)]
        return torch.stack(sums).sum(0, dtype=torch.int32).float() * self._scales


def integer_product(weight: torch.Tensor, scales: torch.Tensor) -> IntegerProduct:
    """Return the product with a weight, int8 [out, in], and its channels' scales, float32 [out].

    It is oneDNN's where that gives the bits of the plain one, which needs four times the memory.
    """
    try:
        product = OneDnnProduct(weight, scales)
        is_exact = all(_is_exact(product, weight, scales, num_rows) for num_rows in CHECKED_ROWS)
    except (RuntimeError, AttributeError, NotImplementedError):
        is_exact = False
    return product if is_exact else PlainProduct(weight, scales)


def _is_exact(product: IntegerProduct, weight: torch.Tensor, scales: torch.Tensor, num_rows: int) -> bool:
    """Compare the first and the last channels with the plain product, with the digits that saturate first, and others.

    Kernels without VNNI instructions add pairs of products in 16 bits.
    """
    generator = torch.Generator().manual_seed(num_rows)
    digits = torch.randint(256, (num_rows, weight.shape[1]), dtype=torch.uint8, generator=generator)
    digits[0] = torch.where(weight[0] > 0, 255, 0)
    found = product(digits)
    for ends in (slice(0, CHECKED_CHANNELS), slice(-CHECKED_CHANNELS, None)):
        if not torch.equal(found[:, ends], PlainProduct(weight[ends], scales[ends])(digits)):
            return False
    return True


def digits_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 rows [num_rows, in] to two digits; return uint8 [2 * num_rows, in], and scales [num_rows, 1].

    A number is (256 * high + low) * scale. All the low digits come first.
    """
    num_rows, width = rows.shape
    scales = rows.abs().amax(-1, keepdim=True).div_(MAX_LEVEL)  # 0 for a row of zeros: so is its product then
    # adding a half rounds, as conversion cuts off; the two zeros make both bytes of the sum digits around ZERO
    stored = torch.addcdiv(ROUNDING, rows, scales).to(torch.uint16)
    low_and_high = stored.view(torch.uint8).view(num_rows, width, 2)
    return low_and_high.permute(2, 0, 1).reshape(2 * num_rows, width), scales


def joined(products: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the rows' products [num_rows, out] from those of their digits [2 * num_rows, out]."""
    low, high = products.chunk(2)
    return torch.add(low, high, alpha=256).mul_(scales)
