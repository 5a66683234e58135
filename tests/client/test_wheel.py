"""What an installed specdec has: generated stubs with their types, Lua scripts, the command. And pinned versions."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("specdec", "coordinator", "draft_service", "target_service")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel of a checkout in which nothing was generated yet; built apart, as the build writes stubs."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in (*PACKAGES, "protos"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*_pb2*"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run([*command, "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder], check=True)
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        yield wheel


def test_the_wheel_has_the_stubs_and_their_types(wheel: zipfile.ZipFile) -> None:
    stubs = {
        f"specdec/v1/{path.stem}_{kind}.{suffix}"
        for path in (ROOT / "protos" / "specdec" / "v1").glob("*.proto")
        for kind in ("pb2", "pb2_grpc")
        for suffix in ("py", "pyi")
    }
    assert len(stubs) == 16
    assert stubs <= set(wheel.namelist())
    assert "specdec/py.typed" in wheel.namelist()


def test_the_wheel_has_every_module_and_script(wheel: zipfile.ZipFile) -> None:
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for suffix in ("py", "lua")
        for path in (ROOT / package).rglob(f"*.{suffix}")
    }
    assert any(name.endswith(".lua") for name in sources)
    assert sources <= set(wheel.namelist())


def test_the_wheel_has_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    names = {name.split("/", 1)[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "specdec = specdec.cli:main" in wheel.read(names["entry_points.txt"]).decode()
    assert "Apache License" in wheel.read(names["licenses/LICENSE"]).decode()


def test_every_requirement_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition("==") for line in lines if not line.startswith("#")]
    assert all(version for _, _, version in pins)
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    required = [entry for group in (*groups, PROJECT["build-system"]["requires"]) for entry in group]
    assert {normal(entry) for entry in required} - {"specdec"} <= {normal(name) for name, _, _ in pins}


def normal(requirement: str) -> str:
    """Return a requirement's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~! ]", requirement)[0]).lower()
