"""Heads are what they were after they are written and read, in every published format; what does not fit is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.random_heads import dflash_head, eagle3_head, medusa_head, resized
from specdec.heads.formats.dflash import load_dflash, save_dflash
from specdec.heads.formats.eagle3 import load_eagle3, save_eagle3
from specdec.heads.formats.files import HeadRefused
from specdec.heads.formats.medusa import load_medusa, save_medusa
from specdec.heads.formats.target import TargetFolder, target_folder
from specdec.serving.settings import HeadKind
from tests.support.architectures import build

REDUCED = 50


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFolder:
    """A target of three layers, with an output layer of its own."""
    return target_folder(str(build("qwen3", tmp_path_factory.mktemp("target"))))


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    """Assert that two heads have the same tensors, up to bfloat16, in which they are stored."""
    states = actual.state_dict()
    assert states.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        wanted = value.bfloat16().float() if value.is_floating_point() and not _is_targets(name) else value
        assert torch.equal(states[name], wanted), name


def _is_targets(name: str) -> bool:
    return name.startswith(("embed_tokens", "lm_head"))


@pytest.mark.parametrize("size", [None, REDUCED])
@pytest.mark.parametrize("with_lm_head", [False, True])
def test_eagle3_survives_writing(target: TargetFolder, tmp_path: Path, size: int | None, with_lm_head: bool) -> None:
    head = eagle3_head(target, size, norm_before_residual=True, fc_norm=True, norm_output=True)
    if with_lm_head:
        head.lm_head.weight.copy_(head.lm_head.weight.bfloat16())
    save_eagle3(head, tmp_path, "target", with_lm_head)
    read = load_eagle3(tmp_path, target.folder)
    assert_same(read, head)
    assert (read.shape.aux_layers, read.shape.fc_norm, read.shape.norm_output) == (head.shape.aux_layers, True, True)


@pytest.mark.parametrize("size", [None, REDUCED])
def test_dflash_survives_writing(target: TargetFolder, tmp_path: Path, size: int | None) -> None:
    head = dflash_head(target, size)
    save_dflash(head, tmp_path, "target", with_lm_head=False)
    read = load_dflash(tmp_path, target.folder)
    assert_same(read, head)
    assert (read.shape.block_size, read.shape.aux_layers) == (head.shape.block_size, head.shape.aux_layers)


@pytest.mark.parametrize("size", [None, REDUCED])
@pytest.mark.parametrize("own", [False, True])
def test_medusa_survives_writing(target: TargetFolder, tmp_path: Path, size: int | None, own: bool) -> None:
    head = medusa_head(target, size, own=own)
    save_medusa(head, tmp_path, "target", with_lm_head=False)
    read = load_medusa(tmp_path, target.folder)
    assert_same(read, head)
    assert read.shape == head.shape


def test_authors_eagle3_checkpoint_loads(target: TargetFolder, tmp_path: Path) -> None:
    head = eagle3_head(target, REDUCED)
    save_eagle3(head, tmp_path, "target", with_lm_head=True)
    config = json.loads((tmp_path / "config.json").read_text())
    own = {
        **config["transformer_layer_config"],
        "draft_vocab_size": REDUCED,
        "architectures": ["LlamaForCausalLMEagle3"],
    }
    own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"]}
    (tmp_path / "config.json").write_text(json.dumps(own))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = {name: name.replace("layers.0.", "midlayer.") for name in tensors}
    torch.save({names[name]: tensor for name, tensor in tensors.items()}, tmp_path / "pytorch_model.bin")
    head.lm_head.weight.copy_(head.lm_head.weight.bfloat16())
    assert_same(load_eagle3(tmp_path, target.folder), head)


def test_authors_dflash_checkpoint_loads(target: TargetFolder, tmp_path: Path) -> None:
    head = dflash_head(target)
    save_dflash(head, tmp_path, "target", with_lm_head=False)
    config = json.loads((tmp_path / "config.json").read_text())
    before = [layer - 1 for layer in head.shape.aux_layers]  # the authors count from the first layer's output
    own = {
        **config["transformer_layer_config"],
        "block_size": head.shape.block_size,
        "architectures": ["DFlashDraftModel"],
    }
    own["dflash_config"] = {"mask_token_id": head.shape.mask_token_id, "target_layer_ids": before}
    (tmp_path / "config.json").write_text(json.dumps(own))
    read = load_dflash(tmp_path, target.folder)
    assert_same(read, head)
    assert read.shape.aux_layers == head.shape.aux_layers


def test_authors_medusa_checkpoint_loads(target: TargetFolder, tmp_path: Path) -> None:
    head = medusa_head(target, own=True)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "target"}  # there are three
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        name.removeprefix("blocks."): value for name, value in head.state_dict().items() if name.startswith("blocks.")
    }
    tensors |= {f"{number}.1.weight": layer.state_dict()["weight"] for number, layer in enumerate(head.lm_heads)}
    assert "0.0.linear.bias" in tensors
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    state = torch.randn(5, target.hidden_size)
    assert torch.equal(load_medusa(tmp_path, target.folder)(state), head(state))


def test_sharded_target_gives_its_tensors(target: TargetFolder, tmp_path: Path) -> None:
    tensors = load_file(target.folder / "model.safetensors")
    places = {}
    for name, tensor in tensors.items():
        places[name] = f"{name}.safetensors"
        save_file({name: tensor}, tmp_path / places[name])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_text((target.folder / "config.json").read_text())
    sharded, rows = target_folder(str(tmp_path)), torch.tensor([3, 1])
    assert torch.equal(sharded.embeddings(), target.embeddings())
    assert torch.equal(sharded.output_rows(rows), tensors["lm_head.weight"][rows])


def test_tied_target_gives_its_embeddings(target: TargetFolder, tmp_path: Path) -> None:
    tensors = load_file(target.folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((target.folder / "config.json").read_text())
    rows = torch.tensor([3, 1])
    assert torch.equal(target_folder(str(tmp_path)).output_rows(rows), target.embeddings()[rows])


def changed_config(folder: Path, **entries: object) -> Path:
    """Change entries of a saved head's configuration."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    return folder


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "reads layer 9; .* has 3"),
        ({"eagle_aux_hidden_state_layer_ids": [-1]}, "must be a list of numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "names a layer twice"),
        ({"target_hidden_size": 4096}, "reads states of size 4096"),
        ({"draft_vocab_size": 7}, "d2t"),
        ({"transformer_layer_config": {"model_type": "mamba"}}, "mamba layers"),
        ({"norm_before_fc": True, "fc_norm": True}, "at most one"),
        ({"fc_norm": True}, "lacks the weights fc_norm"),
    ],
)
def test_wrong_eagle3_configuration_is_refused(
    target: TargetFolder, tmp_path: Path, entries: dict[str, object], sentence: str
) -> None:
    save_eagle3(eagle3_head(target, REDUCED), tmp_path, "target", with_lm_head=False)
    load_eagle3(tmp_path, target.folder)
    with pytest.raises(HeadRefused, match=sentence):
        load_eagle3(changed_config(tmp_path, **entries), target.folder)


