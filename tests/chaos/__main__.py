"""Run the service as real processes with faults: `python -m tests.chaos --sessions 1000 --faults 300 --seed 1`."""

import argparse
import asyncio
import sys

from tests.chaos.faults import KINDS, kinds_of
from tests.chaos.mistakes import OF_CLIENTS, OF_PROCESSES
from tests.chaos.processes import nursery
from tests.chaos.report import how_to_repeat, report
from tests.chaos.run import AT_ONCE, Plan, Result, run
from tests.chaos.service import Size


def main() -> None:
    """Run; exit with 1 if anything was wrong."""
    flags = _flags()
    size = Size(is_durable=flags.sentinels)
    plan = Plan(
        flags.sessions, flags.faults, flags.seed, flags.at_once, size, only=tuple(flags.only), mistake=flags.mistake
    )
    print(f"chaos: {how_to_repeat(plan)}", flush=True)
    result = asyncio.run(_run(plan))
    print(report(result), flush=True)
    sys.exit(bool(result.violations))


async def _run(plan: Plan) -> Result:
    async with nursery() as forks:
        return await run(plan, forks)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    add = parser.add_argument
    add("--sessions", type=int, default=200, help="how many (default: %(default)s)")
    add("--faults", type=int, default=60, help="how many (default: %(default)s)")
    add("--seed", type=int, default=1, help="decides what goes wrong, and where (default: %(default)s)")
    add("--at-once", type=int, default=AT_ONCE, help="sessions at once (default: %(default)s)")
    add("--sentinels", action="store_true", help="a Redis with replicas, watched by Sentinels, in durable mode")
    add("--only", action="append", default=[], choices=list(KINDS), help="a kind of fault; all others are left out")
    add("--mistake", default="", choices=[*OF_PROCESSES, *OF_CLIENTS], help="plant a mistake, which must be found")
    flags = parser.parse_args()
    if flags.sessions < 1 or flags.faults < 0 or flags.at_once < 1:
        parser.error("--sessions and --at-once need 1 or more, --faults 0 or more")
    if not kinds_of(is_durable=flags.sentinels, only=flags.only):
        parser.error("--only names no fault of this store; --sentinels decides which there are")
    return flags


if __name__ == "__main__":
    main()
