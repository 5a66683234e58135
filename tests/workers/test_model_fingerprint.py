"""Model fingerprints: equal for copies, different for any byte, number type or tokenizer that differs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.serving import model_fingerprint as module
from specdec.serving.model_fingerprint import model_fingerprint, weight_files
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer

NUMBERS = {"dtype": "torch.float32", "quantisation": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(build("llama", tmp_path_factory.mktemp("model")), VOCAB_SIZE)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "elsewhere" / "copy"))


def flip_byte(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def edit(file: Path, **values: object) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | values))


def test_copies_have_the_same_fingerprint(folder: Path, copy: Path) -> None:
    assert model_fingerprint(folder, NUMBERS) == model_fingerprint(copy, NUMBERS)


def test_the_saving_program_does_not_matter(folder: Path, copy: Path) -> None:
    edit(copy / "config.json", _name_or_path="/other", transformers_version="9")
    assert model_fingerprint(folder, NUMBERS) == model_fingerprint(copy, NUMBERS)


CHANGES: dict[str, Callable[[Path], None]] = {
    "first weight": lambda copy: flip_byte(copy / "model.safetensors", 20_000),
    "last byte": lambda copy: flip_byte(copy / "model.safetensors", -1),
    "configuration": lambda copy: edit(copy / "config.json", rms_norm_eps=0.5),
    "tokenizer": lambda copy: edit(copy / "tokenizer.json", normalizer={"type": "Lowercase"}),
    "end tokens": lambda copy: edit(copy / "generation_config.json", eos_token_id=[1, 2]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_difference_changes_the_fingerprint(folder: Path, copy: Path, name: str) -> None:
    CHANGES[name](copy)
    assert model_fingerprint(folder, NUMBERS) != model_fingerprint(copy, NUMBERS)


@pytest.mark.parametrize("numbers", [{"dtype": "torch.bfloat16"}, {"quantisation": "int8"}])
def test_number_type_and_quantisation_change_the_fingerprint(folder: Path, numbers: dict[str, str]) -> None:
    assert model_fingerprint(folder, NUMBERS) != model_fingerprint(folder, NUMBERS | numbers)


def test_chunks_count_in_their_order(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4096
    monkeypatch.setattr(module, "CHUNK_BYTES", size)
    before = model_fingerprint(copy, NUMBERS)
    (file,) = weight_files(copy)
    content = file.read_bytes()
    file.write_bytes(content[size : 2 * size] + content[:size] + content[2 * size :])
    assert model_fingerprint(copy, NUMBERS) != before


def test_files_absent_from_the_index_are_ignored(copy: Path) -> None:
    edit(copy / module.INDEX_FILE, weight_map={"a": "model.safetensors"})
    (copy / "consolidated.safetensors").write_bytes(b"other")
    assert weight_files(copy) == [copy / "model.safetensors"]
