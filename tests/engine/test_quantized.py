"""Linear layers with rounded weights: products are those of the rounded weights, which are near the plain ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from specdec.engine import Feed, ModelRefused, load_language_model
from specdec.engine.linear import try_prepack
from specdec.engine.quantized import Int4Linear, Quantization, try_quantize
from tests.engine.test_linear import make_linear
from tests.engine.tiny_models import load

KINDS: list[Quantization] = ["int8", "int4"]
SHAPES = [(32, 16), (96, 48), (576, 192)]
DEMO_TARGET = Path(__file__).parents[2] / "models" / "target"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def rounded(linear: nn.Module, kind: Quantization) -> Any:
    """Return the layer with rounded weights."""
    result = try_quantize(linear, kind)
    assert result is not None
    return result


@pytest.mark.parametrize("num_rows", [1, 3, 5, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_rounded_weights(
    kind: Quantization, shape: tuple[int, int], dtype: torch.dtype, num_rows: int
) -> None:
    layer = rounded(make_linear(*shape, bias=True, dtype=dtype), kind)
    rows = torch.randn(1, num_rows, 2 * shape[0]).to(dtype)[..., : shape[0]]  # not contiguous, as some are
    with torch.inference_mode():
        product = layer(rows)
        exact = rows.float() if kind == "int8" else rows.to(torch.bfloat16).float()
        wanted = nn.functional.linear(exact, layer.weight.float(), layer.bias.float())
    assert (product.shape, product.dtype) == (wanted.shape, dtype)
    assert (product.float() - wanted).abs().max() <= 2e-2 * max(1.0, float(wanted.std()))


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.01), ("int4", 0.12)])
def test_rounded_weights_are_near_the_plain_ones(kind: Quantization, error: float) -> None:
    linear = make_linear(576, 192, dtype=torch.float32)
    linear.weight = nn.Parameter(torch.randn(192, 576))
    difference = (rounded(linear, kind).weight.float() - linear.weight).std()
    assert error / 4 < difference < error


@pytest.mark.parametrize("kind", KINDS)
def test_large_channels_leave_the_others_alone(kind: Quantization) -> None:
    linear, louder = (make_linear(96, 48, dtype=torch.float32) for _ in range(2))
    louder.weight = nn.Parameter(linear.weight.detach() * torch.where(torch.arange(48) == 7, 1000.0, 1.0)[:, None])
    before, after = rounded(linear, kind).weight, rounded(louder, kind).weight
    assert torch.equal(before[8:], after[8:])
    assert not torch.equal(before[7], after[7])


@pytest.mark.parametrize("kind", KINDS)
def test_large_rows_leave_the_others_alone(kind: Quantization) -> None:
    """What one session feeds does not coarsen what its batch-mates get."""
    layer = rounded(make_linear(96, 48, dtype=torch.float32), kind)
    rows = torch.randn(4, 96)
    louder = rows * torch.tensor([1.0, 1.0, 1e4, 1.0])[:, None]
    with torch.inference_mode():
        assert torch.equal(layer(rows)[[0, 1, 3]], layer(louder)[[0, 1, 3]])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_layers_are_rounded_too(kind: Quantization) -> None:
    linear = make_linear(1024, 512, dtype=torch.float32)
    served = try_prepack(linear) or linear
    assert torch.equal(rounded(served, kind).weight, rounded(linear, kind).weight)


@pytest.mark.parametrize("module", [nn.Linear(48, 16), nn.Linear(32, 17)])
def test_odd_shapes_stay_unchanged_in_int4(module: nn.Module) -> None:
    assert try_quantize(module, "int4") is None
    assert try_quantize(module, "int8") is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [nn.Embedding(32, 32), nn.Linear(32, 32, device="meta")])
def test_other_modules_and_devices_stay_unchanged(kind: Quantization, module: nn.Module) -> None:
    assert try_quantize(module, kind) is None


def test_wrong_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(self: Int4Linear, rows: torch.Tensor) -> torch.Tensor:
        return rows @ product(self, torch.eye(32, dtype=torch.bfloat16)).T

    product = Int4Linear._product
    assert try_quantize(make_linear(32, 32, dtype=torch.float32), "int4") is not None
    monkeypatch.setattr(Int4Linear, "_product", transposed)
    assert try_quantize(make_linear(32, 32, dtype=torch.float32), "int4") is None


def test_convolutions_of_gpt2_are_rounded_too() -> None:
    module: nn.Module = Conv1D(48, 96)  # type: ignore[no-untyped-call]
    rows = torch.randn(3, 96)
    with torch.inference_mode():
        difference = (rounded(module, "int8")(rows) - module(rows)).std() / module(rows).std()
    assert difference < 0.02


@pytest.mark.parametrize(("kind", "least"), [("int8", 0.97), ("int4", 0.8)])
@pytest.mark.parametrize("is_fused", [True, False])
def test_rounded_models_agree_with_plain_ones(
    kind: Quantization, least: float, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sum min(p, q) on the demo target; each of its layers is rounded."""
    if not is_fused:
        monkeypatch.setattr("specdec.engine.load.has_fused_forward", lambda model: False)
    plain, other = (distributions(quantization) for quantization in (None, kind))
    assert least < float(torch.minimum(plain, other).sum(-1).mean()) < 0.9999


def distributions(quantization: Quantization | None) -> torch.Tensor:
    """Return the demo target's distributions after each token of a text, [tokens, V]."""
    model = load_language_model(
        str(DEMO_TARGET), device="cpu", dtype="float32", kv_cache_bytes=8 << 20, quantization=quantization
    )
    text = [(37 * place) % 4000 + 1 for place in range(64)]
    return model.forward([Feed(model.cache.open("s"), text, len(text))]).logits.softmax(-1)


def test_models_without_a_fitting_layer_are_refused(tmp_path: Path) -> None:
    narrow = GPT2Config(vocab_size=320, n_embd=36, n_head=3, n_layer=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(narrow).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="no linear layer on the CPU that int4 fits; leave quantisation out"):
        load(tmp_path, quantization="int4")
