"""How long clients wait when a part is lost or hangs: one fault at a time, under streams that never end.

python -m tests.chaos.gaps --times 20
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGKILL
from statistics import median

from coordinator.healing import SETTLED_S
from specdec.types import SamplingParams, SpeculationParams
from tests.chaos.clients import Behaviour, Clients
from tests.chaos.faults import Fault, Faults
from tests.chaos.ledger import Ledger, Session, Text
from tests.chaos.models import save_models
from tests.chaos.processes import nursery
from tests.chaos.report import gaps_s
from tests.chaos.service import Models, Service, Size, running_service

NUM_STREAMS = 6
NUM_TOKENS = 400
QUIET_S = 2.0  # between two faults; after one of the store also until it has settled: new sessions wait for that
HANG_S = 8.0  # longer than any limit
# the limit of a client's wait in seconds, and how long the fault lasts; a process that is killed is away for a quarter
LIMITS_S = {
    "draft killed": (1.0, 2.0),
    "draft stopped": (1.0, HANG_S),
    "target killed": (2.0, 2.0),
    "target stopped": (2.0, HANG_S),
    "coordinator killed": (3.0, 2.0),
    "coordinator stopped": (3.0, HANG_S),
    "store killed": (5.0, 2.0),
    "store stopped": (5.0, 1.0),
}
RETURNS, RETURN_LIMIT_S = "only target returns", 5.0
TEXT = Text(
    (1, 2, 3),
    SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True),
    SpeculationParams(num_draft_tokens=2, drafter="model"),
)


@asynccontextmanager
async def streaming(service: Service, ledger: Ledger) -> AsyncIterator[None]:
    """Keep streams running, each at a coordinator of its own choice."""
    clients = Clients(service, ledger)

    async def stream(number: int) -> None:
        for count in range(1 << 30):
            session = Session(f"stream {number} {count}", TEXT)
            await clients.follow(session, Behaviour(number, None, 0.0, None, cancels=False))

    running = [asyncio.create_task(stream(number)) for number in range(NUM_STREAMS)]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await clients.close()


async def waits_s(service: Service, kind: str, times: int, chance: random.Random) -> tuple[list[list[float]], int]:
    """Make a fault so many times; return how long each client waited, fault by fault, and how many were refused."""
    ledger, waits = Ledger(), list[list[float]]()
    async with streaming(service, ledger):
        faults = Faults(service, ledger)
        for _ in range(times):
            await asyncio.sleep(QUIET_S * (1 + chance.random()))
            if kind.startswith("store"):
                await asyncio.sleep(SETTLED_S)
            await faults.make(Fault(kind, chance.randrange(1 << 16), LIMITS_S[kind][1]))
            await _all_go_on(ledger)
            waits.append(gaps_s(ledger, faults.done[-1]))
    assert not ledger.violations, ledger.violations
    return waits, ledger.num_refused


async def _all_go_on(ledger: Ledger) -> None:
    """Return once every stream has brought something since now."""
    begin_s = time.monotonic()

    def is_waiting(session: Session) -> bool:
        if not session.views:
            return True  # its client has yet to begin
        [view] = session.views
        return view.end_s is None and (not view.arrivals_s or view.arrivals_s[-1] < begin_s)

    while any(map(is_waiting, ledger.sessions)):
        ledger.news.clear()
        await ledger.news.wait()


async def returns_s(service: Service, times: int, away_s: float) -> list[float]:
    """Kill the only target so many times; return how long after it is ready again the first request is served."""
    [target], waits = service.parts["target"], []
    async with service.client(0, 120.0) as client:
        for number in range(times):
            await target.end(SIGKILL)
            await asyncio.sleep(away_s)
            await target.start()
            begin_s = time.monotonic()
            await client.complete(prompt_token_ids=[1, 2, 3 + number], temperature=0.0, max_new_tokens=1)
            waits.append(time.monotonic() - begin_s)
    return waits


async def measure(times: int, seed: int, kinds: Collection[str], away_s: float) -> bool:
    """Print a line for each of these kinds of fault; return whether all were within their limits.

    `away_s`: how long the only target is away.
    """
    chance, is_within = random.Random(seed), True
    print(
        f"{'fault':<22}{'times':>6}{'waits':>7}{'median':>10}{'max':>10}{'limit':>8}{'median of max':>15}{'refused':>9}"
    )
    with tempfile.TemporaryDirectory(prefix="specdec-gaps-") as name:
        models = Models(*await asyncio.to_thread(save_models, Path(name)))
        async with nursery() as forks, running_service(forks, Path(name), models, Size()) as service:
            for kind in filter(kinds.__contains__, LIMITS_S):
                waits, num_refused = await waits_s(service, kind, times, chance)
                is_within &= _print(kind, waits, LIMITS_S[kind][0], num_refused)
        if RETURNS not in kinds:
            return is_within
        alone = Path(name) / "alone"
        alone.mkdir()
        async with (
            nursery() as forks,
            running_service(forks, alone, models, Size(num_targets=1, num_drafts=0)) as service,
        ):
            waits = [[wait_s] for wait_s in await returns_s(service, times, away_s)]
            is_within &= _print(RETURNS, waits, RETURN_LIMIT_S, num_refused=0)
    return is_within


def _print(kind: str, by_fault: list[list[float]], limit_s: float, num_refused: int) -> bool:
    waits = [wait_s for each in by_fault for wait_s in each]
    longest = [max(each) for each in by_fault if each]
    figures = f"{median(waits):>8.2f} s{max(waits):>8.2f} s{limit_s:>6.0f} s{median(longest):>13.2f} s{num_refused:>9}"
    print(f"{kind:<22}{len(by_fault):>6}{len(waits):>7}{figures}", flush=True)
    return max(waits) <= limit_s and not num_refused


def main() -> None:
    """Measure; exit with 1 if a wait was longer than its limit, or a client was refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.gaps", description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="faults of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="decides when and where (default: %(default)s)")
    kinds = [*LIMITS_S, RETURNS]
    parser.add_argument("--only", choices=kinds, action="append", help="a kind of fault; repeatable (default: all)")
    # after 2 s coordinators ask for it again at their longest pauses
    parser.add_argument(
        "--away", type=float, default=2.0, help="seconds without the only target (default: %(default)s)"
    )
    flags = parser.parse_args()
    sys.exit(not asyncio.run(measure(flags.times, flags.seed, flags.only or kinds, flags.away)))


if __name__ == "__main__":
    main()
