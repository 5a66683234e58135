"""The wheel and the sdist: their contents, pinned versions, and that it works with only its declared dependencies.

The bare installation is a virtual environment with the wheel and the distributions that its metadata require, copied
from this environment: what `pip install specdec` puts there, without a network.
"""

import asyncio
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from specdec import AsyncClient
from tests.engine.kernel import needs_kernel
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import cluster, save_tokenizer

ROOT = Path(__file__).parents[2]
PACKAGES = ("specdec", "coordinator", "draft_service", "gateway", "target_service")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of a checkout without generated stubs; in a copy, because the build writes them.

    The kernels are not optimised, which takes a slow machine that is busy with other tests minutes.
    """
    folder = copy_sources(tmp_path_factory.mktemp("wheel"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "CFLAGS": "-O0"})
    [path] = folder.glob("*.whl")
    return path


def copy_sources(folder: Path) -> Path:
    """Copy what a build reads, without what it makes."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in (*PACKAGES, "protos"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*_pb2*", "*.so"))
    return folder


@pytest.fixture
def wheel(wheel_path: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheel_path) as wheel:
        yield wheel


def test_wheel_has_the_stubs_and_their_types(wheel: zipfile.ZipFile) -> None:
    stubs = {
        f"specdec/v1/{path.stem}_{kind}.{suffix}"
        for path in (ROOT / "protos" / "specdec" / "v1").glob("*.proto")
        for kind in ("pb2", "pb2_grpc")
        for suffix in ("py", "pyi")
    }
    assert len(stubs) == 20
    assert stubs <= set(wheel.namelist())
    assert "specdec/py.typed" in wheel.namelist()


def test_wheel_has_the_page(wheel: zipfile.ZipFile) -> None:
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gateway" / "page").iterdir()}
    assert "gateway/page/index.html" in page
    assert page <= set(wheel.namelist())


def test_wheel_has_every_module_and_script(wheel: zipfile.ZipFile) -> None:
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for suffix in ("py", "lua")
        for path in (ROOT / package).rglob(f"*.{suffix}")
    }
    assert any(name.endswith(".lua") for name in sources)
    assert sources <= set(wheel.namelist())


