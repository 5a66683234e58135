"""Which module may import which (the contracts in pyproject.toml), and what the pure modules may not use."""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("specdec", "coordinator", "draft_service", "gateway", "target_service")
PURE_MODULES = (
    "specdec/exact/acceptance",
    "coordinator/canary",
    "coordinator/generation",
    "coordinator/joint_names",
    "coordinator/merging",
    "coordinator/observing",
    "coordinator/pool/breaker",
    "coordinator/round_times",
    "coordinator/choosing/acceptance_history",
    "coordinator/choosing/chooser",
    "coordinator/choosing/comparisons",
    "coordinator/choosing/costs",
    "coordinator/choosing/estimates",
    "coordinator/choosing/exploration",
    "coordinator/choosing/plans",
    "coordinator/choosing/rest",
    "coordinator/choosing/shared_statistics",
)
LINT_IMPORTS = Path(sysconfig.get_path("scripts")) / "lint-imports"


def lint_imports(folder: Path) -> str:
    """Check the contracts of a checkout; return what the tool prints, on one line."""
    command: list[str | Path] = [LINT_IMPORTS, "--no-cache", "--no-logo"]
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return " ".join(done.stdout.split())


def test_import_contracts_hold() -> None:
    printed = lint_imports(ROOT)
    assert "5 kept, 0 broken" in printed, printed


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("draft_service/ngram.py", "from coordinator import text", "services are independent"),
        ("specdec/serving/server.py", "import target_service.scorer", "services are independent"),
        ("specdec/exact/codec.py", "from specdec.engine import kv", "serving, then engine, then exact"),
        ("specdec/client.py", "import specdec.exact.values", "serving, then engine, then exact"),
        ("specdec/messages.py", "def lazily():\n    from specdec.serving import settings", "serving, then engine"),
        ("specdec/brand_new.py", "", "serving, then engine, then exact"),
        ("coordinator/text.py", "import torch.nn", "without torch"),
        ("coordinator/text.py", "from specdec.exact import sampling", "without torch"),
        ("gateway/app.py", "import torch", "without torch"),
        ("gateway/app.py", "from coordinator import text", "services are independent"),
        ("specdec/terminal.py", "import numpy as np", "nothing but grpc and protobuf"),
        ("specdec/serving/telemetry.py", "from specdec.serving import server", "no import circles"),
    ],
)
def test_broken_contract_is_seen(checkout: Path, module: str, statement: str, contract: str) -> None:
    path = checkout / module
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{statement}\n")
    try:
        printed = lint_imports(checkout)
    finally:
        path.unlink() if before is None else path.write_text(before)
    assert "0 broken" not in printed
    assert contract in printed.split("Broken contracts")[1], printed


@pytest.mark.parametrize("service", ["coordinator", "gateway"])
def test_services_without_models_load_no_tensor_library(service: str) -> None:
    program = f"import sys, {service}.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "safetensors"} & set(done.stdout.split())
    assert "grpc" in done.stdout.split()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(module: ast.Module) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("name", PURE_MODULES)
def test_pure_modules_have_no_effects(name: str) -> None:
    path = ROOT / f"{name}.py"
    found = imports(tree(path))
    impure = {"asyncio", "time", "datetime", "logging", "structlog", "random", "secrets", "os"}
    assert not {module.split(".")[0] for module in found} & impure
    assert not found & {"specdec.serving.telemetry", "specdec.serving.server", "numpy.random"}
    nodes = list(ast.walk(tree(path)))
    assert not [node for node in nodes if isinstance(node, ast.AsyncFunctionDef | ast.Await)]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"print", "open", "input"}
