"""`python -m benchmarks.greedy`: greedy texts through the services are those of transformers' own `generate`.

In float32, token for token, several sessions at once: plain, as the service chooses, and with every drafter on offer.
Names each text that differs, and by how much the target's two best tokens differ there. Exits with 1 if one does.

    python -m benchmarks.greedy --model smollm2                                        # 64 prompts, 128 tokens
    python -m benchmarks.greedy --model smollm2 --prompts 6 --tokens 32 --drafters recycle --draft-lengths 8
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, takewhile

import torch

from benchmarks.bench import Selection, comma_separated, configurations, counts
from benchmarks.in_process import Reference
from benchmarks.measure import Configuration, Prompt
from benchmarks.served import SERVED, Served, with_options
from specdec import AsyncClient, SamplingParams
from specdec.serving.local import CannotRun, running

DRAFT_LENGTHS = (4, 16)
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and the text that transformers gives."""

    prompt: Prompt
    expected: Tokens


def prompts_of(served: Served, num_prompts: int) -> list[Prompt]:
    """Return so many prompts of all kinds in turn; where there are fewer, shortened ones follow."""
    num_whole = sum(map(len, served.prompts.values()))
    whole = served.in_turn(num_whole)
    return list(islice((shortened(prompt, turn) for turn in count() for prompt in whole), num_prompts))


def shortened(prompt: Prompt, num_words: int) -> Prompt:
    """Return a prompt without its first words."""
    if not num_words:
        return prompt
    rest = prompt.text.split(" ", num_words)[-1]
    return replace(prompt, name=f"{prompt.name} without {num_words} words", text=rest)


def cases_of(reference: Reference, prompts: Sequence[Prompt], sampling: SamplingParams) -> Iterator[Case]:
    """Yield the reference's text for each prompt."""
    for number, prompt in enumerate(prompts, start=1):
        yield Case(prompt, reference.continuation(prompt, sampling))
        print(f"greedy: {number} of {len(prompts)} reference texts", file=sys.stderr, flush=True)


async def completions(
    client: AsyncClient, cases: Sequence[Case], sampling: SamplingParams, configuration: Configuration, at_once: int
) -> list[Tokens]:
    """Return the services' texts, so many sessions at once."""
    places = asyncio.Semaphore(at_once)

    async def tokens(case: Case) -> Tokens:
        async with places:
            return (await case.prompt.complete(client, sampling, configuration.speculation)).tokens

    return list(await asyncio.gather(*map(tokens, cases)))


def difference(reference: Reference, case: Case, tokens: Tokens) -> str | None:
    """Say where a text leaves the expected one, and how close the target's two best tokens are there; None: nowhere."""
    if tokens == case.expected:
        return None
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, case.expected, strict=False)))
    gap = reference.gap(case.prompt, case.expected[:same])
    return f"{case.prompt.name}: other tokens from {same} on, where the two best logits differ by {gap:.2g}"


async def num_different(
    client: AsyncClient,
    reference: Reference,
    cases: Sequence[Case],
    sampling: SamplingParams,
    compared: Sequence[Configuration],
    at_once: int,
) -> int:
    """Compare every configuration on every prompt; return how many texts differ."""
    total = 0
    for configuration in compared:
        texts = await completions(client, cases, sampling, configuration, at_once)
        found = [difference(reference, case, tokens) for case, tokens in zip(cases, texts, strict=True)]
        differing = [sentence for sentence in found if sentence]
        print(f"{configuration.name}: {len(cases) - len(differing)} of {len(cases)} texts identical", flush=True)
        print(*(f"  {sentence}\n" for sentence in differing), sep="", end="", flush=True)
        total += len(differing)
    return total


async def run(served: Served, flags: argparse.Namespace) -> int:
    """Start the services and compare; return how many texts differ."""
    sampling = served.sampling(0.0, flags.tokens)
    reference = Reference(served.options.target)
    os.environ.setdefault("SPECDEC_DRAFT_AHEAD", "true")  # on however few cores: texts are compared, not speeds
    async with running(served.options, lambda *_: None) as stack, AsyncClient(stack.address) as client:
        drafters = Selection(flags.drafters).drafters_of((await client.get_model()).drafters)
        cases = list(cases_of(reference, prompts_of(served, flags.prompts), sampling))
        compared = configurations(drafters, flags.draft_lengths)
        return await num_different(client, reference, cases, sampling, compared, flags.at_once)


def main() -> None:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=tuple(SERVED), default="demo", help="what to serve (default: the demo pair)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="of `specdec up`, such as num_drafts=2")
    add("--drafters", type=comma_separated, metavar="NAME,...", help="of those on offer (default: all)")
    add("--draft-lengths", type=counts, default=DRAFT_LENGTHS, metavar="K,...", help="besides K automatic")
    add("--prompts", type=int, default=64, help="of all kinds in turn (default: 64)")
    add("--tokens", type=int, default=128, help="maximum tokens of each text (default: 128)")
    add("--at-once", type=int, default=8, help="sessions at once (default: 8)")
    flags = parser.parse_args()
    torch.set_num_threads(1)  # for the reference: with more, threads that wait for a core that the services have spin
    try:
        served = with_options(SERVED[flags.model](), flags.option)
        served = replace(served, options=replace(served.options, dtype="float32"))
        sys.exit(bool(asyncio.run(run(served, flags))))
    except CannotRun as error:
        sys.exit(f"greedy: {error}")


if __name__ == "__main__":
    main()
