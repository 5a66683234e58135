"""Greedy text equals transformers' own `generate`, token for token: every architecture, through real servers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import AsyncClient, SamplingParams, SpeculationParams
from tests.support.architectures import SERVED, VOCAB_SIZE, build
from tests.support.cluster import cluster, save_tokenizer

NUM_TOKENS = 64
PROMPTS = [[(7 * length + 3 * place) % 300 + 2 for place in range(length)] for length in (1, 2, 3, 5, 8, 13, 21, 34)]
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
async def test_greedy_equals_transformers(name: str, tmp_path: Path) -> None:
    """8 sessions at once, of different lengths, for each K, with a draft that agrees with the target now and then."""
    target = save_tokenizer(build(name, tmp_path / "target"), VOCAB_SIZE)
    draft = save_tokenizer(noisy_copy(target, tmp_path / "draft"), VOCAB_SIZE)
    expected = reference(target, PROMPTS)
    accepted = 0
    async with cluster(target, draft) as running, AsyncClient(running.address) as client:
        for count in (0, 1, 4, 8):
            speculation = SpeculationParams(num_draft_tokens=count)
            completions = await asyncio.gather(
                *(
                    client.complete(prompt_token_ids=prompt, sampling=GREEDY, speculation=speculation)
                    for prompt in PROMPTS
                )
            )
            assert [completion.tokens for completion in completions] == expected, f"K = {count}"
            accepted += sum(completion.finish.statistics.num_accepted_tokens for completion in completions)
    assert accepted > 0, "no draft was ever accepted: this test would not see a bad cache"


def noisy_copy(folder: Path, copy: Path) -> Path:
    """Save a model that often, but not always, says what the model in `folder` says."""
    # transformers does not annotate the class that it loads
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.03 * parameter.std() if parameter.numel() > 1 else torch.tensor(0.0)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(copy)
    return copy
