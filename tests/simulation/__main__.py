"""Run worlds of the simulation: `python -m tests.simulation --seeds 1000`."""

import argparse
import sys
import time
from collections import Counter

from tests.simulation.faults import FAULTS, HAZARDS, SETTINGS
from tests.simulation.report import report, summary
from tests.simulation.world import Outcome, run_world


def main() -> None:
    """Run seeds; exit with 1 after the first that breaks an invariant, unless all are asked for."""
    options = _options()
    hazards = frozenset(options.hazard)
    began_s, failed, went_back = time.perf_counter(), list[Outcome](), Counter[str]()
    for seed in range(options.first, options.first + options.seeds):
        outcome = run_world(seed, hazards)
        went_back.update(outcome.went_back)
        if options.verbose or outcome.violations:
            print((summary if options.keep_going and not options.verbose else report)(outcome), flush=True)
        if outcome.violations:
            failed.append(outcome)
            if not options.keep_going:
                break
    elapsed_s = time.perf_counter() - began_s
    count = seed - options.first + 1
    print(
        f"{count} seeds from {options.first}: {len(failed)} broke an invariant; {count / elapsed_s:.1f} seeds a second"
    )
    print(
        f"of {went_back.total()} sessions of which the store lost what was shown {went_back['healed']} were healed,"
        f" {went_back['lost']} said so"
    )
    sys.exit(bool(failed))


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
    parser.add_argument("--verbose", action="store_true", help="print every world's trace")
    options = parser.parse_args()
    if options.seeds < 1 or options.first < 0:
        parser.error("--seeds needs 1 or more, and --first 0 or more")
    return options


if __name__ == "__main__":
    main()
