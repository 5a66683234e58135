"""Run worlds of the simulation: `python -m tests.simulation --seeds 1000`."""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from tests.simulation.faults import FAULTS, HAZARDS, SETTINGS
from tests.simulation.report import report, summary
from tests.simulation.world import Outcome, run_world

CHUNK = 8  # worlds that a process takes at once


def main() -> None:
    """Run seeds; exit with 1 after the first that breaks an invariant, unless all are asked for."""
    options = _options()
    hazards = frozenset(options.hazard)
    began_s, failed, went_back = time.perf_counter(), list[Outcome](), Counter[str]()
    num_worlds = 0
    for outcome in _outcomes(options, hazards):
        num_worlds += 1
        went_back.update(outcome.went_back)
        if options.verbose or outcome.violations:
            print((summary if options.keep_going and not options.verbose else report)(outcome), flush=True)
        if outcome.violations:
            failed.append(outcome)
            if not options.keep_going:
                break
    elapsed_s = time.perf_counter() - began_s
    print(
        f"{num_worlds} seeds from {options.first}: {len(failed)} broke an invariant;"
        f" {num_worlds / elapsed_s:.1f} seeds a second"
    )
    print(
        f"of {went_back.total()} sessions of which the store lost what was shown {went_back['healed']} were healed,"
        f" {went_back['lost']} said so"
    )
    sys.exit(bool(failed))


def _outcomes(options: argparse.Namespace, hazards: frozenset[str]) -> Iterator[Outcome]:
    """Run the worlds on several processes; yield what became of them in the order of their seeds."""
    seeds = range(options.first, options.first + options.seeds)
    run = partial(run_world, hazards=hazards)
    jobs = min(options.jobs, len(seeds) // CHUNK)
    if jobs <= 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(run, seeds, chunksize=CHUNK)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument(
        "--hazard",
        action="append",
        default=[],
        choices=[*FAULTS, *HAZARDS, *SETTINGS],
        help="every world has this; repeatable",
    )
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first that breaks an invariant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that run worlds")
    parser.add_argument("--verbose", action="store_true", help="print every world's trace")
    options = parser.parse_args()
    if options.seeds < 1 or options.first < 0 or options.jobs < 1:
        parser.error("--seeds and --jobs need 1 or more, and --first 0 or more")
    return options


if __name__ == "__main__":
    main()
