"""A model is served exactly or refused with one sentence."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.engine import CacheFull, Feed, LanguageModel, ModelRefused, load_language_model
from specdec.engine import load as engine_load
from specdec.engine.attention import AttentionOptions, PoolOptions
from specdec.engine.decoder import DecoderOutput, PackedRow
from specdec.engine.fused import FusedDecoder
from specdec.engine.graphs import Repeater
from specdec.engine.paged import PagedBackend
from specdec.engine.pretrained import choose_dtype, looks_like_path
from specdec.engine.sdpa import Part, SdpaBackend
from specdec.engine.varlen import FLASH_PAGE_TOKENS
from tests.engine.scenarios import check_tree_rounds
from tests.engine.tiny_models import FUSED, KV_CACHE_BYTES, ReferenceModel, assert_close, load
from tests.support import architectures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architectures.build("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(folder: Path) -> LanguageModel:
    return load(folder)


def test_model_facts_match_its_configuration(model: LanguageModel) -> None:
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (3, 48, architectures.VOCAB_SIZE)
    assert (model.context_length, model.num_token_ids) == (architectures.CONTEXT_LENGTH, architectures.VOCAB_SIZE)


@pytest.mark.parametrize("name", FUSED)
def test_wrong_fused_forward_is_not_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = architectures.build(name, tmp_path)
    run = FusedDecoder.__call__

    def turned_too_far(self: FusedDecoder, row: PackedRow) -> DecoderOutput:
        assert isinstance(row.positions, list)
        return run(self, replace(row, positions=[at + (at > 9) for at in row.positions]))

    monkeypatch.setattr(FusedDecoder, "__call__", turned_too_far)
    model = load(folder)
    assert not isinstance(model.decoder, FusedDecoder)
    check_tree_rounds(model, ReferenceModel(folder))
    (record,) = [record for record in caplog.records if record.getMessage() == "fused_forward_refused"]
    assert (record.name, record.levelno) == ("specdec.engine.load", logging.WARNING)
    assert (record.__dict__["error"], record.exc_info) == ("ModelRefused", None)


@pytest.mark.parametrize("name", architectures.REFUSED)
def test_other_architectures_are_refused(name: str, tmp_path: Path) -> None:
    reason = "rolled back" if name in architectures.RECURRENT else "attention interface"
    with pytest.raises(ModelRefused, match=rf"{reason}.*; choose (one|a model)"):
        load(architectures.build(name, tmp_path))


@pytest.mark.parametrize("damage", [b"", b"version https://git-lfs.github.com/spec/v1\n", None])
def test_damaged_weights_are_refused(damage: bytes | None, tmp_path: Path) -> None:
    """An empty file, a Git LFS pointer, and half of a download."""
    file = architectures.build("llama", tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    sentence = (
        rf"weights file model.safetensors in the model folder {tmp_path} is damaged \(.*\); download or copy it again"
    )
    with pytest.raises(ModelRefused, match=sentence):
        load(tmp_path)


class TestSelfCheck:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_missing_mask_is_refused(self, folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Part, "mask", lambda *arguments: None)
        with pytest.raises(ModelRefused, match="other logits"):
            load(folder, dtype=dtype, new_backend=SdpaBackend)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_slightly_wrong_scaling_is_refused(self, folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def scaled(scaling: float, *others: object) -> AttentionOptions:
            return AttentionOptions(scaling * 1.01, *others)  # type: ignore[arg-type]

        monkeypatch.setattr("specdec.engine.fused.AttentionOptions", scaled)
        monkeypatch.setattr("specdec.engine.attention.AttentionOptions", scaled)
        with pytest.raises(ModelRefused, match="other logits"):
            load(folder, dtype=dtype)

    def test_self_check_can_be_skipped(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Part, "mask", lambda *arguments: None)
        assert load(folder, self_check=False, new_backend=SdpaBackend).num_layers == 3

    def test_self_check_leaves_the_cache_empty(self, model: LanguageModel) -> None:
        assert (model.cache.usage, model.cache.sequences) == (0.0, [])


class TestRefusals:
    def test_missing_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelRefused, match="does not exist; give"):
            load(tmp_path / "absent")

    def test_pickled_weights_are_refused(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        torch.save({}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelRefused, match=r"no \*\.safetensors file.*convert"):
            load(tmp_path)

    def test_unrelated_safetensors_are_refused(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        reference = AutoModelForCausalLM.from_pretrained(folder)
        torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        with pytest.raises(ModelRefused, match="cannot be loaded"):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("auto_map", {"AutoModelForCausalLM": "own_code.Model"}, "its own code"),
            ("quantization_config", {"quant_method": "gptq", "bits": 4}, "quantised"),
            ("is_encoder_decoder", True, "encoder-decoder"),
            ("model_type", "no_such_model", "configuration"),
        ],
    )
    def test_unsupported_config_is_refused(
        self, folder: Path, tmp_path: Path, key: str, value: object, message: str
    ) -> None:
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelRefused, match=message):
            load(tmp_path)

    def test_unreachable_hub_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelRefused, match=r"nobody/nothing .no folder here, so taken as a hub id. cannot be read"):
            load_language_model("nobody/nothing", device="cpu", kv_cache_bytes=KV_CACHE_BYTES)

    @pytest.mark.parametrize(("key", "value"), [("device", "tpu"), ("dtype", "int3")])
    def test_unknown_device_or_dtype_is_refused(self, folder: Path, key: str, value: str) -> None:
        with pytest.raises(ModelRefused, match="is unknown; use"):
            load(folder, **{key: value})

    def test_cache_smaller_than_a_block_is_refused(self, folder: Path) -> None:
        with pytest.raises(CacheFull, match="holds not one block"):
            load(folder, kv_cache_bytes=100)


@pytest.mark.parametrize(
    ("word", "width", "has_bfloat16", "chosen"),
    [
        ("auto", 256, True, torch.bfloat16),
        ("auto", 128, True, torch.float32),
        ("auto", 256, False, torch.float32),
        ("bfloat16", 128, False, torch.bfloat16),
        ("float32", 256, True, torch.float32),
    ],
)
def test_auto_dtype_is_the_faster_one(
    word: str, width: int, has_bfloat16: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bfloat16})
    assert choose_dtype(word, torch.device("cpu"), width) is chosen


def test_paths_and_hub_ids_are_distinguished(tmp_path: Path) -> None:
    paths = ["./a", "../a/b", "/a", "~/a", "a/b/c", str(tmp_path)]
    assert all(looks_like_path(path) for path in paths)
    assert not any(looks_like_path(hub_id) for hub_id in ("gpt2", "org/name-of-no-folder"))


class TestGpus:
    """What a GPU gets, as far as it can be said without one."""

    def test_cache_has_pages_that_torchs_function_takes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specdec.engine.load.PagedBackend", lambda shapes, options: ("pages", options.block_tokens))
        gpu = torch.device("cuda")
        assert engine_load._block_tokens(gpu) == FLASH_PAGE_TOKENS
        options = PoolOptions(1 << 20, FLASH_PAGE_TOKENS, torch.bfloat16, gpu)
        assert engine_load._backend([], options) == ("pages", FLASH_PAGE_TOKENS)  # type: ignore[comparison-overlap]
        assert engine_load._block_tokens(torch.device("cpu")) == engine_load.BLOCK_TOKENS

    def test_forwards_are_recorded(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specdec.engine.load.CudaRecorder", Repeater)
        model = load(folder, new_backend=PagedBackend)
        assert engine_load._recorded(model).graphs is None  # it is on the CPU
        model.device = torch.device("cuda")
        graphs = engine_load._recorded(model).graphs
        assert graphs is not None
        rows = model.forward([Feed(model.cache.open("a"), [1, 2, 3], 3)]).logits
        assert_close(rows, ReferenceModel(folder).logits([1, 2, 3]))
        assert len(graphs.buckets) == 1
        with model.called():
            assert model.graphs is None
        assert model.graphs is graphs
