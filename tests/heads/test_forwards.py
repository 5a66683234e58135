"""The networks compute what the package `speculators` computes, on the same files; see `make_fixtures.py`."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.heads.eagle3 import Eagle3Head
from specdec.heads.formats.dflash import load_dflash
from specdec.heads.formats.eagle3 import load_eagle3
from specdec.heads.layers import attend

FIXTURES = Path(__file__).parent / "fixtures"
TARGET = FIXTURES / "target"
TOLERANCE = 1e-4


def outputs_of(name: str) -> dict[str, torch.Tensor]:
    """Return what the package was given and computed."""
    return load_file(FIXTURES / name / "outputs.st")


def split(states: torch.Tensor, num_layers: int) -> torch.Tensor:
    """Return states [tokens, layers, size] from the package's form [tokens, layers * size]."""
    return states.reshape(len(states), num_layers, -1)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that logits differ by no more than rounding."""
    assert actual.shape == expected.shape
    assert expected.std() > 0.3, "logits are too flat to show an error"
    assert (actual - expected).abs().max() < TOLERANCE


def drafted(head: Eagle3Head, states: torch.Tensor, tokens: torch.Tensor, root: int, num_steps: int) -> torch.Tensor:
    """Return logits [steps, V] after pair `root`, then after pairs of the head's own outputs and the next tokens."""
    layer, positions = head.layer, torch.arange(root + num_steps)
    angles = head.rotary(positions)
    projected, residual = layer.project_pair(
        head.embed_tokens(tokens[: root + 1]),
        head.joined(states[: root + 1]),
        (angles[0][: root + 1], angles[1][: root + 1]),
    )
    keys, values, query, residual = projected.key, projected.value, projected.query[-1:], residual[-1:]
    logits = []
    for step in range(num_steps):
        output = layer.finish(residual, attend(query, keys, values, None))
        row, state = head.predict(output)
        logits.append(row[0])
        if step + 1 < num_steps:
            place = root + step + 1
            embedded, here = (
                head.embed_tokens(tokens[place : place + 1]),
                (angles[0][place, None], angles[1][place, None]),
            )
            projected, residual = layer.project_pair(embedded, state, here)
            keys, values = torch.cat((keys, projected.key)), torch.cat((values, projected.value))
            query = projected.query
    return torch.stack(logits)


@pytest.mark.parametrize("name", ["eagle3_llama", "eagle3_llama_norms", "eagle3_qwen3"])
def test_eagle3_equals_the_package(name: str) -> None:
    head, given = load_eagle3(FIXTURES / name, TARGET), outputs_of(name)
    states, num_steps = split(given["states"], 3), len(given["logits"])
    for root in range(len(given["tokens"]) - num_steps + 1):
        assert_close(drafted(head, states, given["tokens"], root, num_steps), given["logits"][:, root])


@pytest.mark.parametrize("name", ["dflash", "dflash_reduced"])
def test_dflash_equals_the_package(name: str) -> None:
    head, given = load_dflash(FIXTURES / name, TARGET), outputs_of(name)
    states = split(given["states"], 2)
    for anchor, expected in zip(given["anchors"].tolist(), given["logits"], strict=True):
        context = head.offered(states[:anchor], torch.arange(anchor))
        assert_close(head.predict(given["tokens"][anchor], torch.tensor(anchor), context, None), expected[1:])


def test_changed_weight_changes_the_logits(tmp_path: Path) -> None:
    head, given = load_eagle3(FIXTURES / "eagle3_qwen3", TARGET), outputs_of("eagle3_qwen3")
    head.fc_norm[0].weight += 0.1  # type: ignore[index, operator]
    logits = drafted(head, split(given["states"], 3), given["tokens"], 3, 4)
    assert (logits - given["logits"][:, 3]).abs().max() > TOLERANCE


def test_target_supplies_the_missing_output_layer(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "eagle3_llama", tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(load_eagle3(tmp_path / "head", TARGET).lm_head.weight, tensors["lm_head.weight"])
    own = tensors.pop("lm_head.weight")
    del tensors["embed_tokens.weight"]
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    assert torch.equal(load_eagle3(tmp_path / "head", TARGET).lm_head.weight, own)
