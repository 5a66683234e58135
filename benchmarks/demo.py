"""`make demo`: one target, served with and without drafts, the same text, and how much faster it came.

Starts the three services with the demo pair, streams a held-out Python file's continuation speculatively, then compares
greedy texts with and without speculation, and prints a table. `--model smollm2` (`make demo MODEL=smollm2`) answers
held-out instructions with a real model instead.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from rich.console import Console
from rich.table import Table

from benchmarks.measure import CHOSEN, PLAIN, Configuration, Measured, Prompt, busy_cores, hardware, measure, speed_up
from benchmarks.served import SERVED, Served, sharing_nothing
from specdec import AsyncClient, Completion, SpeculationParams
from specdec.serving.child import print_errors
from specdec.serving.local import CannotRun, running
from specdec.terminal import coloured, is_coloured, statistics_line

NUM_PROMPTS = 6
NUM_TOKENS = 128
NEAR_TIE_NATS = 0.25  # bfloat16 keeps 8 bits: logits of about 16 come in steps of 0.125
NEAR_TIES = (
    "  near ties: a pass over several tokens rounds otherwise than a pass over one, which decides between two tokens "
    "that are almost equally probable; either text is the target's"
)
NO_DRAFT = (
    "no draft: the service chooses how many tokens a drafter drafts, and found that with this one, on this machine, "
    "none is fastest; ask for a number (num_draft_tokens) and it drafts all the same"
)

console = Console(highlight=False)


def configurations(drafters: Sequence[str]) -> list[Configuration]:
    """Return plain decoding, the service's choice, and every drafter on offer."""
    speculated = [Configuration(f"{name} drafter", SpeculationParams(drafter=name)) for name in drafters]
    return [PLAIN, CHOSEN, *speculated]


async def show_stream(client: AsyncClient, served: Served, prompt: Prompt) -> None:
    """Show a sampled continuation or answer as it is committed, with the first drafter on offer."""
    verb = "answered" if prompt.is_chat else "continued"
    console.rule(f"{prompt.name}, {verb}: [green]accepted[/] [yellow]recovered[/] [cyan]bonus[/]")
    console.print(prompt.text.rstrip("\n"), style="dim", markup=False)
    colours = is_coloured(sys.stdout, os.environ)
    sampling = replace(served.shown, max_new_tokens=NUM_TOKENS)
    async for chunk in prompt.stream(client, sampling, SpeculationParams()):
        print(coloured(chunk) if colours else chunk.text, end="", flush=True)
        if chunk.finish:
            console.print(f"\n{statistics_line(chunk.finish)}", style="dim")


def first_divergence(plain: Completion, other: Completion) -> int | None:
    """Return where two completions part, or None."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain.tokens, other.tokens, strict=False)))
    return None if same == len(plain.tokens) == len(other.tokens) else same


def gap_nats(completion: Completion, position: int) -> float:
    """Return the distance of the two best tokens' log probabilities at a position."""
    (_, best), (_, second) = completion.logprobs[position].top
    return best - second


def compare(prompts: Sequence[Prompt], plain: Measured, other: Measured) -> bool:
    """Say whether the texts are the same, or part only where the target's two best tokens are nearly tied."""
    fine, num_near_ties = True, 0
    console.print(f"{other.configuration.name}, compared with plain decoding:")
    for prompt, one, two in zip(prompts, plain.completions, other.completions, strict=True):
        position = first_divergence(one, two)
        if position is None:
            console.print(f"  {prompt.name}: identical, {len(one.tokens)} tokens")
            continue
        gap = gap_nats(one, position)
        is_near_tie = gap <= NEAR_TIE_NATS
        fine, num_near_ties = fine and is_near_tie, num_near_ties + is_near_tie
        verdict = "a near tie" if is_near_tie else "NOT a near tie"
        console.print(
            f"  {prompt.name}: part at token {position}, where the two best differ by {gap:.4f} nats: {verdict}"
        )
    if num_near_ties:
        console.print(NEAR_TIES, style="dim")
    return fine


def table(results: list[Measured]) -> Table:
    """Return the figures."""
    figures = Table(title=f"temperature 0, at most {NUM_TOKENS} tokens on each of {NUM_PROMPTS} held-out prompts")
    for column in ("", "tokens/s", "acceptance rate", "tokens per round", "ms a round", "speed-up (quartiles)"):
        figures.add_column(column, justify="left" if not column else "right")
    for result in results:
        low, middle, high = speed_up(result, results[0])
        figures.add_row(
            result.configuration.name,
            f"{result.median_tokens_per_s:.1f}",
            accepted(result),
            f"{result.tokens_per_round:.2f}",
            f"{result.ms_per_round('total_s'):.1f}",
            f"{middle:.2f} ({low:.2f} - {high:.2f})",
        )
    return figures


def accepted(result: Measured) -> str:
    """Return the acceptance rate in words."""
    if result.configuration is PLAIN:
        return "-"
    return f"{result.acceptance_rate:.2f}" if result.has_drafted else "no draft"


async def demo(served: Served) -> bool:
    """Run it all; say whether the texts agree."""
    prompts = served.in_turn(NUM_PROMPTS)
    greedy = replace(served.sampling(0.0, NUM_TOKENS), num_logprobs=2)
    console.print(f"starting target, draft and coordinator on this machine ({hardware()})", style="dim")
    if warning := busy_cores(os.getloadavg()[0], len(os.sched_getaffinity(0))):
        console.print(warning, style="yellow")
    async with running(served.options, print_errors) as stack, AsyncClient(stack.address) as client:
        await show_stream(client, served, prompts[0])
        console.rule("greedy, with and without speculation")
        model = await client.get_model()
        compared = configurations(model.drafters)
        await measure(client, prompts[:1], compared, greedy)  # caches and the choice of K warm up
        results = await measure(client, prompts, compared, greedy)
        agreed = [compare(prompts, results[0], result) for result in results[1:]]
        console.print(table(results))
        if not all(result.has_drafted for result in results[1:]):
            console.print(NO_DRAFT, style="dim")
        console.print(f"target {model.target.dtype} on {model.target.device}; {hardware()}", style="dim")
    return all(agreed)


def main() -> None:
    """Run the demo; exit with 1 if a text differs, or if the services cannot be started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(SERVED), default="demo", help="what to serve (default: the demo pair)")
    flags = parser.parse_args()
    try:
        with sharing_nothing():
            agreed = asyncio.run(demo(SERVED[flags.model]()))
    except CannotRun as error:
        sys.exit(f"demo: {error}")
    sys.exit(not agreed)


if __name__ == "__main__":
    main()