SAVED: dict[HeadKind, Callable[[TargetFolder, Path], None]] = {
    "eagle3": lambda target, folder: save_eagle3(eagle3_head(target), folder, "target", with_lm_head=False),
    "dflash": lambda target, folder: save_dflash(dflash_head(target), folder, "target", with_lm_head=False),
    "medusa": lambda target, folder: save_medusa(medusa_head(target), folder, "target", with_lm_head=False),
}
LOADERS: dict[HeadKind, Callable[[Path, Path], object]] = {
    "eagle3": load_eagle3,
    "dflash": load_dflash,
    "medusa": load_medusa,
}


@pytest.mark.parametrize("given", LOADERS)
@pytest.mark.parametrize("kind", SAVED)
def test_head_given_as_another_kind_is_refused_with_the_flags_of_its_own(
    target: TargetFolder, tmp_path: Path, kind: HeadKind, given: HeadKind
) -> None:
    SAVED[kind](target, tmp_path)
    if kind == given:
        LOADERS[given](tmp_path, target.folder)
        return
    with pytest.raises(
        HeadRefused, match=f"is a head of the kind {kind}; give it as --{kind}-head, or with --head-kind {kind}$"
    ):
        LOADERS[given](tmp_path, target.folder)


@pytest.mark.parametrize("given", LOADERS)
@pytest.mark.parametrize("kind", ["peagle", "mtp", 5, ["eagle3"]])
def test_head_of_a_kind_that_is_not_served_is_refused_without_a_flag(
    target: TargetFolder, tmp_path: Path, kind: object, given: HeadKind
) -> None:
    SAVED[given](target, tmp_path)
    with pytest.raises(HeadRefused, match=r"heads of eagle3, dflash, medusa are served$") as refused:
        LOADERS[given](changed_config(tmp_path, speculators_model_type=kind), target.folder)
    assert "--" not in str(refused.value)


def test_head_of_another_size_is_refused(target: TargetFolder, tmp_path: Path) -> None:
    save_eagle3(resized(eagle3_head(target), 24), tmp_path, "target", with_lm_head=False)
    with pytest.raises(HeadRefused, match=r"states of size 24; those of .* have"):
        load_eagle3(tmp_path, target.folder)


def test_tokens_outside_the_target_are_refused(target: TargetFolder, tmp_path: Path) -> None:
    head = eagle3_head(target, REDUCED)
    head.vocabulary.d2t[-1] = target.vocab_size
    save_eagle3(head, tmp_path, "target", with_lm_head=True)
    with pytest.raises(HeadRefused, match="not among the target's"):
        load_eagle3(tmp_path, target.folder)


def test_pickled_code_is_never_run(target: TargetFolder, tmp_path: Path) -> None:
    save_eagle3(eagle3_head(target), tmp_path, "target", with_lm_head=False)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Path("a class that is no tensor")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadRefused, match="no file of tensors"):
        load_eagle3(tmp_path, target.folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\x00" * 100])
def test_damaged_weights_are_refused(target: TargetFolder, tmp_path: Path, content: bytes) -> None:
    save_medusa(medusa_head(target), tmp_path, "target", with_lm_head=False)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(HeadRefused, match="damaged"):
        load_medusa(tmp_path, target.folder)


def test_missing_folder_is_refused() -> None:
    with pytest.raises(HeadRefused, match=r"the folder \./nowhere does not exist"):
        load_dflash("./nowhere", "./nowhere")
