"""The registry finds every module of drafters, and the worker's settings include theirs."""

import sys
from pathlib import Path

import pytest

from draft_service import drafters
from draft_service.registry import registered
from draft_service.settings import chosen_kinds, settings_for

NEW_DRAFTER = """
from pydantic import BaseModel, Field
from draft_service.drafter import DrafterKind

class EchoSettings(BaseModel):
    echo_length: int = Field(3, ge=1, description="tokens to echo")

async def build(settings, server, stack):
    raise ValueError(f"echoes {settings.echo_length}")

KIND = DrafterKind("echo", EchoSettings, build)
"""


@pytest.fixture
def with_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add one file to the folder of drafters."""
    (tmp_path / "echo.py").write_text(NEW_DRAFTER)
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "draft_service.drafters.echo", raising=False)


@pytest.mark.usefixtures("with_new_file")
def test_one_file_adds_a_drafter() -> None:
    kinds = registered()
    assert {"echo", "model", "ngram", "recycle", "suffix"} <= kinds.keys()
    settings = settings_for(kinds).model_validate({"drafters": "echo,ngram", "echo_length": 5})
    assert [kind.name for kind in chosen_kinds(settings, kinds)] == ["echo", "ngram"]


@pytest.mark.usefixtures("with_new_file")
async def test_a_drafter_sees_its_settings() -> None:
    kinds = registered()
    settings = settings_for(kinds).model_validate({"drafters": "echo", "echo_length": 5})
    with pytest.raises(ValueError, match="echoes 5"):
        await kinds["echo"].build(settings, None, None)  # type: ignore[arg-type]  # it raises before it uses them


def test_unknown_drafters_are_named() -> None:
    kinds = registered()
    with pytest.raises(ValueError, match="'oracle'; there are: dflash, eagle3, medusa, model, ngram"):
        chosen_kinds(settings_for(kinds)(drafters="ngram,oracle"), kinds)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"medusa_head": "m"}, "--medusa-head needs --head-target"),
        ({"drafters": "dflash", "head_target": "t"}, "--dflash-head is missing"),
    ],
)
def test_half_a_head_does_not_start(settings: dict[str, str], sentence: str) -> None:
    kinds = registered()
    with pytest.raises(ValueError, match=sentence):
        chosen_kinds(settings_for(kinds).model_validate(settings), kinds)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["recycle", "ngram", "suffix"]),
        ({"model": "models/draft"}, ["model", "recycle", "ngram", "suffix"]),
        ({"model": "models/draft", "drafters": "ngram"}, ["ngram"]),
        ({"eagle3_head": "e", "head_target": "t"}, ["eagle3", "recycle", "ngram", "suffix"]),
    ],
)
def test_a_model_is_the_default_where_there_is_one(settings: dict[str, str], names: list[str]) -> None:
    kinds = registered()
    assert [kind.name for kind in chosen_kinds(settings_for(kinds).model_validate(settings), kinds)] == names
