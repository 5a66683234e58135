"""Tokens a second of many sessions at once, plain and as the service chooses, in turn."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from benchmarks.measure import PLAIN, Prompt
from benchmarks.served import Served
from specdec import AsyncClient, Completion, SamplingParams, SpeculationParams

LOAD_TOKENS = 64


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
        turns = [[*prompts[first:], *prompts[:first]] for first in range(0, len(prompts), num_sessions)]
        await _throughput(client, sampling, turns[-1], num_sessions, SpeculationParams())
        pairs = [
            (
                await _throughput(client, sampling, turn, num_sessions, PLAIN.speculation),
                await _throughput(client, sampling, turn, num_sessions, SpeculationParams()),
            )
            for turn in turns * repetitions
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
    """Return tokens a second of sessions at once, one a prompt as far as they go."""

    async def run(number: int) -> Completion:
        return await prompts[number % len(prompts)].complete(client, sampling, speculation)

    begin = time.perf_counter()
    completions = await asyncio.gather(*(run(number) for number in range(num_sessions)))
    return sum(len(completion.tokens) for completion in completions) / (time.perf_counter() - begin)
