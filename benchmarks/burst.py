"""Send many requests at once, and count the errors.

python -m benchmarks.burst --requests 300                               # a store in memory
python -m benchmarks.burst --requests 300 --store redis://127.0.0.1:6379
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import replace

from benchmarks.measure import hardware
from benchmarks.served import SERVED
from specdec import AsyncClient, SamplingParams
from specdec.errors import SpecdecError
from specdec.serving.child import print_errors
from specdec.serving.local import CannotRun, running

NUM_TOKENS = 16


async def outcome(client: AsyncClient, number: int, prompt: str) -> str:
    """Generate once; return "ok" or the error's reason."""
    sampling = SamplingParams(seed=number, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    try:
        completion = await client.complete(prompt, sampling=sampling)
    except SpecdecError as error:
        return error.reason
    return "ok" if len(completion.tokens) == NUM_TOKENS else "too short"


async def burst(num_requests: int, store: str) -> Counter[str]:
    """Start the services with the demo pair; return how the requests ended."""
    served = SERVED["demo"]()
    prompts = [f"def function_{number}(" for number in range(num_requests)]
    options = replace(served.options, store=store)
    async with (
        running(options, print_errors) as stack,
        AsyncClient(stack.address, max_retries=0, timeout_s=600) as client,
    ):
        begin = time.perf_counter()
        ended = Counter(await asyncio.gather(*(outcome(client, *each) for each in enumerate(prompts))))
        elapsed_s = time.perf_counter() - begin
    print(f"{hardware()}; {num_requests} requests at once, {NUM_TOKENS} tokens each, no retries, store {store}:")
    print(f"{dict(ended)} in {elapsed_s:.1f} s")
    return ended


def main() -> None:
    """Read the flags and run; exit with 1 unless every request succeeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, help="at once (default: %(default)s)")
    parser.add_argument("--store", default="memory", help="memory, embedded, or a redis:// URL (default: %(default)s)")
    flags = parser.parse_args()
    try:
        sys.exit(set(asyncio.run(burst(flags.requests, flags.store))) != {"ok"})
    except CannotRun as error:
        sys.exit(f"burst: {error}")


if __name__ == "__main__":
    main()
