"""Worlds keep the invariants, repeat exactly, and find what is known to be wrong."""

import os
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.simulation.faults import HAZARDS, SETTINGS
from tests.simulation.report import how_to_repeat, report
from tests.simulation.world import Outcome, run_world

BUDGET_S = 8.0  # of real time, for as many seeds as fit
MAX_SEEDS = 500


def run_checked(seed: int, hazards: frozenset[str] = frozenset()) -> Outcome:
    """Run a world; fail with its trace, and how to run it again, if it breaks an invariant."""
    outcome = run_world(seed, hazards)
    if outcome.violations:
        pytest.fail(report(outcome), pytrace=False)
    return outcome


def test_no_world_breaks_an_invariant() -> None:
    began_s = time.monotonic()
    for seed in range(MAX_SEEDS):
        run_checked(seed)
        if time.monotonic() - began_s > BUDGET_S:
            break


@pytest.mark.parametrize("setting", [*HAZARDS, *SETTINGS])
def test_no_setting_breaks_an_invariant(setting: str) -> None:
    for seed in range(10):
        run_checked(seed, frozenset({setting}))


@pytest.mark.long
def test_rollbacks_are_healed() -> None:
    """What was shown is brought back, by the coordinator that committed it or by a client that was shown it."""
    went_back = Counter[str]()
    for seed in range(100):
        went_back.update(run_checked(seed, frozenset({"rollback"})).went_back)
    assert went_back["healed"] >= 0.9 * went_back.total() > 15, went_back


def test_same_seed_gives_the_same_trace() -> None:
    for seed in (0, 7, 19):
        first, again = run_world(seed), run_world(seed)
        assert first.trace.lines() == again.trace.lines()
        assert first.num_steps == again.num_steps


@pytest.mark.long
def test_trace_does_not_depend_on_the_process() -> None:
    """Hashes of strings, addresses and what ran before differ between processes."""
    seeds = (3, 11)
    code = f"from tests.simulation.world import run_world\nfor seed in {seeds}: print(run_world(seed).trace.digest())"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [run_world(seed).trace.digest() for seed in seeds]


def test_seeds_give_different_worlds() -> None:
    assert len({run_world(seed).trace.digest() for seed in range(5)}) == 5


def test_report_says_how_to_run_again() -> None:
    outcome = run_world(28, frozenset({"rollback"}))
    assert how_to_repeat(outcome) == ("python -m tests.simulation --first 28 --seeds 1 --verbose --hazard rollback")
    assert "goes back in time" in report(outcome)
