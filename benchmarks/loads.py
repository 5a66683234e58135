"""Tokens a second of many sessions at once, plain and as the service chooses, in turn.

As many sessions run all the time: where one ends, the next prompt begins. Both ways get the same prompts, so that both
read as many prompt tokens. Sessions that begin together and whose end is waited for would tell of the last one.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from benchmarks.measure import PLAIN, Prompt
from benchmarks.served import Served
from specdec import AsyncClient, SamplingParams, SpeculationParams

LOAD_TOKENS = 64
NUM_WAVES = 3  # sessions that follow one another at least, so that few of them run while others have ended


@dataclass(frozen=True, slots=True)
class Load:
    """What so many sessions at once did, medians."""

    temperature: float
    num_sessions: int
    plain_tokens_per_s: float
    chosen_tokens_per_s: float
    ratio: float


async def loads(
    client: AsyncClient, served: Served, temperature: float, prompts: Sequence[Prompt], repetitions: int
) -> AsyncIterator[Load]:
    """Yield the results of each number of sessions that is to be tried. The choice learns from one turn before them."""
    sampling = served.sampling(temperature, LOAD_TOKENS)
    for num_sessions in served.loads:
        turn = list(islice(cycle(prompts), max(len(prompts), NUM_WAVES * num_sessions)))
        await _throughput(client, sampling, turn, num_sessions, SpeculationParams())
        pairs = [
            (
                await _throughput(client, sampling, turn, num_sessions, PLAIN.speculation),
                await _throughput(client, sampling, turn, num_sessions, SpeculationParams()),
            )
            for _ in range(repetitions)
        ]
        plain, chosen = (statistics.median(column) for column in zip(*pairs, strict=True))
        yield Load(temperature, num_sessions, plain, chosen, statistics.median(fast / slow for slow, fast in pairs))


async def _throughput(
    client: AsyncClient,
    sampling: SamplingParams,
    prompts: Sequence[Prompt],
    num_sessions: int,
    speculation: SpeculationParams,
) -> float:
    """Return tokens a second of so many sessions at once, as long as there are prompts."""
    waiting, num_tokens = iter(prompts), 0

    async def run() -> None:
        nonlocal num_tokens
        for prompt in waiting:
            completion = await prompt.complete(client, sampling, speculation)
            num_tokens += len(completion.tokens)

    begin = time.perf_counter()
    await asyncio.gather(*(run() for _ in range(num_sessions)))
    return num_tokens / (time.perf_counter() - begin)
