"""Measure many sessions in a cache that holds few of them, against a cache that holds all.

python -m benchmarks.cache_places --sessions 200 --places 20
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace

import torch

from benchmarks.forwards import CACHED_TOKENS, forward_of, medians_ms
from benchmarks.measure import hardware
from benchmarks.served import demo_pair
from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.engine import load_language_model
from specdec.errors import SpecdecError
from specdec.serving.child import print_errors
from specdec.serving.local import CannotRun, running

PROMPT_TOKENS = 50
BLOCK_TOKENS = 32  # of the cache
TOKEN_VALUES = 12 * 2 * 64 * 2  # in the cache of the demo target: layers, heads, head size, keys and values
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
NUM_FORWARDS = 9  # of each size that are timed
VOCABULARY = range(10, 4000)


@dataclass(frozen=True, slots=True)
class Result:
    """How the sessions ended."""

    num_tokens: int
    elapsed_s: float
    endings: Counter[str]

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.num_tokens / self.elapsed_s


async def serve(flags: argparse.Namespace, num_places: int) -> Result:
    """Serve the demo target with a cache for so many sessions; run all sessions at once."""
    num_blocks = num_places * -(-(PROMPT_TOKENS + flags.tokens) // BLOCK_TOKENS)
    token_bytes = TOKEN_VALUES * VALUE_BYTES[flags.dtype]
    os.environ["SPECDEC_KV_CACHE_BYTES"] = str(num_blocks * BLOCK_TOKENS * token_bytes)
    options = replace(demo_pair().options, dtype=flags.dtype, draft="none", eagle3_head=None, dflash_head=None)
    options = replace(options, medusa_head=None)
    rng = random.Random(flags.seed)
    prompts = [rng.choices(VOCABULARY, k=PROMPT_TOKENS) for _ in range(flags.sessions)]
    async with (
        running(options, print_errors) as stack,
        AsyncClient(stack.address, timeout_s=flags.timeout) as client,
    ):
        begin = time.perf_counter()
        ended = await asyncio.gather(*(_outcome(client, prompt, flags.tokens) for prompt in prompts))
        elapsed_s = time.perf_counter() - begin
    return Result(sum(count for _, count in ended), elapsed_s, Counter(reason for reason, _ in ended))


async def _outcome(client: AsyncClient, prompt: list[int], num_tokens: int) -> tuple[str, int]:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
    count = 0
    try:
        async with client.generate(
            prompt_token_ids=prompt, sampling=sampling, speculation=SpeculationParams(num_draft_tokens=0)
        ) as stream:
            async for chunk in stream:
                count += len(chunk.tokens)
    except SpecdecError as error:
        return error.reason, count
    return "ok", count


def forwards_per_s(dtype: str, numbers: tuple[int, ...]) -> list[float]:
    """Return the tokens a second of forwards over so many sessions, on one thread, without the services."""
    torch.set_num_threads(1)
    options, rates = demo_pair().options, list[float]()
    num_bytes = 2 * max(numbers) * CACHED_TOKENS * TOKEN_VALUES * VALUE_BYTES[dtype]
    model = load_language_model(options.target, device="cpu", dtype=dtype, kv_cache_bytes=num_bytes)
    for number in numbers:
        with forward_of(model, number, 1) as forward:
            rates.append(1e3 * number / medians_ms({"": forward}, 0.0, NUM_FORWARDS)[""])
    return rates


async def measure(flags: argparse.Namespace) -> None:
    """Print the throughput of both caches."""
    sessions = f"{flags.sessions} sessions of {PROMPT_TOKENS} + {flags.tokens}"
    print(f"{hardware()}; demo target, {flags.dtype}, K = 0, {sessions}")
    few, many = await asyncio.to_thread(forwards_per_s, flags.dtype, (flags.places, flags.sessions))
    print(f"forwards alone: {few:.0f} tokens/s with {flags.places} sessions, {many:.0f} with all: {few / many:.0%}")
    results = {places: await serve(flags, places) for places in (flags.sessions, flags.places)}
    for places, result in results.items():
        print(f"room for {places}: {result.tokens_per_s:.0f} tokens/s, {dict(result.endings)}")
    ratio = results[flags.places].tokens_per_s / results[flags.sessions].tokens_per_s
    print(f"{ratio:.0%} of the throughput with room for all")


def main() -> None:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=200, help="at once (default: %(default)s)")
    parser.add_argument("--places", type=int, default=20, help="that the small cache has (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each text (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="of a request, in seconds (default: %(default)s)")
    parser.add_argument("--dtype", choices=VALUE_BYTES, default="float32", help="of the model (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: %(default)s)")
    try:
        asyncio.run(measure(parser.parse_args()))
    except CannotRun as error:
        sys.exit(f"cache_places: {error}")


if __name__ == "__main__":
    main()
