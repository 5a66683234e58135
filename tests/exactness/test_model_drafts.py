"""Greedy text with the drafters that run a model in some other form: equal to transformers' own `generate`."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from specdec import AsyncClient, SpeculationParams
from tests.exactness.test_greedy import GREEDY, PROMPTS, reference
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import cluster, save_tokenizer
from tests.support.other_tokenizer import save_draft_of_other_tokenizer


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
async def test_greedy_text_is_the_targets_with_self(name: str, tmp_path: Path) -> None:
    target = save_tokenizer(build(name, tmp_path / "target"), VOCAB_SIZE)
    await check_greedy(target, "self", {"self_model": str(target), "self_layers": "0,2"})


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.long(but=("int8",))
async def test_greedy_text_is_the_targets_with_rounded_drafts(quantization: str) -> None:
    target = Path(__file__).parents[2] / "models" / "target"
    await check_greedy(target, "model", {"model": str(target), "draft_quantization": quantization})


async def test_greedy_text_is_the_targets_with_another_tokenizer(tmp_path: Path) -> None:
    target = Path(__file__).parents[2] / "models" / "target"
    draft = save_draft_of_other_tokenizer(tmp_path)
    await check_greedy(target, "model", {"model": str(draft), "target_tokenizer": str(target)})


async def check_greedy(target: Path, drafter: str, settings: Mapping[str, object]) -> None:
    """Generate 8 texts at once with one drafter; some of its tokens must be accepted."""
    expected = reference(target, PROMPTS)
    speculation = SpeculationParams(num_draft_tokens=4, drafter=drafter)
    async with (
        cluster(target, drafters=drafter, draft_settings=settings) as running,
        AsyncClient(running.address) as client,
    ):
        generating = [
            client.complete(prompt_token_ids=prompt, sampling=GREEDY, speculation=speculation) for prompt in PROMPTS
        ]
        completions = await asyncio.gather(*generating)
    assert [completion.tokens for completion in completions] == expected
    assert sum(completion.statistics.num_accepted_tokens for completion in completions), "a bad cache would pass"
