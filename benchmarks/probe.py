"""Requests of one kind, and a process of its own that sends some at a fixed rate.

It has little else to do, so that what they take is the service's part, not the sender's.

Prints outcomes as JSON: `python -m benchmarks.probe ADDRESS TOKENS DEADLINE RATE DURATION SEED`. A token for it is in
the environment.
"""

import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from specdec import AsyncClient, SamplingParams
from specdec.errors import SpecdecError

PROMPT_TOKENS = 50
VOCABULARY = range(10, 4000)
REFUSED_PAUSE_S = 0.5
PRIORITY = -5  # of the probe, where that is allowed: it measures others
TOKEN_VARIABLE = "PROBE_TOKEN"
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended."""

    reason: str  # "ok", or the error's
    elapsed_s: float
    late_s: float = 0.0  # how much later than due it was sent


class Requests:
    """Requests of one kind, each with another prompt and seed."""

    def __init__(self, client: AsyncClient, num_tokens: int, deadline_s: float, seed: int) -> None:
        self._client, self._num_tokens, self._deadline_s = client, num_tokens, deadline_s
        self._random = random.Random(seed)

    async def one(self, due_s: float | None = None) -> Outcome:
        """Send one request; return how it ended."""
        prompt, seed = self._random.choices(VOCABULARY, k=PROMPT_TOKENS), self._random.getrandbits(32)
        sampling = SamplingParams(seed=seed, max_new_tokens=self._num_tokens, ignore_eos=True)
        begin, reason = time.perf_counter(), "ok"
        late_s = 0.0 if due_s is None else begin - due_s
        try:
            await self._client.complete(prompt_token_ids=prompt, sampling=sampling, timeout_s=self._deadline_s)
        except SpecdecError as error:
            reason = error.reason
        return Outcome(reason, time.perf_counter() - begin, late_s)

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
            sent.append(asyncio.create_task(self.one(due)))
            due += self._random.expovariate(rate)
        return await asyncio.gather(*sent)


def high(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100)[-1]


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


async def probing(
    address: str,
    num_tokens: int,
    deadline_s: float,
    rate: float,
    duration_s: float,
    seed: int,
    token: str | None = None,
) -> list[Outcome]:
    """Send requests from another process, as the tenant of a token; return how they ended."""
    words = (address, num_tokens, deadline_s, rate, duration_s, seed)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.probe", *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | ({} if token is None else {TOKEN_VARIABLE: token}),
    )
    output, _ = await process.communicate()
    return [Outcome(*fields) for fields in json.loads(output)]


async def _probe(address: str, num_tokens: int, deadline_s: float, rate: float, duration_s: float, seed: int) -> None:
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    async with AsyncClient(address, max_retries=0, token=os.environ.get(TOKEN_VARIABLE)) as client:
        outcomes = await Requests(client, num_tokens, deadline_s, seed).open(rate, duration_s)
    print(json.dumps([astuple(outcome) for outcome in outcomes]))


if __name__ == "__main__":
    given = sys.argv[1:]
    asyncio.run(_probe(given[0], int(given[1]), float(given[2]), float(given[3]), float(given[4]), int(given[5])))
