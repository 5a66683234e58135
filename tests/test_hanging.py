"""A test that outlasts its timeout ends its process instead of holding up all others, and says where it was."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = """
import sys
import pytest
from tests import conftest
conftest.HANGS_AFTER_S = 1.0
options = ["-q", "-p", "no:cacheprovider", "-o", "timeout=1", "-o", "asyncio_mode=auto"]
sys.exit(pytest.main([*options, sys.argv[1]], plugins=[conftest]))
"""
HANGING = {
    "a fixture at its end, after a failure": """
import time
import pytest

@pytest.fixture
def slow():
    yield
    time.sleep(100)

def test_fails(slow):
    assert False
""",
    "a loop's fixture": """
import asyncio
import pytest_asyncio

@pytest_asyncio.fixture
async def slow():
    yield
    await asyncio.sleep(100)

async def test_fails(slow):
    assert False
""",
    "a timeout that was swallowed": """
import time

def test_swallows():
    try:
        time.sleep(100)
    except BaseException:
        time.sleep(100)
""",
}


@pytest.mark.parametrize("name", HANGING)
def test_what_hangs_is_ended(name: str, tmp_path: Path) -> None:
    file = tmp_path / "test_hangs.py"
    file.write_text(HANGING[name])
    command = [sys.executable, "-c", RUN, str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode
    assert "test_hangs.py::test_" in ended.stderr, ended.stderr
    assert "hangs: not over after" in ended.stderr
    assert f'File "{file}", line' in ended.stderr
