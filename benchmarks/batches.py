"""Many sessions of plain decoding at once, against transformers' padded `generate` in process: pairs, in turn.

python -m benchmarks.batches --sessions 4,16,32 --model smollm2

Prompts of random tokens, of one length or of many (`--mixed`, 10 to 200 tokens; transformers pads them on the left).
Both sides read the prompts too. transformers has the machine to itself in its turn, the services share it with the
client: so each side has its own number of threads.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.in_process import Reference
from benchmarks.measure import hardware
from benchmarks.served import Served, demo_pair, smollm2
from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.serving.child import print_errors
from specdec.serving.local import CannotRun, running

MODELS = {"demo": demo_pair, "smollm2": smollm2}
EQUAL_LENGTH, LENGTHS = 60, (10, 200)
VOCABULARY = range(10, 4000)


def drawn_prompts(count: int, *, is_mixed: bool, seed: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    rng = random.Random(seed)
    return [rng.choices(VOCABULARY, k=rng.randint(*LENGTHS) if is_mixed else EQUAL_LENGTH) for _ in range(count)]


async def through_services(client: AsyncClient, prompts: Sequence[list[int]], num_tokens: int) -> float:
    """Return the tokens a second of all prompts at once, plainly decoded."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)

    async def complete(prompt: list[int]) -> int:
        plain = SpeculationParams(num_draft_tokens=0)
        async with client.generate(prompt_token_ids=prompt, sampling=sampling, speculation=plain) as stream:
            return sum([len(chunk.tokens) async for chunk in stream])

    begin = time.perf_counter()
    counts = await asyncio.gather(*map(complete, prompts))
    return sum(counts) / (time.perf_counter() - begin)


def through_generate(reference: Reference, prompts: Sequence[list[int]], num_tokens: int) -> float:
    """Return the tokens a second of one padded batch."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    begin = time.perf_counter()
    lengths = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    output = reference.model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
    assert output.shape[1] == longest + num_tokens
    return len(prompts) * num_tokens / (time.perf_counter() - begin)


async def measure(flags: argparse.Namespace) -> None:
    """Print a table."""
    served: Served = MODELS[flags.model]()
    options = replace(served.options, dtype=flags.dtype, draft="none", target_threads=flags.target_threads)
    options = replace(options, eagle3_head=None, dflash_head=None, medusa_head=None)
    print(f"{hardware()}; {flags.model}, {flags.dtype}, K = 0, {flags.tokens} tokens each")
    print(f"threads: {flags.target_threads} of the target worker, {flags.threads} of transformers")
    reference = Reference(options.target, getattr(torch, flags.dtype))
    torch.set_num_threads(flags.threads)
    print("| sessions | prompts | services, tokens/s | transformers, tokens/s | ratio |\n|---|---|---|---|---|")
    async with running(options, print_errors) as stack, AsyncClient(stack.address, timeout_s=600) as client:
        await through_services(client, drawn_prompts(2, is_mixed=True, seed=0), 8)
        for count in map(int, flags.sessions.split(",")):
            for is_mixed in (False, True):
                pairs = []
                for number in range(flags.pairs):
                    prompts = drawn_prompts(count, is_mixed=is_mixed, seed=number)
                    ours = await through_services(client, prompts, flags.tokens)
                    theirs = await asyncio.to_thread(through_generate, reference, prompts, flags.tokens)
                    pairs.append((ours, theirs))
                ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
                ratio = statistics.median(ours / theirs for ours, theirs in pairs)
                lengths = "mixed" if is_mixed else f"{EQUAL_LENGTH} tokens"
                print(f"| {count} | {lengths} | {ours:.0f} | {theirs:.0f} | {ratio:.2f} |", flush=True)


def main() -> None:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="demo", help="(default: %(default)s)")
    parser.add_argument("--sessions", default="4,16,32", help="numbers of sessions at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each text (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="of each row (default: %(default)s)")
    parser.add_argument("--target-threads", type=int, default=1, help="of the target worker (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of transformers (default: all cores)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    try:
        asyncio.run(measure(parser.parse_args()))
    except CannotRun as error:
        sys.exit(f"batches: {error}")


if __name__ == "__main__":
    main()
