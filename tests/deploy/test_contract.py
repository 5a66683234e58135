"""The protos keep to buf's rules, and do not change in a way that breaks compiled clients.

`protos/baseline.binpb` is the published contract. A change that is meant to break is recorded by
`buf build --output protos/baseline.binpb`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUF = str(Path(sys.executable).with_name("buf"))


def run_buf(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run buf in a folder that has a buf.yaml."""
    return subprocess.run([BUF, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def breaking(folder: Path) -> subprocess.CompletedProcess[str]:
    """Compare a folder's protos with the baseline."""
    return run_buf("breaking", "--against", str(ROOT / "protos" / "baseline.binpb"), folder=folder)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the protos and buf's configuration."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def test_protos_follow_the_rules() -> None:
    """STANDARD and COMMENTS: names, packages, a comment on every field."""
    result = run_buf("lint", folder=ROOT)
    assert result.returncode == 0, result.stdout


def test_protos_break_no_client() -> None:
    """FILE: nothing is renamed, renumbered, retyped or removed."""
    result = breaking(ROOT)
    assert result.returncode == 0, result.stdout


BREAKING = {
    "a number": ("generation.proto", "uint32 max_draft_tokens = 4;", "uint32 max_draft_tokens = 12;"),
    "a type": ("generation.proto", "uint32 max_draft_tokens = 4;", "uint64 max_draft_tokens = 4;"),
    "a name": ("generation.proto", "uint32 max_draft_tokens = 4;", "uint32 draft_limit = 4;"),
    "presence": ("types.proto", "optional float temperature = 1;", "float temperature = 1;"),
    "an enum value": ("generation.proto", "TOKEN_ORIGIN_BONUS = 3;", "TOKEN_ORIGIN_BONUS = 4;"),
    "a stream": ("generation.proto", "returns (stream GenerateResponse)", "returns (GenerateResponse)"),
    "a removed field": ("draft.proto", "  uint32 cached_len = 3;\n", ""),
}
UNRULY = {
    "a comment is missing": ("types.proto", "  // Transformer layers; 0 where there is no model.\n", ""),
    "a name in capitals": ("draft.proto", "uint32 cached_len", "uint32 cachedLen"),
    "an enum without a prefix": ("types.proto", "ACCEPTANCE_RULE_BLOCK", "BLOCK"),
}


def change(checkout: Path, name: str, old: str, new: str) -> None:
    """Replace one piece of a proto."""
    file = checkout / "protos" / "specdec" / "v1" / name
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize("edit", BREAKING.values(), ids=BREAKING)
def test_breaking_changes_are_found(checkout: Path, edit: tuple[str, str, str]) -> None:
    """The control of the comparison with the baseline."""
    change(checkout, *edit)
    assert breaking(checkout).returncode != 0


@pytest.mark.parametrize("edit", UNRULY.values(), ids=UNRULY)
def test_unruly_protos_are_found(checkout: Path, edit: tuple[str, str, str]) -> None:
    """The control of the rules."""
    change(checkout, *edit)
    assert run_buf("lint", folder=checkout).returncode != 0