def test_wheel_has_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    names = {name.split("/", 1)[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "specdec = specdec.__main__:main" in wheel.read(names["entry_points.txt"]).decode()
    assert "Apache License" in wheel.read(names["licenses/LICENSE"]).decode()


@needs_kernel
def test_wheel_has_the_compiled_kernels_alone(wheel: zipfile.ZipFile) -> None:
    kernel = f"specdec/engine/_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert kernel in wheel.namelist()
    assert not [name for name in wheel.namelist() if name.endswith((".c", ".h"))]


def test_sdist_has_what_the_kernels_are_compiled_from(tmp_path: Path) -> None:
    folder = copy_sources(tmp_path)
    subprocess.run([sys.executable, "setup.py", "--quiet", "sdist"], check=True, cwd=folder)
    [path] = folder.glob("dist/*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "specdec/engine").glob("*.[ch]")}
    assert len(sources) == 19
    assert {*sources, "protos/specdec/v1/types.proto", "setup.py"} <= names


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


# ---- the bare installation


@dataclass(frozen=True)
class Installation:
    """A virtual environment with specdec and its requirements; `distributions` are their names."""

    python: Path
    distributions: frozenset[str]

    async def run(self, *words: str, **variables: str) -> str:
        """Run its interpreter, isolated from this environment; return what it prints."""
        process = await asyncio.create_subprocess_exec(
            *(str(self.python), "-I", *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.defpath, **variables},
            cwd=self.python.parent,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return out.decode()


@pytest.fixture(scope="module")
def bare(wheel_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel_path) as wheel:
        wheel.extractall(packages)
    [metadata] = packages.glob("specdec-*.dist-info")
    names = required_by(importlib.metadata.Distribution.at(metadata))
    for name in names:
        copy_distribution(importlib.metadata.distribution(name), packages)
    return Installation(folder / "bin" / "python", frozenset(names))


def required_by(distribution: importlib.metadata.Distribution) -> set[str]:
    """Return the names of all distributions that one requires without extras, transitively."""
    names: set[str] = set()
    waiting = [distribution]
    while waiting:
        for text in waiting.pop().requires or ():
            requirement = Requirement(text)
            name = normal(requirement.name)
            if name not in names and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                names.add(name)
                waiting.append(importlib.metadata.distribution(name))
    return names


def copy_distribution(distribution: importlib.metadata.Distribution, folder: Path) -> None:
    for file in distribution.files or ():
        if file.parts[0] not in ("..", "/") and file.suffix != ".pyc":
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), target)


LOADED = """
import sys
import specdec.cli
specdec.Client, specdec.AsyncClient
print(*{name.split(".")[0] for name, module in sys.modules.items() if getattr(module, "__file__", None)})
"""


def test_bare_wheel_requires_grpc_and_protobuf(bare: Installation) -> None:
    # grpcio requires typing-extensions
    assert bare.distributions == {"grpcio", "protobuf", "googleapis-common-protos", "typing-extensions"}


async def test_import_loads_only_declared_dependencies(bare: Installation) -> None:
    loaded = set((await bare.run("-c", LOADED)).split())
    assert loaded - sys.stdlib_module_names <= {"specdec", "grpc", "google", "typing_extensions"}
    assert {"specdec", "grpc", "google"} <= loaded


def test_import_loads_no_extras() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {
        "numpy",
        "torch",
        "pydantic",
        "redis",
        "structlog",
        "prometheus_client",
        "rich",
        "typer",
        "tokenizers",
        "starlette",
    }
    assert not heavy & set(done.stdout.split())


async def test_up_names_the_extras(bare: Installation) -> None:
    for words in (["up", "--help"], ["up", "--target", "x"]):
        with pytest.raises(AssertionError) as failed:
            await bare.run("-m", "specdec.cli", *words)
        sentence = str(failed.value).splitlines()[0]
        assert re.match(
            r"specdec: `specdec up` runs the services, and \w+ is not installed; "
            r"run: pip install 'specdec\[server,embedded,models\]'$",
            sentence,
        ), sentence


@pytest.mark.parametrize("module", ["coordinator", "target_service", "draft_service", "gateway"])
async def test_services_name_their_extras(bare: Installation, module: str) -> None:
    with pytest.raises(AssertionError) as failed:
        await bare.run("-m", module, "--help")
    sentence = str(failed.value).splitlines()[0]
    assert re.match(
        rf"{module}: the package of the module \w+ is not installed; run: pip install 'specdec\[\w+", sentence
    ), sentence


SYNC = """
import sys, specdec
with specdec.Client(sys.argv[1]) as client:
    with client.generate("t5 t6", temperature=0, max_new_tokens=8) as stream:
        text = "".join(chunk.text for chunk in stream)
    assert text == client.complete("t5 t6", temperature=0, max_new_tokens=8).text
    print(text)
"""
ASYNC = """
import asyncio, sys, specdec
async def main():
    async with specdec.AsyncClient(sys.argv[1]) as client:
        async with client.generate("t5 t6", temperature=0, max_new_tokens=8) as stream:
            print("".join([chunk.text async for chunk in stream]))
asyncio.run(main())
"""


async def test_bare_installation_generates(bare: Installation, tmp_path: Path) -> None:
    model = save_tokenizer(build("llama", tmp_path), VOCAB_SIZE)
    async with cluster(model) as running:
        texts = [await bare.run("-c", program, running.address) for program in (SYNC, ASYNC)]
        flags = ["--temperature", "0", "--max-new-tokens", "8"]
        printed = await bare.run("-m", "specdec.cli", "generate", "t5 t6", *flags, SPECDEC_ADDRESS=running.address)
        async with AsyncClient(running.address) as client:
            expected = (await client.complete("t5 t6", temperature=0, max_new_tokens=8)).text
    assert expected
    assert texts == [f"{expected}\n"] * 2
    assert printed == expected + ("" if expected.endswith("\n") else "\n")
