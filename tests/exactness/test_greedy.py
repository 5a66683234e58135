"""Greedy text equals transformers' own `generate`, token for token: every architecture, through real servers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.toy_drafters import KIND as TOY
from benchmarks.toy_drafters import KINDS
from specdec import AsyncClient, SamplingParams, SpeculationParams
from tests.support.architectures import SERVED, VOCAB_SIZE, build
from tests.support.cluster import cluster, save_tokenizer

NUM_TOKENS = 24
PROMPTS = [[(7 * length + 3 * place) % 300 + 2 for place in range(length)] for length in (1, 2, 3, 5, 8, 13, 21, 34)]
DRAFTERS = ("model", TOY.name, "recycle", "suffix")
# what a model's layers can tell apart: one position, a chain, a tree; other drafters and lengths once, with the first
ROUNDS = [("model", 0), ("model", 4), (TOY.name, 8)]
OTHER_ROUNDS = [("model", 1), ("model", 8), ("recycle", 8), ("suffix", 8)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS)


def reference(folder: Path, prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """Return what transformers generates, prompt by prompt."""
    # transformers does not annotate the class that it loads
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [
        tuple(
            model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)[
                0, len(prompt) :
            ].tolist()
        )
        for prompt in prompts
    ]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.long(but=("llama", "gpt2", "gemma3", "qwen3_moe"))
async def test_greedy_equals_transformers(name: str, tmp_path: Path) -> None:
    """8 sessions at once, of different lengths: chains from a model that often agrees, and trees without a model."""
    target = save_tokenizer(build(name, tmp_path / "target"), VOCAB_SIZE)
    draft = save_tokenizer(noisy_copy(target, tmp_path / "draft"), VOCAB_SIZE)
    expected = reference(target, PROMPTS)
    rounds = [*ROUNDS, *(OTHER_ROUNDS if name == next(iter(SERVED)) else ())]
    accepted = {drafter: 0 for drafter, _ in rounds}
    services = cluster(target, draft, drafters=",".join(DRAFTERS), kinds=KINDS)
    async with services as running, AsyncClient(running.address) as client:
        for drafter, count in rounds:
            speculation = SpeculationParams(num_draft_tokens=count, drafter=drafter)
            completions = await asyncio.gather(
                *(
                    client.complete(prompt_token_ids=prompt, sampling=GREEDY, speculation=speculation)
                    for prompt in PROMPTS
                )
            )
            assert [completion.tokens for completion in completions] == expected, f"{drafter}, K = {count}"
            accepted[drafter] += sum(completion.statistics.num_accepted_tokens for completion in completions)
    assert all(accepted.values()), f"some drafts were never accepted, so a bad cache would pass: {accepted}"


def noisy_copy(folder: Path, copy: Path) -> Path:
    """Save a model that often, but not always, agrees with the model in `folder`."""
    # transformers does not annotate the class that it loads
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.03 * parameter.std() if parameter.numel() > 1 else torch.tensor(0.0)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(copy)
    return copy
