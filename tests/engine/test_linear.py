"""Packed linear layers are close to plain ones, and deterministic.

The tests pass on every processor: where oneDNN cannot pack a type, layers must stay unchanged.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from specdec.engine import linear as layers
from specdec.engine import quantized
from specdec.engine.linear import (
    MIN_FLOAT32_LANES,
    MIN_FLOAT32_WEIGHTS,
    KernelLinear,
    PackedLinear,
    pack_linears,
    try_prepack,
)
from specdec.engine.native import has_pairs, in_tiles, num_lanes
from specdec.engine.quantized import KernelInt8Linear

SHAPES = {  # (in, out); some of each type have odd sizes
    torch.bfloat16: [(48, 320), (384, 1024), (1024, 384), (129, 67), (130, 67)],
    torch.float32: [(384, 1536), (1536, 384), (731, 727), (16, 24)],
}
CASES = [(dtype, shape) for dtype, shapes in SHAPES.items() for shape in shapes]
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # times the standard deviation of the outputs


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_linear(num_in: int, num_out: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(num_in * num_out)
    return nn.Linear(num_in, num_out, bias=bias).to(dtype).eval()


def packs(dtype: torch.dtype) -> bool:
    """Return whether this processor packs weights of the type."""
    try:
        PackedLinear(make_linear(16, 16, dtype=dtype))(torch.zeros(1, 16, dtype=dtype))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_layers_are_packed_where_supported(dtype: torch.dtype, shape: tuple[int, int], bias: bool) -> None:
    by_onednn = packs(dtype) and (dtype == torch.bfloat16 or shape[0] * shape[1] >= MIN_FLOAT32_WEIGHTS)
    expected = by_onednn or (dtype == torch.float32 and takes_float32())
    assert (try_prepack(make_linear(*shape, bias, dtype)) is not None) == expected


def takes_float32() -> bool:
    """Return whether our own kernel multiplies float32 here."""
    return num_lanes() >= MIN_FLOAT32_LANES


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 9, 14, 15, 33, 300])
@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_products_are_close(dtype: torch.dtype, shape: tuple[int, int], num_rows: int, bias: bool) -> None:
    linear = make_linear(*shape, bias, dtype)
    rows = torch.randn(1, num_rows, shape[0]).to(dtype)
    with torch.inference_mode():
        packed, plain = served(linear)(rows), linear(rows)
    assert packed.shape == plain.shape
    assert (packed - plain).float().abs().max() <= TOLERANCES[dtype] * plain.float().std()


@pytest.mark.parametrize("num_rows", [1, 5, 33])
@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_repeated_products_have_the_same_bits(dtype: torch.dtype, shape: tuple[int, int], num_rows: int) -> None:
    linear = make_linear(*shape, dtype=dtype)
    rows = torch.randn(num_rows, shape[0]).to(dtype)
    first, second = served(linear), served(linear)
    with torch.inference_mode():
        assert torch.equal(first(rows), first(rows))
        assert torch.equal(first(rows), second(rows)), "two packings of one weight must agree"


def served(linear: nn.Linear) -> nn.Module:
    """Return the layer that a model is served with."""
    return try_prepack(linear) or linear


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_weights_can_be_read_back(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    linear = make_linear(*shape, dtype=dtype)
    weight = served(linear).weight
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, linear.weight)


def test_tied_embeddings_keep_their_weight() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(1024, 512)
    model.head = make_linear(512, 1024, dtype=torch.float32)
    model.head.weight = model.embedding.weight
    assert pack_linears(model) == (packs(torch.float32) or takes_float32())
    assert isinstance(model.embedding.weight, torch.Tensor)
    assert torch.equal(model.embedding.weight, served(model.head).weight)  # type: ignore[arg-type]


def test_other_layers_stay_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_takes_kernel", lambda linear: False)
    small = make_linear(16, MIN_FLOAT32_WEIGHTS // 16 - 1, dtype=torch.float32)
    model = nn.Sequential(small, nn.LayerNorm(16), nn.Linear(8, 8).to(torch.float16))
    before = list(model)
    assert pack_linears(model) == 0
    assert list(model) == before


@pytest.mark.parametrize("dtype", SHAPES)
def test_wrong_products_are_not_used(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    init = PackedLinear.__init__

    def wrong(self: PackedLinear, linear: nn.Linear) -> None:
        other = make_linear(linear.in_features, linear.out_features, dtype=dtype)
        other.weight = nn.Parameter(linear.weight.detach() * 1.1)
        init(self, other)

    monkeypatch.setattr(PackedLinear, "__init__", wrong)
    monkeypatch.setattr(layers, "_takes_kernel", lambda linear: False)
    assert try_prepack(make_linear(512, 1024, dtype=dtype)) is None


@pytest.mark.parametrize("dtype", SHAPES)
def test_unsupported_types_stay_unchanged(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PackedLinear, linear: nn.Linear) -> None:
        raise RuntimeError("the platform does not support it")

    monkeypatch.setattr(PackedLinear, "__init__", refuse)
    monkeypatch.setattr(KernelLinear, "__init__", refuse)
    assert try_prepack(make_linear(512, 1024, dtype=dtype)) is None


@pytest.fixture(
    params=[(torch.bfloat16, 1130), (torch.bfloat16, 1152), (torch.float32, 1130), (torch.float32, 1130, "halved")],
    ids=str,
)
def ours(request: pytest.FixtureRequest) -> KernelLinear:
    """A layer with a bias that our own kernel computes: its outputs fill no vector, its inputs may fill tiles."""
    dtype, num_in, *is_halved = request.param
    if not (has_pairs() if dtype == torch.bfloat16 else takes_float32()):
        pytest.skip(f"this processor has no instructions for our kernel of {dtype}, or there is no kernel")
    linear = make_linear(num_in, 67, bias=True, dtype=dtype)
    served = try_prepack(as_published(linear) if is_halved else linear)
    assert isinstance(served, KernelLinear)
    assert served.as_read.is_halved == bool(is_halved)
    return served


def as_published(linear: nn.Linear) -> nn.Linear:
    """Round a layer's weight to bfloat16, the type that most models are published in; it stays float32."""
    linear.weight = nn.Parameter(linear.weight.detach().bfloat16().float())
    return linear


