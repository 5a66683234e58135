"""Products in whole numbers equal sums computed in whole numbers, bit for bit, by oneDNN and by float32."""

from typing import Any

import pytest
import torch

from specdec.engine import quantized
from specdec.engine.integer import (
    EXACT_INPUTS,
    MAX_LEVEL,
    ZERO,
    IntegerProduct,
    OneDnnProduct,
    PlainProduct,
    digits_of,
    integer_product,
    joined,
)
from specdec.engine.native import has_bytes
from specdec.engine.quantized import Int8Linear, KernelInt8Linear, try_quantize

SHAPES = [
    (32, 16),
    (37, 17),
    (384, 1024),
    (1, 1),
    (EXACT_INPUTS + 1, 40),
    (3 * EXACT_INPUTS - 7, 33),
]  # inputs, outputs
ROWS = [1, 2, 5, 9, 16, 33, 100]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def weight_of(num_in: int, num_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random weight, with the largest levels in its first channel, and scales."""
    generator = torch.Generator().manual_seed(num_in * num_out)
    weight = torch.randint(-127, 128, (num_out, num_in), generator=generator).to(torch.int8)
    weight[0] = torch.where(torch.arange(num_in) % 2 == 0, 127, -127)
    return weight, torch.rand(num_out, generator=generator) / 100 + 1e-4


def digits_for(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return random digits; those of the first row and the first channel have the largest possible sum."""
    generator = torch.Generator().manual_seed(num_rows)
    digits = torch.randint(256, (num_rows, weight.shape[1]), generator=generator).to(torch.uint8)
    digits[0] = torch.where(weight[0] > 0, 255, 0)
    return digits


def expected(digits: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the product by torch's own arithmetic on whole numbers of 32 bits."""
    sums = (digits.to(torch.int32) - ZERO) @ weight.to(torch.int32).T
    return sums.float() * scales


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [integer_product, PlainProduct])
def test_products_equal_whole_number_sums(kind: Any, shape: tuple[int, int], num_rows: int) -> None:
    weight, scales = weight_of(*shape)
    product: IntegerProduct = kind(weight, scales)
    digits = digits_for(weight, num_rows)
    assert torch.equal(product(digits), expected(digits, weight, scales))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_is_used_where_it_is_exact(shape: tuple[int, int]) -> None:
    weight, scales = weight_of(*shape)
    try:
        kernel = OneDnnProduct(weight, scales)
        is_exact = all(
            torch.equal(kernel(digits_for(weight, rows)), expected(digits_for(weight, rows), weight, scales))
            for rows in ROWS
        )
    except (RuntimeError, AttributeError, NotImplementedError):
        is_exact = False
    assert isinstance(integer_product(weight, scales), OneDnnProduct) == is_exact


def saturating(self: OneDnnProduct, digits: torch.Tensor) -> torch.Tensor:
    """Add pairs of products in 16 bits, as processors without VNNI instructions do."""
    weight, scales = weight_of(96, 48)
    products = digits.int()[:, None] * weight.int()  # [rows, out, in]
    pairs = products.view(*products.shape[:-1], -1, 2).sum(-1).clamp(-(1 << 15), (1 << 15) - 1)
    return (pairs.sum(-1) - ZERO * weight.int().sum(-1)).float() * scales


def absent(self: OneDnnProduct, digits: torch.Tensor) -> torch.Tensor:
    """Fail as a torch without the operator does."""
    raise AttributeError("'_OpNamespace' 'onednn' object has no attribute 'qlinear_pointwise'")


@pytest.mark.parametrize("broken", [saturating, absent])
def test_wrong_kernels_are_replaced(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scales = weight_of(96, 48)
    monkeypatch.setattr(OneDnnProduct, "__call__", broken)
    product = integer_product(weight, scales)
    assert isinstance(product, PlainProduct)
    assert torch.equal(product(digits_for(weight, 5)), expected(digits_for(weight, 5), weight, scales))


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_digits_are_within_half_a_step(size: float) -> None:
    rows = size * torch.randn(7, 300, generator=torch.Generator().manual_seed(1))
    digits, scales = digits_of(rows)
    low, high = (digits.double() - ZERO).chunk(2)
    levels = 256 * high + low
    assert (levels.abs().amax(-1) == MAX_LEVEL).all(), "the largest number takes the largest level"
    assert (levels - rows.double() / scales).abs().max() <= 0.51


def test_rows_of_zeros_give_zeros() -> None:
    weight, scales = weight_of(32, 16)
    digits, row_scales = digits_of(torch.zeros(2, 32))
    assert not joined(integer_product(weight, scales)(digits), row_scales).any()


def test_rows_are_rounded_by_themselves() -> None:
    rows = torch.randn(9, 37) * torch.logspace(-3, 3, 9)[:, None]
    digits, scales = digits_of(rows)
    for row in range(9):
        alone, scale = digits_of(rows[row : row + 1])
        assert torch.equal(alone, digits[[row, 9 + row]])
        assert torch.equal(scale[0], scales[row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_rows_spoil_themselves_alone(bad: float) -> None:
    layer = Int8Linear(torch.randn(24, 40), torch.randn(24))
    rows = torch.randn(4, 40)
    spoiled = rows.clone()
    spoiled[2, 5] = bad
    with torch.inference_mode():
        good, found = layer(rows), layer(spoiled)
    assert torch.equal(found[[0, 1, 3]], good[[0, 1, 3]])
    assert not found[2].isfinite().any()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_bits_do_not_depend_on_the_number_of_rows(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    layer = Int8Linear(torch.randn(1024, 384), torch.randn(1024))
    rows = torch.randn(64, 384)
    with torch.inference_mode():
        together = layer(rows)
        for count in (1, 2, 5, 9, 16, 17, 33):
            assert torch.equal(torch.cat([layer(piece) for piece in torch.split(rows, count)]), together)


def test_both_products_give_the_same_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = torch.randn(48, 96), torch.randn(6, 96)
    with torch.inference_mode():
        fast = Int8Linear(weight, None)(rows)
        monkeypatch.setattr(OneDnnProduct, "__call__", absent)
        plain = Int8Linear(weight, None)
        assert not plain.is_fast
        assert torch.equal(plain(rows), fast)


# ---- our own kernel


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """A type of rows, where our kernel for bytes runs."""
    torch.set_num_threads(1)
    if not has_bytes():
        pytest.skip("this processor has no instructions for bytes in vectors of 512 bits, or there is no kernel")
    return torch.float32 if request.param is torch.float32 else torch.bfloat16


def ours_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> KernelInt8Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).to(weight.dtype)
    linear.weight.data = weight
    if bias is not None:
        linear.bias.data = bias
    layer = try_quantize(linear, "int8")
    assert isinstance(layer, KernelInt8Linear)
    return layer


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(67, 40), (576, 1536), (3, 4), (64, 1284)])
def test_our_kernel_gives_the_bits_of_onednns(shape: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype) if has_bias else None
    ours, other = ours_of(weight, bias), Int8Linear(weight, bias)
    torch.testing.assert_close(ours.weight, other.weight, rtol=1e-6, atol=1e-6)
    for num_rows in (0, 1, 2, 5, 6, 7, 12, 13, 33):
        rows = (torch.randn(num_rows, shape[1]) * torch.logspace(-3, 3, max(num_rows, 1))[:num_rows, None]).to(dtype)
        assert torch.equal(ours(rows), other(rows))


def test_our_kernel_takes_rows_of_zeros_and_what_is_not_finite(dtype: torch.dtype) -> None:
    ours, rows = ours_of(torch.randn(40, 64).to(dtype)), torch.randn(4, 64).to(dtype)
    rows[0] = 0
    rows[1, 3] = float("nan")
    rows[2, 3] = float("inf")
    product = ours(rows)
    assert not product[0].any()
    assert not product[1:3].isfinite().any()
    assert torch.equal(product[3], ours(rows[3]))


def test_our_kernel_is_for_whole_steps(dtype: torch.dtype) -> None:
    assert isinstance(try_quantize(torch.nn.Linear(42, 8).to(dtype), "int8"), Int8Linear)


def test_a_wrong_kernel_of_ours_is_not_used(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "ZERO", 127)
    assert isinstance(try_quantize(torch.nn.Linear(40, 8).to(dtype), "int8"), Int8Linear)
