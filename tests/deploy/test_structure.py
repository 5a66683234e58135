"""Who may import whom, what the pure heart may not touch, and how long a function may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("coordinator", "draft_service", "target_service")
PACKAGES = ("specdec", *SERVICES)
FILES = sorted(
    path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "v1" not in path.relative_to(ROOT).parts
)
HEART = ("acceptance", "generation", "draft_length")
MAX_FUNCTION_LINES = 40  # the disliked engines differ from the admired ones by their longest functions


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(module: ast.Module, package: str) -> set[str]:
    """The modules that a file imports, anywhere in it; relative ones with their package."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module or ''}" if node.level else node.module or ""
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(tree(path), path.relative_to(ROOT).parts[0])}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_arrows(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    allowed = {package, "specdec"}
    assert roots(path) & {*PACKAGES, "tests", "benchmarks", "models"} <= allowed


@pytest.mark.parametrize("path", [path for path in FILES if path.is_relative_to(ROOT / "coordinator")], ids=name_of)
def test_the_coordinator_names_no_tensor_library(path: Path) -> None:
    assert not roots(path) & {"torch", "transformers", "safetensors"}


def test_the_coordinator_loads_no_tensor_library_by_way_of_others() -> None:
    program = "import sys, coordinator.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "safetensors"} & set(done.stdout.split())
    assert "grpc" in done.stdout.split()


@pytest.mark.parametrize("name", HEART)
def test_the_heart_is_pure(name: str) -> None:
    path = ROOT / "coordinator" / f"{name}.py"
    assert not roots(path) & {"asyncio", "time", "datetime", "logging", "structlog", "random", "secrets", "os"}
    impure = {"specdec.serving.telemetry", "specdec.serving.server", "numpy.random"}
    assert not imports(tree(path), "coordinator") & impure
    nodes = list(ast.walk(tree(path)))
    assert not [node for node in nodes if isinstance(node, ast.AsyncFunctionDef | ast.Await)]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"print", "open", "input"}


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_function_is_long(path: Path) -> None:
    """Counted from the first statement: a command's signature is the list of its options."""
    lengths = {node.name: (node.end_lineno or 0) - node.body[0].lineno + 1 for node in functions(path)}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_the_checks_see_what_they_look_for() -> None:
    """The control: files that break the rules, in every way of importing."""
    source = "import torch.nn\nfrom coordinator import text\ndef lazily():\n    from . import live\n"
    found = imports(ast.parse(source), "draft_service")
    assert {"torch.nn", "coordinator", "coordinator.text", "draft_service."} <= found
    assert len(FILES) > 20
