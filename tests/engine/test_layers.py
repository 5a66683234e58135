"""A model with some of its layers: the logits of the whole one without the others, which are not even read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdec.engine import LanguageModel, ModelRefused
from tests.engine.scenarios import check_tree_rounds
from tests.engine.tiny_models import ReferenceModel, load
from tests.support import architectures

DROPPED = 1  # of three layers
# a fused one; windows and rotations by layer; renamed weights; merged experts, and a first layer without any
NAMES = ["llama", "gemma2", "gemma3", "smollm3", "gpt2", "gpt_neox", "opt", "mixtral", "deepseek_v3"]


class WithoutLayer(ReferenceModel):
    """The whole model in transformers, where one layer returns its input."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        layer = next(module for name, module in self._model.named_modules() if name.endswith(f".{DROPPED}"))
        layer.register_forward_hook(lambda module, inputs, output: inputs[0])


@pytest.mark.parametrize("name", NAMES)
def test_other_layers_compute_as_without_it(name: str, tmp_path: Path) -> None:
    folder = architectures.build(name, tmp_path)
    model = load(folder, layers=(0, 2))
    assert model.num_layers == 2
    check_tree_rounds(model, WithoutLayer(folder))


def test_weights_of_other_layers_are_not_read(tmp_path: Path) -> None:
    """They may be absent from the file; those that are kept may not."""
    folder = architectures.build("llama", tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({name: weight for name, weight in weights.items() if f".{DROPPED}." not in name}, file, {"format": "pt"})
    assert num_weights(load(folder, layers=(0, 2))) < sum(weight.numel() for weight in weights.values())


def num_weights(model: LanguageModel) -> int:
    """Return how many numbers the fused decoder's layers and head hold."""
    decoder: Any = model.decoder
    linears = [linear for layer in decoder._layers for linear in vars(layer).values() if hasattr(linear, "in_features")]
    return sum(linear.in_features * linear.out_features for linear in [*linears, decoder._head])


@pytest.mark.parametrize(
    ("layers", "words"), [((0, 3), "no layer 3; its 3 layers are 0 to 2"), ((7, 9), "layers 7, 9")]
)
def test_absent_layers_are_refused(layers: tuple[int, ...], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=words):
        load(architectures.build("llama", tmp_path), layers=layers)


def test_reference_depends_on_the_dropped_layer(tmp_path: Path) -> None:
    folder = architectures.build("llama", tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = list(range(2, 30))
    with torch.no_grad():
        assert (whole(torch.tensor([text])).logits[0] - WithoutLayer(folder).logits(text)).abs().max() > 0.1
