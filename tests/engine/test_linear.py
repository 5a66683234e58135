"""Packed linears give the bits of the linears that they replace."""

import pytest
import torch
from torch import nn

from specdec.engine.linear import PackedLinear, pack_linears, try_prepack


def make_linear(num_in: int, num_out: int, bias: bool, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(num_in * num_out)
    return nn.Linear(num_in, num_out, bias=bias).to(dtype).eval()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 9, 33, 300])
@pytest.mark.parametrize(("num_in", "num_out"), [(48, 320), (384, 1024), (1024, 384), (129, 67)])
def test_same_bits(num_in: int, num_out: int, num_rows: int, bias: bool) -> None:
    linear = make_linear(num_in, num_out, bias)
    packed = try_prepack(linear)
    assert packed is not None
    rows = torch.randn(1, num_rows, num_in).bfloat16()
    with torch.inference_mode():
        assert torch.equal(packed(rows), linear(rows))


def test_the_weight_can_be_read_back() -> None:
    linear = make_linear(129, 67, bias=False)
    assert torch.equal(PackedLinear(linear).weight, linear.weight)


def test_a_tied_embedding_keeps_its_weight() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(50, 16).to(torch.bfloat16)
    model.head = make_linear(16, 50, bias=False)
    model.head.weight = model.embedding.weight
    assert pack_linears(model) == 1
    assert isinstance(model.head, PackedLinear)
    assert torch.equal(model.embedding.weight, model.head.weight)


def test_other_types_stay_as_they_are() -> None:
    model = nn.Sequential(make_linear(16, 16, True, torch.float32), nn.LayerNorm(16), nn.Linear(8, 8).to(torch.float16))
    before = list(model)
    assert pack_linears(model) == 0
    assert list(model) == before


def test_a_packing_that_changes_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "specdec.engine.linear.pack_weight", lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight * 1.01, None)
    )
    assert try_prepack(make_linear(48, 64, bias=False)) is None
