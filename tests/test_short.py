"""What is marked as long is left out on demand, by case; a mark of a case that is not there is seen."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = """
import sys
import pytest
from tests import conftest
options = ["-q", "-p", "no:cacheprovider", "--collect-only", "--strict-markers", "-o", "asyncio_mode=auto"]
sys.exit(pytest.main([*options, *sys.argv[1:]], plugins=[conftest]))
"""
TESTS = """
import pytest

CASES = pytest.mark.parametrize("case", ["a", "b", "c"])

def test_is_short():
    pass

@pytest.mark.long
def test_is_long():
    pass

@pytest.mark.long
@CASES
def test_is_long_in_all_cases(case):
    pass

@pytest.mark.long("b")
@CASES
def test_is_long_in_one_case(case):
    pass

@pytest.mark.long(but=("b",))
@CASES
def test_is_long_in_all_cases_but_one(case):
    pass
"""
SHORT = [
    "test_is_short",
    *(f"test_is_long_in_one_case[{case}]" for case in "ac"),
    "test_is_long_in_all_cases_but_one[b]",
]


def collected(tests: str, folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    file = folder / "test_marked.py"
    file.write_text(tests)
    command = [sys.executable, "-c", RUN, *flags, str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize(("flags", "num_tests"), [(["--short"], 4), ([], 11)], ids=["short", "all"])
def test_what_is_long_is_left_out(flags: list[str], num_tests: int, tmp_path: Path) -> None:
    ended = collected(TESTS, tmp_path, *flags)
    names = [line.partition("::")[2] for line in ended.stdout.splitlines() if "::" in line]
    assert ended.returncode == 0, ended.stderr
    assert len(names) == num_tests
    assert [name for name in names if name in SHORT] == SHORT


@pytest.mark.parametrize("mark", ['long("d")', 'long(but=("a", "d"))'])
def test_a_mark_of_no_case_is_seen(mark: str, tmp_path: Path) -> None:
    ended = collected(TESTS.replace('long("b")', mark), tmp_path, "--short")
    assert ended.returncode
    assert "test_is_long_in_one_case has no case d" in ended.stderr
