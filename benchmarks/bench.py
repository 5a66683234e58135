"""`make bench`: speed over draft lengths, temperatures and loads, always against plain decoding in the same run.

Prints Markdown: docs/benchmarks.md is this program's output with a paragraph around it.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import PLAIN, Configuration, Measured, hardware, held_out_prompts, measure, speed_up
from specdec import AsyncClient, Completion, SamplingParams, SpeculationParams
from specdec.serving.child import print_errors
from specdec.serving.local import Options, running

MODELS = Path(__file__).parent.parent / "models"
DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8)
LOADS = (1, 4, 16)
AUTOMATIC = Configuration("model, K automatic", SpeculationParams(drafter="model"))


def configurations() -> list[Configuration]:
    """Return plain decoding and every way of drafting."""
    fixed = [
        Configuration(f"model, K = {count}", SpeculationParams(num_draft_tokens=count, drafter="model"))
        for count in DRAFT_LENGTHS
    ]
    ngram = Configuration("n-gram, K = 4", SpeculationParams(num_draft_tokens=4, drafter="ngram"))
    return [PLAIN, AUTOMATIC, *fixed, ngram]


def print_lengths(title: str, results: Sequence[Measured]) -> None:
    """Print one table of configurations."""
    print(f"\n### {title}\n")
    print("| | tokens/s | speed-up (quartiles) | acceptance rate | tokens per round | draft ms | score ms | round ms |")
    print("|---|---|---|---|---|---|---|---|")
    for result in results:
        low, middle, high = speed_up(result, results[0])
        cells = [
            result.configuration.name,
            f"{result.median_tokens_per_s:.1f}",
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            f"{result.acceptance_rate:.2f}",
            f"{result.tokens_per_round:.2f}",
            *(f"{result.ms_per_round(phase):.2f}" for phase in ("draft_s", "score_s", "total_s")),
        ]
        print(f"| {' | '.join(cells)} |")


async def throughput(client: AsyncClient, prompts: Sequence[str], load: int, speculation: SpeculationParams) -> float:
    """Return tokens a second of `load` sessions at once, one a prompt as far as they go."""

    async def run(number: int) -> Completion:
        sampling = SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True)
        return await client.complete(prompts[number % len(prompts)], sampling=sampling, speculation=speculation)

    begin = time.perf_counter()
    completions = await asyncio.gather(*(run(number) for number in range(load)))
    return sum(len(completion.tokens) for completion in completions) / (time.perf_counter() - begin)


async def print_loads(client: AsyncClient, prompts: Sequence[str], repetitions: int) -> None:
    """Print total tokens a second of many sessions at once, plain and speculated in turn."""
    print("\n### Many sessions at once, temperature 0, 64 tokens each\n")
    print("| sessions | plain, tokens/s | K automatic, tokens/s | ratio |\n|---|---|---|---|")
    for load in LOADS:
        turns = [[*prompts[first:], *prompts[:first]] for first in range(0, len(prompts), load)]
        pairs = [
            (
                await throughput(client, turn, load, PLAIN.speculation),
                await throughput(client, turn, load, AUTOMATIC.speculation),
            )
            for turn in turns * repetitions
        ]
        plain, fast = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(fast / plain for plain, fast in pairs)
        print(f"| {load} | {plain:.1f} | {fast:.1f} | {ratio:.2f} |")


async def bench(target: str, draft: str, num_prompts: int, num_tokens: int, repetitions: int) -> None:
    """Run everything."""
    prompts = list(held_out_prompts(MODELS / "heldout", num_prompts).values())
    options = Options(target=target, draft=draft, port=0)
    async with running(options, print_errors) as stack, AsyncClient(stack.address) as client:
        model = (await client.get_model()).target
        print(f"{hardware()}; target {model.name} ({model.dtype}); {len(prompts)} held-out prompts,")
        print(f"{num_tokens} tokens each, {repetitions} repetitions, one session at a time unless said; medians.")
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(temperature=temperature, seed=1, max_new_tokens=num_tokens, ignore_eos=True)
            await measure(client, prompts[:1], configurations(), sampling)  # warms up
            results = await measure(client, prompts, configurations(), sampling, repetitions)
            print_lengths(f"One session, temperature {temperature:g}", results)
        await print_loads(client, prompts, repetitions)


def main() -> None:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder or hub id (default: the demo pair)")
    parser.add_argument("--draft", default=str(MODELS / "draft"), help="folder or hub id (default: the demo pair)")
    parser.add_argument("--prompts", type=int, default=8, help="held-out files to begin (default: 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each completion (default: 128)")
    parser.add_argument("--repetitions", type=int, default=3, help="of everything (default: 3)")
    flags = parser.parse_args()
    asyncio.run(bench(flags.target, flags.draft, flags.prompts, flags.tokens, flags.repetitions))


if __name__ == "__main__":
    main()
