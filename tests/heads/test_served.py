"""Heads behind real servers: greedy text is the target's own, whatever is lost; what does not fit says so."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import held_out_prompts
from benchmarks.random_heads import eagle3_head, save_heads
from coordinator.draft import SessionDrafter
from specdec import AsyncClient, Completion, SamplingParams, SpeculationParams
from specdec.exact.values import Observations
from specdec.heads.formats.eagle3 import save_eagle3
from specdec.heads.formats.target import target_folder
from tests.support.architectures import build
from tests.support.cluster import Cluster, cluster, save_tokenizer
from tests.support.head_drafting import KINDS

TARGET = Path(__file__).parents[2] / "models" / "target"
NUM_SESSIONS = 8
DRAFT_VOCAB_SIZE = 400
K = 8
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """The demo target in float32, with untrained heads."""
    heads = save_heads(TARGET, tmp_path_factory.mktemp("heads"), DRAFT_VOCAB_SIZE)
    settings = {f"{kind}_head": str(heads[kind]) for kind in KINDS}
    async with cluster(
        TARGET, drafters=",".join(KINDS), draft_settings={**settings, "head_target": str(TARGET)}
    ) as running:
        yield running


async def texts(served: Cluster, speculation: SpeculationParams) -> list[Completion]:
    """Generate greedily, many sessions at once."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=32, ignore_eos=True)
    prompts = [text[:200] for text in list(held_out_prompts(TARGET.parent / "heldout").values())[:NUM_SESSIONS]]
    async with AsyncClient(served.address) as client:
        rounds = [client.complete(prompt, sampling=sampling, speculation=speculation) for prompt in prompts]
        return await asyncio.gather(*rounds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long(but=("eagle3",))
async def test_greedy_text_is_the_targets_own(served: Cluster, kind: str) -> None:
    plain = await texts(served, SpeculationParams(num_draft_tokens=0))
    drafted = await texts(served, SpeculationParams(num_draft_tokens=K, drafter=kind))
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    statistics = [each.finish.statistics for each in drafted]
    assert all(each.num_draft_tokens > each.num_rounds for each in statistics), "drafts were made in most rounds"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long(but=("medusa",))
async def test_lost_observations_cost_drafts_only(served: Cluster, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await texts(served, SpeculationParams(num_draft_tokens=K, drafter=kind))
    observe = SessionDrafter.observe

    def losing(self: SessionDrafter, observations: Observations) -> None:
        if observations.start % 3:
            observe(self, observations)

    monkeypatch.setattr(SessionDrafter, "observe", losing)
    losses = await texts(served, SpeculationParams(num_draft_tokens=K, drafter=kind))
    assert [each.tokens for each in losses] == [each.tokens for each in whole]
    drafted = [sum(each.finish.statistics.num_draft_tokens for each in found) for found in (losses, whole)]
    assert 0 < drafted[0] < drafted[1]


def shortened(folder: Path, to: Path) -> Path:
    """Save a target like another one, with two layers."""
    config = AutoConfig.from_pretrained(folder, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(to)  # type: ignore[no-untyped-call]
    return to


async def test_head_of_a_deeper_target_is_logged(tmp_path: Path) -> None:
    """The head was trained for a deeper target of the same vocabulary: rounds go on without drafts."""
    deep = save_tokenizer(build("qwen3", tmp_path / "deep"), 300)
    shallow = save_tokenizer(shortened(deep, tmp_path / "shallow"), 300)
    save_eagle3(eagle3_head(target_folder(str(deep))), tmp_path / "head", "deep", with_lm_head=False)
    settings = {"eagle3_head": str(tmp_path / "head"), "head_target": str(deep)}
    with structlog.testing.capture_logs() as logs:
        async with (
            cluster(shallow, drafters="eagle3", draft_settings=settings) as running,
            AsyncClient(running.address) as client,
        ):
            sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
            completion = await client.complete(prompt_token_ids=[1, 2, 3], sampling=sampling)
    assert len(completion.tokens) == 8
    (warning,) = [entry for entry in logs if entry["event"] == "drafter_observes_nothing"]
    assert (warning["drafter"], warning["target_layers"]) == ("eagle3", 2)
    assert 3 in warning["hidden_layers"]
