"""`make bench`: speed over drafters, draft lengths, temperatures and loads, always against plain decoding.

Plain decoding of the same target runs in the same run, in turn with the others on each prompt. Prints Markdown:
docs/benchmarks.md is this program's output with a paragraph around it. `--model smollm2` (`make bench MODEL=smollm2`)
asks a real model held-out instructions of several kinds.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from benchmarks.measure import (
    CHOSEN,
    PLAIN,
    Configuration,
    Measured,
    Prompt,
    automatic,
    fixed,
    hardware,
    measure,
    speed_up,
)
from benchmarks.served import SERVED, Served, sharing_nothing
from specdec import AsyncClient, Completion, SpeculationParams
from specdec.serving.child import print_errors
from specdec.serving.local import CannotRun, running
from specdec.serving.settings import Dtype

TEMPERATURES = (0.0, 1.0)
USUAL_DRAFT_LENGTH = 4  # of the drafters that are not the first on offer
LOAD_TOKENS = 64


def configurations(drafters: Sequence[str], draft_lengths: Sequence[int]) -> list[Configuration]:
    """Return plain decoding, the service's choice, and every drafter, the first of them with all draft lengths."""
    result = [PLAIN, CHOSEN]
    for drafter in drafters:
        lengths = draft_lengths if drafter == drafters[0] else (USUAL_DRAFT_LENGTH,)
        result += [automatic(drafter), *(fixed(drafter, count) for count in lengths)]
    return result


def row(label: str, result: Measured, plain: Measured) -> str:
    """Return one configuration's line of a table."""
    low, middle, high = speed_up(result, plain)
    cells = [
        label,
        f"{result.median_tokens_per_s:.1f}",
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        f"{result.acceptance_rate:.2f}",
        " ".join(f"{rate:.2f}" for rate in result.acceptance_by_depth),
        f"{result.tokens_per_round:.2f}",
        *(f"{result.ms_per_round(phase):.2f}" for phase in ("draft_s", "score_s", "commit_s", "total_s")),
    ]
    return f"| {' | '.join(cells)} |"


def print_table(title: str, by_kind: dict[str, list[Measured]]) -> None:
    """Print a row for each configuration, of each kind of prompts and of all together."""
    print(f"\n### {title}\n")
    print(
        "| | tokens/s | speed-up (quartiles) | acceptance rate | by depth | tokens per round "
        "| draft ms | score ms | commit ms | round ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    if len(by_kind) > 1:
        by_kind = by_kind | {"all": [Measured.together(parts) for parts in zip(*by_kind.values(), strict=True)]}
    for kind, results in by_kind.items():
        for result in results:
            name = result.configuration.name
            print(row(f"{kind}: {name}" if len(by_kind) > 1 else name, result, results[0]), flush=True)


async def throughput(
    client: AsyncClient, served: Served, prompts: Sequence[Prompt], load: int, speculation: SpeculationParams
) -> float:
    """Return tokens a second of `load` sessions at once, one a prompt as far as they go."""
    sampling = served.sampling(0.0, LOAD_TOKENS)

    async def run(number: int) -> Completion:
        return await prompts[number % len(prompts)].complete(client, sampling, speculation)

    begin = time.perf_counter()
    completions = await asyncio.gather(*(run(number) for number in range(load)))
    return sum(len(completion.tokens) for completion in completions) / (time.perf_counter() - begin)


async def print_loads(client: AsyncClient, served: Served, prompts: Sequence[Prompt], repetitions: int) -> None:
    """Print total tokens a second of many sessions at once, plain and speculated in turn."""
    print(f"\n### Many sessions at once, temperature 0, {LOAD_TOKENS} tokens each\n")
    print("| sessions | plain, tokens/s | K automatic, tokens/s | ratio |\n|---|---|---|---|")
    for load in served.loads:
        turns = [[*prompts[first:], *prompts[:first]] for first in range(0, len(prompts), load)]
        pairs = [
            (
                await throughput(client, served, turn, load, PLAIN.speculation),
                await throughput(client, served, turn, load, SpeculationParams()),
            )
            for turn in turns * repetitions
        ]
        plain, fast = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(fast / plain for plain, fast in pairs)
        print(f"| {load} | {plain:.1f} | {fast:.1f} | {ratio:.2f} |", flush=True)


async def bench(served: Served) -> None:
    """Run everything."""
    num_tokens, repetitions = served.num_tokens, served.num_repetitions
    prompts = {kind: entries[: served.num_prompts] for kind, entries in served.prompts.items()}
    first = next(iter(prompts.values()))
    async with running(served.options, print_errors) as stack, AsyncClient(stack.address) as client:
        model = await client.get_model()
        compared = configurations(model.drafters, served.draft_lengths)
        print(f"{hardware()}; target {model.target.name} ({model.target.dtype}), drafters {', '.join(model.drafters)};")
        print(f"held-out prompts: {', '.join(f'{len(each)} {kind}' for kind, each in prompts.items())};")
        print(
            f"at most {num_tokens} tokens each, {repetitions} repetitions, one session at a time unless said; medians."
        )
        for temperature in TEMPERATURES:
            sampling = served.sampling(temperature, num_tokens)
            await measure(client, first[:1], compared, sampling)  # warms up
            by_kind = {
                kind: await measure(client, entries, compared, sampling, repetitions)
                for kind, entries in prompts.items()
            }
            print_table(f"One session, temperature {temperature:g}", by_kind)
        if served.loads:
            await print_loads(client, served, first, repetitions)


def main() -> None:
    """Read the flags and run; exit with 1 if the services cannot be started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(SERVED), default="demo", help="what to serve (default: the demo pair)")
    parser.add_argument("--target", help="another target: folder or hub id")
    parser.add_argument("--draft", help="another draft: folder or hub id, or ngram")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="auto", help="of the models (default: auto)")
    parser.add_argument("--prompts", type=int, help="held-out prompts of each kind")
    parser.add_argument("--tokens", type=int, help="maximum tokens of each completion")
    parser.add_argument("--repetitions", type=int, help="of everything")
    flags = parser.parse_args()
    try:
        served = SERVED[flags.model]()
        options = replace(
            served.options,
            target=flags.target or served.options.target,
            draft=flags.draft or served.options.draft,
            dtype=flags.dtype,
        )
        chosen = replace(
            served,
            options=options,
            num_prompts=flags.prompts or served.num_prompts,
            num_tokens=flags.tokens or served.num_tokens,
            num_repetitions=flags.repetitions or served.num_repetitions,
        )
        with sharing_nothing():
            asyncio.run(bench(chosen))
    except CannotRun as error:
        sys.exit(f"bench: {error}")


if __name__ == "__main__":
    main()
