"""Send requests at a fixed rate, whatever becomes of them: what ends within its deadline at many times the capacity.

python -m benchmarks.open_loop --factors 0.8 2 5 10

Capacity is measured first: requests a second with a fixed number of clients, each of which waits for its answer. A
redis-server is started for the store, so that its keys can be counted.

The sender is one process of the same machine, and reads all texts: its answers wait for it too. So some of the requests
come from a second process (`benchmarks/probe.py`), which has little to do, and refusals are timed there; by how much
its timers are late says what the machine adds.
"""

import argparse
import asyncio
import contextlib
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from redis.asyncio import Redis

from benchmarks.measure import hardware
from benchmarks.probe import Outcome, Requests, cpu_s, high, probing
from benchmarks.served import demo_pair
from specdec import AsyncClient
from specdec.serving.child import print_errors
from specdec.serving.local import CannotRun, running
from specdec.serving.local.stack import Stack

OVERLOADED = "OVERLOADED"
KEYS_OF_A_SESSION = 3
PROBE_SHARE, MAX_PROBE_RATE = 0.25, 20.0  # of the requests, those that the probe sends; a second at most
RECOVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """What a rate of requests gave."""

    duration_s: float
    sent: Sequence[Outcome]
    probed: Sequence[Outcome]  # from the second process
    num_keys: int  # that were written
    cpu: Mapping[str, float]  # cores that each process took

    @property
    def goodput(self) -> float:
        """Requests a second that ended within the deadline."""
        return sum(outcome.reason == "ok" for outcome in self.outcomes) / self.duration_s

    @property
    def outcomes(self) -> list[Outcome]:
        """Those of both processes."""
        return [*self.sent, *self.probed]

    def lines(self) -> list[str]:
        """Return the figures as text."""
        endings = Counter(outcome.reason for outcome in self.outcomes)
        num_expected = KEYS_OF_A_SESSION * (len(self.outcomes) - endings[OVERLOADED])
        cpu = ", ".join(f"{name} {share:.2f}" for name, share in self.cpu.items())
        return [
            f"goodput {self.goodput:.2f}/s; {len(self.outcomes)} requests: {dict(endings)}; "
            f"{self.num_keys} keys, at most {num_expected} expected",
            f"refused, at the probe: {_refusals(self.probed)}; at the sender: {_refusals(self.sent)}",
            f"cores: {cpu}",
        ]


def _refusals(outcomes: Sequence[Outcome]) -> str:
    refused_s = [outcome.elapsed_s for outcome in outcomes if outcome.reason == OVERLOADED]
    late_s = [outcome.late_s for outcome in outcomes]
    if len(refused_s) < 2:
        return f"{len(refused_s)}"
    median, p99 = 1e3 * statistics.median(refused_s), 1e3 * high(refused_s)
    return f"{len(refused_s)}, median {median:.0f}, 99 % {p99:.0f} ms (its timers {1e3 * high(late_s):.0f} ms late)"


@contextlib.asynccontextmanager
async def redis_server() -> AsyncIterator[str]:
    """Run a redis-server on a free port; yield its address."""
    program = shutil.which("redis-server")
    if program is None:
        raise CannotRun("there is no redis-server on PATH; install it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="specdec-redis-") as folder:
        flags = ("--port", str(port), "--save", "", "--dir", folder, "--loglevel", "warning")
        process = await asyncio.create_subprocess_exec(program, *flags, stdout=asyncio.subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()


async def measure(flags: argparse.Namespace) -> None:
    """Print what each multiple of the capacity gave, and how soon it was over."""
    async with redis_server() as store:
        options = replace(demo_pair().options, store=store, dtype=flags.dtype)
        async with (
            running(options, print_errors) as stack,
            AsyncClient(stack.address, max_retries=0) as client,
            Redis.from_url(store) as redis,
        ):
            requests = Requests(client, flags.tokens, flags.deadline, flags.seed)
            print(f"{hardware()}; demo pair, {flags.dtype}, {flags.tokens} tokens, deadline {flags.deadline:g} s")
            await requests.closed(2, 3.0)
            alone_s = statistics.median([(await requests.one()).elapsed_s for _ in range(5)])
            capacity = await requests.closed(flags.clients, flags.duration)
            print(f"alone {alone_s:.2f} s; capacity {capacity:.2f}/s with {flags.clients} clients")
            for factor in flags.factors:
                load = await _loaded(stack, flags, requests, redis, factor * capacity)
                print(f"{factor:g} times:", *load.lines(), sep="\n    ", flush=True)
                await _recover(requests, alone_s)


async def _loaded(stack: Stack, flags: argparse.Namespace, requests: Requests, redis: Redis, rate: float) -> Load:
    """Send requests at a rate, from both processes."""
    probe_rate = min(PROBE_SHARE * rate, MAX_PROBE_RATE)
    before, cpu = await redis.dbsize(), _cpu_s(stack)
    begin = time.perf_counter()
    sent, probed = await asyncio.gather(
        requests.open(rate - probe_rate, flags.duration),
        probing(stack.address, flags.tokens, flags.deadline, probe_rate, flags.duration, flags.seed + 1),
    )
    elapsed_s = time.perf_counter() - begin
    cores = {name: (now - cpu[name]) / elapsed_s for name, now in _cpu_s(stack).items()}
    return Load(flags.duration, sent, probed, await redis.dbsize() - before, cores)


def _cpu_s(stack: Stack) -> dict[str, float]:
    return {"sender": time.process_time()} | {child.name: cpu_s(child.pid) for child in stack.children}


async def _recover(requests: Requests, alone_s: float) -> None:
    begin = time.perf_counter()
    while (outcome := await requests.one()).reason != "ok" or outcome.elapsed_s > 2 * alone_s:
        if time.perf_counter() - begin > RECOVERY_S:
            print(f"    not normal {RECOVERY_S:g} s later: {outcome}")
            return
        await asyncio.sleep(0.1)
    print(f"    normal after {time.perf_counter() - begin:.1f} s")


def main() -> None:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--factors", type=float, nargs="+", default=[0.8, 2, 5, 10], help="times the capacity")
    parser.add_argument("--tokens", type=int, default=64, help="of each text (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=8.0, help="seconds (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of each load (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=6, help="that measure the capacity (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="of the models (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and arrivals (default: %(default)s)")
    try:
        asyncio.run(measure(parser.parse_args()))
    except CannotRun as error:
        sys.exit(f"open_loop: {error}")


if __name__ == "__main__":
    main()
