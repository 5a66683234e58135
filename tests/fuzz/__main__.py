"""Send hostile messages to every service: `python -m tests.fuzz --messages 20000 --seed 1`."""

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path

import structlog

from tests.fuzz.leavers import leave_often
from tests.fuzz.phases import PHASES
from tests.fuzz.services import running_services

LEAVERS = "leavers"
MAX_LEAVING = 2000  # clients: each is a whole session


def main() -> None:
    """Run the phases; exit with 1 if anything was wrong."""
    options = _options()
    # of the services that run in this process: a phase's report says what matters
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="specdec-fuzz-") as folder:
        sys.exit(asyncio.run(_run(Path(folder), options)))


async def _run(folder: Path, options: argparse.Namespace) -> int:
    num_wrong, names = 0, options.phase or [*PHASES, LEAVERS]
    if LEAVERS in names:
        report = await leave_often(folder, min(options.messages, MAX_LEAVING), options.seed)
        print(*report.lines(), sep="\n", flush=True)
        num_wrong += len(report.wrong)
    if names == [LEAVERS]:
        return int(num_wrong > 0)
    async with running_services(folder, options.seed) as services:
        for name in (name for name in PHASES if name in names):
            report = await PHASES[name](services, options.messages, options.seed)
            print(*report.lines(), sep="\n", flush=True)
            num_wrong += len(report.wrong) + len(report.late)
            if services.crashed():
                break
    return int(num_wrong > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=2000, help="how many in each phase")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations; timing differs from run to run")
    parser.add_argument("--phase", action="append", choices=[*PHASES, LEAVERS], help="only this one; repeatable")
    options = parser.parse_args()
    if options.messages < 1:
        parser.error("--messages needs 1 or more")
    return options


if __name__ == "__main__":
    main()
