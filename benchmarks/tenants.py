"""One tenant asks for many times its share: what the others still get, and how long they wait.

python -m benchmarks.tenants --greed 50

All are clients of one coordinator with bearer tokens. A share is the capacity, as closed clients of all tenants measure
it, by the number of tenants; each of the others asks for 0.8 of it, first without the greedy one, then beside it. The
greedy one is a process of its own.
"""

import argparse
import asyncio
import hashlib
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import hardware
from benchmarks.open_loop import redis_server
from benchmarks.probe import Outcome, Requests, probing
from benchmarks.served import demo_pair
from specdec import AsyncClient
from specdec.serving.child import Child, print_errors
from specdec.serving.local import CannotRun, running
from specdec.serving.local.commands import coordinator_command, environment_of
from specdec.serving.settings import Dtype

OTHERS = ("one", "two", "three", "four")
GREEDY = "greedy"
SHARE_ASKED_FOR = 0.8  # by each of the others
CLIENTS_OF_A_TENANT = 8  # that measure the capacity


@asynccontextmanager
async def coordinator(dtype: Dtype, folder: Path) -> AsyncIterator[str]:
    """Run the demo pair and a coordinator that knows the tenants by their tokens; yield its address."""
    tokens = folder / "tokens.toml"
    tokens.write_text("".join(f'[{name}]\ntokens = ["sha256:{_hash(name)}"]\n' for name in (*OTHERS, GREEDY)))
    async with redis_server() as store:
        options = replace(demo_pair().options, store=store, dtype=dtype)
        async with running(options, print_errors) as stack:
            ports = {child.name: child.port.result() for child in stack.children}
            workers = [ports["target worker"]], [ports["draft worker"]]
            command = coordinator_command(replace(options, port=0), *workers)
            flags = [*command.flags, f"--tokens-file={tokens}"]
            child = await Child.start(
                command.name, command.module, flags, environment_of(command, os.environ), print_errors
            )
            try:
                yield f"127.0.0.1:{await child.port}"
            finally:
                await child.stop(5.0)


def _token(tenant: str) -> str:
    return f"{tenant}-{'token' * 8}"


def _hash(tenant: str) -> str:
    return hashlib.sha256(_token(tenant).encode()).hexdigest()


async def measure(flags: argparse.Namespace) -> None:
    """Print what the others got without the greedy tenant, and beside it."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-tenants-")))
        address = await stack.enter_async_context(coordinator(flags.dtype, folder))
        tenants = [
            Requests(
                await stack.enter_async_context(AsyncClient(address, max_retries=0, token=_token(name))),
                flags.tokens,
                flags.deadline,
                flags.seed + place,
            )
            for place, name in enumerate(OTHERS)
        ]
        print(f"{hardware()}; demo pair, {flags.dtype}, {flags.tokens} tokens, deadline {flags.deadline:g} s")
        await asyncio.gather(*(tenant.closed(1, 3.0) for tenant in tenants))
        capacity = sum(
            await asyncio.gather(*(tenant.closed(CLIENTS_OF_A_TENANT, flags.duration) for tenant in tenants))
        )
        share = capacity / (len(OTHERS) + 1)
        print(f"capacity {capacity:.2f}/s, a share {share:.2f}/s; {len(OTHERS)} ask for {SHARE_ASKED_FOR:g} of it each")
        without, _ = await _loaded(tenants, address, share, flags, greed=0.0)
        print(_line("without it", without, flags.duration), flush=True)
        beside, greedy = await _loaded(tenants, address, share, flags, greed=flags.greed)
        print(_line(f"beside {flags.greed:g} shares", beside, flags.duration))
        print(_line("the greedy one", greedy, flags.duration))
        print(f"the others keep {100 * _in_time(beside) / _in_time(without):.0f} %")


async def _loaded(
    tenants: Sequence[Requests], address: str, share: float, flags: argparse.Namespace, greed: float
) -> tuple[list[Outcome], list[Outcome]]:
    """Return how the requests of the others ended, and those of the greedy tenant, who comes a little earlier."""

    async def others() -> list[Outcome]:
        await asyncio.sleep(flags.lead)
        asked = (tenant.open(SHARE_ASKED_FOR * share, flags.duration) for tenant in tenants)
        return [outcome for outcomes in await asyncio.gather(*asked) for outcome in outcomes]

    async def greedy() -> list[Outcome]:
        if not greed:
            return []
        words = (flags.tokens, flags.deadline, greed * share, flags.duration + flags.lead, flags.seed + len(tenants))
        return await probing(address, *words, token=_token(GREEDY))

    theirs, its = await asyncio.gather(others(), greedy())
    return theirs, its


def _in_time(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.reason == "ok" for outcome in outcomes) / len(outcomes)


def _line(name: str, outcomes: Sequence[Outcome], duration_s: float) -> str:
    endings = Counter(outcome.reason for outcome in outcomes)
    elapsed_s = [outcome.elapsed_s for outcome in outcomes if outcome.reason == "ok"]
    median_s = statistics.median(elapsed_s) if elapsed_s else float("nan")
    return (
        f"{name}: {100 * _in_time(outcomes):.1f} % of {len(outcomes)} in time, {endings['ok'] / duration_s:.2f}/s, "
        f"median {median_s:.2f} s; {dict(endings)}"
    )


def main() -> None:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--greed", type=float, default=50.0, help="shares that one tenant asks for (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of each text (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=8.0, help="seconds (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of each load (default: %(default)s)")
    parser.add_argument(
        "--lead", type=float, default=3.0, help="seconds that the greedy one comes earlier (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help="of the models (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and arrivals (default: %(default)s)")
    try:
        asyncio.run(measure(parser.parse_args()))
    except CannotRun as error:
        sys.exit(f"tenants: {error}")


if __name__ == "__main__":
    main()
