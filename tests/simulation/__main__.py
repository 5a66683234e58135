"""Run worlds of the simulation: `python -m tests.simulation --seeds 1000`."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from tests.simulation.faults import FAULTS, HAZARDS, SETTINGS
from tests.simulation.report import Told, told

PROGRESS = 1000  # seeds between two signs of life
CHUNK = 20  # seeds that one of several processes runs at a time


def main() -> None:
    """Run seeds; exit with 1 after the first that breaks an invariant, unless all are asked for."""
    options = _options()
    began_s, count, num_broken, went_back = time.perf_counter(), 0, 0, Counter[str]()
    for world in _all_told(options):
        count += 1
        went_back.update(world.went_back)
        num_broken += world.is_broken
        if world.text:
            print(world.text, flush=True)
        if world.is_broken and not options.keep_going:
            break
        if count % PROGRESS == 0:
            print(f"{count} seeds, {num_broken} broke an invariant", flush=True)
    elapsed_s = time.perf_counter() - began_s
    print(
        f"{count} seeds from {options.first}: {num_broken} broke an invariant; {count / elapsed_s:.1f} seeds a second"
    )
    print(
        f"of {went_back.total()} sessions of which the store lost what was shown {went_back['healed']} were healed,"
        f" {went_back['lost']} said so"
    )
    sys.exit(bool(num_broken))


def _all_told(options: argparse.Namespace) -> Iterator[Told]:
    """Run the seeds, in one process or in several; give what is told of each, in their order."""
    tell = partial(told, frozenset(options.hazard), options.verbose, options.keep_going)
    seeds = range(options.first, options.first + options.seeds)
    if options.jobs == 1:
        yield from map(tell, seeds)
        return
    executor = ProcessPoolExecutor(options.jobs, get_context("spawn"))
    try:
        yield from executor.map(tell, seeds, chunksize=CHUNK)
    finally:
        executor.shutdown(cancel_futures=True)


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
    parser.add_argument("--jobs", type=int, default=1, help="how many processes run them")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first that breaks an invariant")
    parser.add_argument("--verbose", action="store_true", help="print every world's trace")
    options = parser.parse_args()
    if min(options.seeds, options.jobs) < 1 or options.first < 0:
        parser.error("--seeds and --jobs need 1 or more, and --first 0 or more")
    return options


if __name__ == "__main__":
    main()
