"""`specdec memory`: bytes are those of real files, and bounds follow from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.accounting.architecture import FAMILIES, NotUnderstood, architecture, read_config
from specdec.accounting.bounds import Setting, of_round, plain
from specdec.accounting.traffic import Stored
from tests.support.architectures import SERVED
from tests.support.command_line import run
from tests.support.hubs import MODEL, ask_hub_at, hub, unused_port

MODELS = Path(__file__).parent.parent.parent / "models"
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
SMOLLM2_BYTES = 269_030_016  # of the tensors in its file, bfloat16
MIXTRAL = {**SMOLLM2, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
COUNTED = sorted(set(SERVED) & {name.removesuffix("_text") for name in FAMILIES})


def tensor_bytes(file: Path) -> int:
    """The bytes of a safetensors file behind its header."""
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
    return file.stat().st_size - 8 - header


def stored(config: dict[str, Any], **formats: str) -> Stored:
    return Stored(architecture(config), **formats)


# ---- sizes


@pytest.mark.parametrize("name", ["target", "draft"])
def test_weights_are_those_of_the_file(name: str) -> None:
    model = stored(read_config(MODELS / name))
    assert model.weight_bytes == tensor_bytes(MODELS / name / "model.safetensors")


def test_smollm2_has_its_bytes() -> None:
    assert stored(SMOLLM2).weight_bytes == SMOLLM2_BYTES


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_of_transformers(name: str) -> None:
    config = SERVED[name]()
    models: Any = AutoModelForCausalLM  # transformers does not annotate it
    with torch.device("meta"):
        model = models.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert architecture(json.loads(config.to_json_string(use_diff=False))).num_parameters == expected


def test_most_families_are_compared() -> None:
    assert len(COUNTED) >= 10


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; .*counted are gemma"),
        ({"hidden_size": -1}, "hidden_size is -1; give a whole number of at least 1"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_attention_heads": 1000}, "more num_attention_heads than hidden_size"),
        ({"mlp_only_layers": [0]}, "some of the model's layers have experts"),
    ],
)
def test_odd_configurations_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotUnderstood, match=sentence):
        architecture(SMOLLM2 | change)


def test_missing_sizes_are_named() -> None:
    with pytest.raises(NotUnderstood, match="has no num_hidden_layers, vocab_size; add it with --set"):
        architecture({name: SMOLLM2[name] for name in SMOLLM2 if name not in ("num_hidden_layers", "vocab_size")})


# ---- what is read


def test_all_weights_are_read_once() -> None:
    """A tied embedding is the head; an untied one is read by rows."""
    tied = stored(SMOLLM2)
    read = tied.forward(num_sessions=1, num_tokens=1, context=100)
    assert read.layers + read.head == tied.weight_bytes
    assert read.embedding == 2 * 576
    untied = stored(SMOLLM2 | {"tie_word_embeddings": False})
    assert untied.weight_bytes - tied.weight_bytes == 2 * 576 * 49152
    assert untied.forward(1, 1, 100).total == read.total


def test_caches_grow_with_sessions_and_context() -> None:
    model = stored(SMOLLM2, cache="float32")
    assert model.forward(1, 1, 1000).cache == 1000 * 30 * 2 * 3 * 64 * 4
    assert model.forward(8, 5, 1000).cache == 8 * model.forward(1, 1, 1000).cache
    assert model.forward(8, 5, 1000).layers == model.forward(1, 1, 1000).layers


def test_windows_bound_the_cache() -> None:
    config = {**SMOLLM2, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 15}
    sizes = architecture(config)
    assert [sizes.cached_tokens(context) for context in (10, 1000)] == [300, 15 * (64 + 1000)]
    assert architecture(config | {"use_sliding_window": False}).cached_tokens(1000) == 30 * 1000


def test_experts_are_read_as_tokens_choose_them() -> None:
    model = stored(MIXTRAL)
    assert model.experts_read(1) == pytest.approx(2)
    assert model.experts_read(2) == pytest.approx(8 * (1 - 0.75**2))
    assert model.experts_read(1000) == pytest.approx(8)
    assert model.forward(1, 1, 1).layers < model.forward(1, 5, 1).layers < model.weight_bytes


@pytest.mark.parametrize(("form", "bits"), [("int8", 8 + 16 / 576), ("int4", 4 + 16 / 128)])
def test_quantised_matrices_carry_scales(form: str, bits: float) -> None:
    """Norms, embedding and head stay in bfloat16."""
    sizes = architecture(SMOLLM2)
    matrices = 30 * (sizes.attention + sizes.expert)
    expected = matrices * bits / 8 + 2 * (sizes.num_parameters - matrices)
    assert stored(SMOLLM2, matrices=form).weight_bytes == pytest.approx(expected)


# ---- bounds


def setting(draft: Stored | None = None, **changes: Any) -> Setting:
    values = {"bandwidth": 1e9, "num_sessions": 1, "context": 1, "num_draft_tokens": 4, "tokens_per_round": 5.0}
    return Setting(stored(SMOLLM2), draft, **(values | changes))


def test_bandwidth_over_bytes_is_the_bound() -> None:
    read = setting().target.forward(1, 1, 1).total
    assert plain(setting()).tokens_per_s == pytest.approx(1e9 / read)
    assert plain(setting(num_sessions=4)).tokens_per_s == pytest.approx(4e9 / setting().target.forward(4, 1, 1).total)


def test_drafts_as_large_as_the_target_gain_nothing() -> None:
    own = setting(stored(SMOLLM2))
    assert of_round(own).tokens_per_s == pytest.approx(plain(own).tokens_per_s, rel=1e-3)
    assert of_round(setting()).tokens_per_s == pytest.approx(5 * plain(setting()).tokens_per_s, rel=1e-3)


# ---- the command


def test_folders_are_counted() -> None:
    words = [str(MODELS / "target"), "--draft", str(MODELS / "draft"), "--bandwidth", "28", "--acceptance", "0.6"]
    outcome = run("memory", *words)
    assert "target: 20,456,832 parameters, 40,913,664 bytes of weights (bfloat16)" in outcome.out
    assert "draft: 2,622,720 parameters, 5,245,440 bytes of weights" in outcome.out
    assert "2.31 tokens per round" in outcome.out
    content = json.loads(run("memory", *words, "--json").out)
    assert content["plain"]["tokens_per_s"] == pytest.approx(28e9 / content["plain"]["total"])


def test_numbers_replace_a_configuration() -> None:
    numbers = [word for name, value in SMOLLM2.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    sizes = json.loads(run("memory", *numbers, "--bandwidth", "1", "--json").out)["target"]
    assert sizes["weight_bytes"] == SMOLLM2_BYTES
    halved = run("memory", str(MODELS / "target"), "--set", "num_hidden_layers=6", "--bandwidth", "1", "--json").out
    assert json.loads(halved)["target"]["num_parameters"] < 20_456_832


def test_hub_models_need_their_configuration_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub({"config.json": json.dumps(SMOLLM2).encode()}, broken=("model.safetensors",)) as port:
        ask_hub_at(port, tmp_path, monkeypatch)
        outcome = run("memory", MODEL, "--bandwidth", "1", "--json")
    assert json.loads(outcome.out)["target"]["weight_bytes"] == SMOLLM2_BYTES


def test_unreachable_hub_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_hub_at(unused_port(), tmp_path, monkeypatch)
    outcome = run("memory", MODEL, "--bandwidth", "1")
    assert outcome.code == 1
    assert outcome.err.startswith("specdec: no folder nobody/nothing here, and the hub did not give it:")
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name a model, or give its numbers with --set NAME=VALUE"),
        (["--bandwidth", "0"], "--bandwidth is 0; give a number in (0,"),
        (["--set", "hidden=3"], "--set is 'hidden=3'; the nearest name is hidden_size"),
        (["--set", "zzz=3"], "--set is 'zzz=3'; names are hidden_size"),
        (["--set", "hidden_size"], "--set is 'hidden_size'; give NAME=VALUE"),
        (["--dtype", "int3"], "--dtype: invalid choice: 'int3'"),
        (["--context", "0"], "--context is 0; give a whole number"),
        (["--acceptance", "2"], "--acceptance is '2'; give probabilities"),
        ([str(MODELS)], "config.json cannot be read"),
    ],
)
def test_odd_input_gets_a_sentence(words: list[str], sentence: str) -> None:
    outcome = run("memory", *([] if "--bandwidth" in words else ["--bandwidth", "1"]), *words)
    assert outcome.code == 2
    assert sentence in outcome.err
    assert len(outcome.err.splitlines()) == 1
