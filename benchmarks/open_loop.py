"""Send requests at a fixed rate, whatever becomes of them: what ends within its deadline at many times the capacity.

python -m benchmarks.open_loop --factors 0.8 2 5 10

Capacity is measured first: requests a second with a fixed number of clients, each of which waits for its answer. A
redis-server is started for the store, so that its keys can be counted.
"""

import argparse
import asyncio
import contextlib
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from redis.asyncio import Redis

from benchmarks.measure import hardware
from benchmarks.served import demo_pair
from specdec import AsyncClient, SamplingParams
from specdec.errors import SpecdecError
from specdec.serving.child import print_errors
from specdec.serving.local import CannotRun, running

PROMPT_TOKENS = 50
VOCABULARY = range(10, 4000)
KEYS_OF_A_SESSION = 3
REFUSED_PAUSE_S = 0.5
RECOVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended."""

    reason: str  # "ok", or the error's
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a rate of requests gave."""

    rate: float
    duration_s: float
    outcomes: Sequence[Outcome]
    num_keys: int  # that were written

    @property
    def goodput(self) -> float:
        """Requests a second that ended within the deadline."""
        return sum(outcome.reason == "ok" for outcome in self.outcomes) / self.duration_s

    def told(self) -> str:
        """Return the figures as text."""
        refused = sorted(1e3 * outcome.elapsed_s for outcome in self.outcomes if outcome.reason == "OVERLOADED")
        kept = len(self.outcomes) - len(refused)
        text = f"{len(self.outcomes)} requests: {dict(Counter(outcome.reason for outcome in self.outcomes))}"
        if len(refused) > 1:
            high = statistics.quantiles(refused, n=100)[-1]
            text += f"; refusals median {statistics.median(refused):.0f}, 99 % {high:.0f} ms"
        return (
            f"goodput {self.goodput:.2f}/s; {text}; {self.num_keys} keys, at most {KEYS_OF_A_SESSION * kept} expected"
        )


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


class Requests:
    """Requests of one kind, each with another prompt and seed."""

    def __init__(self, client: AsyncClient, num_tokens: int, deadline_s: float, seed: int) -> None:
        self._client, self._num_tokens, self._deadline_s = client, num_tokens, deadline_s
        self._random = random.Random(seed)

    async def one(self) -> Outcome:
        """Send one request; return how it ended."""
        begin = time.perf_counter()
        prompt, seed = self._random.choices(VOCABULARY, k=PROMPT_TOKENS), self._random.getrandbits(32)
        sampling = SamplingParams(seed=seed, max_new_tokens=self._num_tokens, ignore_eos=True)
        reason = "ok"
        try:
            await self._client.complete(prompt_token_ids=prompt, sampling=sampling, timeout_s=self._deadline_s)
        except SpecdecError as error:
            reason = error.reason
        return Outcome(reason, time.perf_counter() - begin)

    async def closed(self, num_clients: int, duration_s: float) -> float:
        """Return requests a second of clients that wait for their answers."""
        end, count = time.perf_counter() + duration_s, 0

        async def client() -> None:
            nonlocal count
            while time.perf_counter() < end:
                is_ok = (await self.one()).reason == "ok"
                count += is_ok
                await asyncio.sleep(0 if is_ok else REFUSED_PAUSE_S)

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        return count / (time.perf_counter() - begin)

    async def open(self, rate: float, duration_s: float) -> list[Outcome]:
        """Send requests as a Poisson process; return how they ended."""
        sent, due = list[asyncio.Task[Outcome]](), time.perf_counter()
        end = due + duration_s
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            sent.append(asyncio.create_task(self.one()))
            due += self._random.expovariate(rate)
        return await asyncio.gather(*sent)


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
                before = await redis.dbsize()
                outcomes = await requests.open(factor * capacity, flags.duration)
                load = Load(factor * capacity, flags.duration, outcomes, await redis.dbsize() - before)
                print(f"{factor:g} times: {load.told()}", flush=True)
                await _recover(requests, alone_s)


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