def random_rows(ours: KernelLinear, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, ours.in_features).to(ours.dtype)


@pytest.mark.parametrize("num_rows", [2, 6, 7, 13, 14, 15, 29, 43, 100])
def test_a_rows_bits_do_not_depend_on_others(ours: KernelLinear, num_rows: int) -> None:
    rows = random_rows(ours, num_rows)
    together = ours(rows)
    for index in range(num_rows):
        assert torch.equal(ours(rows[index : index + 1])[0], together[index])


@pytest.mark.parametrize("num_rows", [1, 5, 17])
def test_narrower_vectors_give_close_products(num_rows: int) -> None:
    """As on a processor without AVX-512."""
    if num_lanes() <= MIN_FLOAT32_LANES:
        pytest.skip("this processor's vectors are as narrow, or there is no kernel")
    linear = make_linear(731, 727, bias=True, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "num_lanes", lambda: MIN_FLOAT32_LANES)
        narrow = KernelLinear(linear)
    rows = torch.randn(num_rows, 731)
    assert torch.equal(narrow.weight, linear.weight)
    assert (narrow(rows) - linear(rows)).abs().max() <= TOLERANCES[torch.float32] * linear(rows).std()
    assert torch.equal(narrow(rows)[-1], narrow(rows[-1]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 6, 7, 13, 14, 15, 33, 100])
