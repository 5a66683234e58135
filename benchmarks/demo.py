"""`make demo`: one target, three ways of serving it, the same text, and how much faster it came.

Starts the three services with the demo pair, streams a held-out Python file's continuation speculatively, then compares
greedy texts with and without speculation, and prints a table.
"""

import asyncio
import os
import sys
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure import PLAIN, Configuration, Measured, hardware, held_out_prompts, measure, speed_up
from specdec import AsyncClient, Completion, SamplingParams, SpeculationParams
from specdec.serving.child import print_errors
from specdec.serving.local import CannotRun, Options, running
from specdec.terminal import coloured, is_coloured, statistics_line

MODELS = Path(__file__).parent.parent / "models"
NUM_PROMPTS = 6
NUM_TOKENS = 128
NEAR_TIE_NATS = 0.25  # bfloat16 keeps 8 bits: logits of about 16 come in steps of 0.125

CONFIGURATIONS = (
    PLAIN,
    Configuration("model drafter", SpeculationParams(drafter="model")),
    Configuration("n-gram drafter", SpeculationParams(drafter="ngram")),
)
GREEDY = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS, num_logprobs=2, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, max_new_tokens=NUM_TOKENS, seed=1, ignore_eos=True)

console = Console(highlight=False)


async def show_stream(client: AsyncClient, name: str, prompt: str) -> None:
    """Show a sampled continuation as it is committed."""
    console.rule(f"{name}, continued: [green]accepted[/] [yellow]recovered[/] [cyan]bonus[/]")
    console.print(prompt.rstrip("\n"), style="dim", markup=False)
    colours = is_coloured(sys.stdout, os.environ)
    async for chunk in client.generate(prompt, sampling=SAMPLED, speculation=SpeculationParams(drafter="model")):
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


def compare(names: list[str], plain: Measured, other: Measured) -> bool:
    """Return whether the texts are the same, or part only where the target's two best tokens are nearly tied."""
    fine = True
    for name, one, two in zip(names, plain.completions, other.completions, strict=True):
        position = first_divergence(one, two)
        if position is None:
            console.print(f"  {name}: identical, {len(one.tokens)} tokens")
            continue
        gap = gap_nats(one, position)
        fine &= gap <= NEAR_TIE_NATS
        verdict = "a near tie, which bfloat16 may break either way" if gap <= NEAR_TIE_NATS else "NOT a near tie"
        console.print(f"  {name}: part at token {position}, where the two best differ by {gap:.4f} nats: {verdict}")
    return fine


def table(results: list[Measured]) -> Table:
    """Return the figures."""
    figures = Table(title=f"temperature 0, {NUM_TOKENS} tokens on each of {NUM_PROMPTS} held-out files")
    for column in ("", "tokens/s", "acceptance rate", "tokens per round", "ms a round", "speed-up (quartiles)"):
        figures.add_column(column, justify="left" if not column else "right")
    for result in results:
        low, middle, high = speed_up(result, results[0])
        figures.add_row(
            result.configuration.name,
            f"{result.median_tokens_per_s:.1f}",
            f"{result.acceptance_rate:.2f}" if result.acceptance_rate else "-",
            f"{result.tokens_per_round:.2f}",
            f"{result.ms_per_round('total_s'):.1f}",
            f"{middle:.2f} ({low:.2f} - {high:.2f})",
        )
    return figures


async def demo() -> bool:
    """Run it all; say whether the texts agree."""
    prompts = dict(list(held_out_prompts(MODELS / "heldout").items())[:NUM_PROMPTS])
    options = Options(target=str(MODELS / "target"), draft=str(MODELS / "draft"), port=0)
    console.print(f"starting target, draft and coordinator on this machine ({hardware()})", style="dim")
    async with running(options, print_errors) as stack, AsyncClient(stack.address) as client:
        name, prompt = next(iter(prompts.items()))
        await show_stream(client, name, prompt)
        console.rule("greedy, with and without speculation")
        await measure(client, [prompt], CONFIGURATIONS, GREEDY)  # caches and the choice of K warm up
        results = await measure(client, list(prompts.values()), CONFIGURATIONS, GREEDY)
        agreed = [compare(list(prompts), results[0], result) for result in results[1:]]
        console.print(table(results))
        model = await client.get_model()
        console.print(f"target {model.target.dtype} on {model.target.device}; {hardware()}", style="dim")
    return all(agreed)


def main() -> None:
    """Run the demo; exit with 1 if a text differs, or if the services cannot be started."""
    try:
        sys.exit(not asyncio.run(demo()))
    except CannotRun as error:
        sys.exit(f"demo: {error}")


if __name__ == "__main__":
    main()
