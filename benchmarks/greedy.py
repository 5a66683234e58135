"""`python -m benchmarks.greedy`: greedy texts through the services are those of transformers' own `generate`.

In float32, token for token: plain, and with every drafter on offer. Exits with 1 at the first text that differs.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import PLAIN, Configuration, Prompt, automatic, fixed
from benchmarks.served import SERVED, Served
from specdec import AsyncClient
from specdec.serving.local import CannotRun, running

DRAFT_LENGTHS = (1, 4, 8)


class Reference:
    """A model as transformers runs it, in float32."""

    def __init__(self, name: str) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        self._model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)

    def continuation(self, prompt: Prompt, num_tokens: int, ignore_eos: bool) -> tuple[int, ...]:
        """Return the greedy tokens."""
        ids = self._encode(prompt)
        ends = None if ignore_eos else self._model.generation_config.eos_token_id
        output = self._model.generate(ids, max_new_tokens=num_tokens, do_sample=False, eos_token_id=ends)
        return tuple(output[0, ids.shape[1] :].tolist())

    def _encode(self, prompt: Prompt) -> torch.Tensor:
        """Return the prompt's tokens [1, N]."""
        if not prompt.is_chat:
            return torch.tensor([self._tokenizer(prompt.text).input_ids])
        messages = [{"role": "user", "content": prompt.text}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return torch.tensor([self._tokenizer(text, add_special_tokens=False).input_ids])


async def num_different(served: Served, prompts: Sequence[Prompt], num_tokens: int) -> int:
    """Compare every configuration on every prompt; return how many texts differ."""
    reference = Reference(served.options.target)
    expected = [reference.continuation(prompt, num_tokens, served.ignore_eos) for prompt in prompts]
    differing = 0
    async with running(served.options, lambda *_: None) as stack, AsyncClient(stack.address) as client:
        drafters = (await client.get_model()).drafters
        for configuration in configurations(drafters):
            same = await _same(client, served, prompts, expected, configuration)
            print(f"{configuration.name}: {sum(same)} of {len(same)} texts identical", flush=True)
            differing += len(same) - sum(same)
    return differing


def configurations(drafters: Sequence[str]) -> list[Configuration]:
    """Return plain decoding, and every drafter on offer with every draft length."""
    drafted = [[automatic(name), *(fixed(name, count) for count in DRAFT_LENGTHS)] for name in drafters]
    return [PLAIN, *chain.from_iterable(drafted)]


async def _same(
    client: AsyncClient,
    served: Served,
    prompts: Sequence[Prompt],
    expected: Sequence[tuple[int, ...]],
    configuration: Configuration,
) -> list[bool]:
    sampling = served.sampling(0.0, max(map(len, expected)))
    return [
        (await prompt.complete(client, sampling, configuration.speculation)).tokens == tokens
        for prompt, tokens in zip(prompts, expected, strict=True)
    ]


def main() -> None:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(SERVED), default="demo", help="what to serve (default: the demo pair)")
    parser.add_argument("--prompts", type=int, default=8, help="of all kinds in turn (default: 8)")
    parser.add_argument("--tokens", type=int, default=64, help="maximum tokens of each text (default: 64)")
    flags = parser.parse_args()
    try:
        served = SERVED[flags.model]()
        served = replace(served, options=replace(served.options, dtype="float32"))
        prompts = served.in_turn(flags.prompts)
        sys.exit(bool(asyncio.run(num_different(served, prompts, flags.tokens))))
    except CannotRun as error:
        sys.exit(f"greedy: {error}")


if __name__ == "__main__":
    main()