@pytest.mark.parametrize("shape", [(2, 16), (126, 67), (128, 64), (130, 1000), (1152, 4096)])
@pytest.mark.parametrize("lanes", [8, 16])
def test_halved_weights_give_the_bits_of_whole_ones(
    lanes: int, shape: tuple[int, int], num_rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lanes > num_lanes():
        pytest.skip(f"this processor's vectors have {num_lanes()} floats")
    monkeypatch.setattr(layers, "num_lanes", lambda: lanes)
    linear = as_published(make_linear(*shape, bias, torch.float32))
    halved = KernelLinear(linear)
    monkeypatch.setattr(layers, "can_be_halved", lambda weight: False)
    whole = KernelLinear(linear)
    assert (halved.as_read.is_halved, whole.as_read.is_halved) == (True, False)
    rows = torch.randn(num_rows, shape[0])
    assert torch.equal(halved(rows), whole(rows))
    assert torch.equal(halved.weight, linear.weight)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([1.0, -0.0, float("inf"), 2.0**-133], True),  # the last is the least that bfloat16 has
        ([1.0, 1.0 + 2.0**-8, 0.0, 0.0], False),
        ([1.0, 2.0**-149, 0.0, 0.0], False),
        ([1.0, 2.0, 3.0], False),  # an odd number of inputs
    ],
)
def test_weights_are_halved_only_where_nothing_is_lost(numbers: list[float], expected: bool) -> None:
    weight = torch.tensor([[1.0] * len(numbers), numbers])
    assert layers.can_be_halved(weight) == expected
    assert layers.can_be_halved(weight.T.contiguous().T) == expected
    assert not layers.can_be_halved(weight.bfloat16())


def test_long_sums_keep_their_digits() -> None:
    """Added up one by one, they would lose several times as much as torch's."""
    if not takes_float32():
        pytest.skip("this processor has no instructions for our kernel of float32, or there is no kernel")
    linear, rows = make_linear(4096, 64, dtype=torch.float32), torch.rand(5, 4096)
    exact = rows.double() @ linear.weight.double().T
    error, plain = ((product - exact).abs().mean() for product in (KernelLinear(linear)(rows), linear(rows)))
    assert error <= 1.5 * plain


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 31, 32, 33, 47, 100])
def test_products_in_tiles_are_those_of_vectors(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bfloat16 up to the order of sums, of 8 bits to the bit."""
    if not in_tiles(1152):
        pytest.skip("this processor has no matrix unit, or no kernel uses it")
    kinds: list[tuple[Callable[[nn.Linear], nn.Module], float]] = [
        (KernelLinear, 2e-2),
        (lambda linear: KernelInt8Linear(linear.weight, linear.bias), 0.0),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        rows = torch.randn(num_rows, 1152).to(dtype)
        for pack, tolerance in kinds:
            linear = make_linear(1152, 67, bias=True, dtype=dtype)
            in_tiles_of_16 = pack(linear)(rows)
            with monkeypatch.context() as patch:
                for module in (layers, quantized):
                    patch.setattr(module, "in_tiles", lambda row_bytes: False)
                in_vectors = pack(linear)(rows)
            difference = (in_tiles_of_16 - in_vectors).float().abs().max()
            assert difference <= tolerance * in_vectors.float().std()


def test_rows_may_lie_anywhere(ours: KernelLinear) -> None:
    rows = torch.randn(ours.in_features, 4).to(ours.dtype)
    assert torch.equal(ours(rows.T), ours(rows.T.contiguous()))
    assert ours(rows[:, :0].T).shape == (0, 67)


def test_nothing_is_written_past_the_output(ours: KernelLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    room, rows = torch.full((3 * 67 + 64,), 7.0).to(ours.dtype), random_rows(ours, 3)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: room[: 3 * 67].view(3, 67))
    assert ours(rows).data_ptr() == room.data_ptr()
    assert (room[3 * 67 :] == 7).all()


def test_wrong_products_of_ours_are_not_used(ours: KernelLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelLinear, "forward", lambda self, rows: rows[..., :1] + torch.zeros(67).to(ours.dtype))
    assert try_prepack(make_linear(ours.in_features, 67, dtype=ours.dtype)) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_products_of_numbers_that_are_not_finite(ours: KernelLinear, bad: float) -> None:
    rows = random_rows(ours, 3)
    rows[1, 5] = bad
    product = ours(rows)
    assert not product[1].isfinite().any()
    assert product[[0, 2]].isfinite().all()


def test_rows_that_the_kernel_would_misread_are_refused(ours: KernelLinear) -> None:
    num_in = ours.in_features
    for rows in (torch.zeros(2, num_in).to(torch.float16), torch.zeros(2, num_in - 2).to(ours.dtype)):
        with pytest.raises(ValueError, match=f"for {num_in} inputs of"):
            ours(rows)
