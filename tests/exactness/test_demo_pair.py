"""The committed demo pair, through real servers: many sessions at once, each with the text that it has alone."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from benchmarks.measure import held_out_prompts
from specdec import AsyncClient, Completion, SamplingParams, SpeculationParams
from specdec.engine.native import has_pairs
from tests.support.cluster import Cluster, cluster, patient_rounds

MODELS = Path(__file__).parents[2] / "models"
NUM_SESSIONS = 64
LARGE = 8  # sessions in a forward
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["float32", "bfloat16"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """The demo pair, in types in which no position depends on its batch."""
    if request.param == "bfloat16" and not has_pairs():
        pytest.skip("this processor has no instructions for our kernel of bfloat16, or there is no kernel")
    number_type = {"dtype": request.param}
    with patient_rounds() as patience_s:
        async with cluster(
            MODELS / "target",
            MODELS / "draft",
            draft_timeout_s=patience_s,
            target_settings=number_type,
            draft_settings=number_type,
        ) as running:
            yield running


def prompts() -> list[str]:
    """Return prompts of different lengths from the held-out files."""
    texts = list(held_out_prompts(MODELS / "heldout").values())
    return [texts[number % len(texts)][: 40 + 9 * number] for number in range(NUM_SESSIONS)]


def sampling(number: int) -> SamplingParams:
    """Return parameters that differ from session to session; every other one is greedy."""
    temperature = 0.0 if number % 2 else 0.8
    top_p = 0.9 if number % 4 == 0 else 1.0
    return SamplingParams(temperature=temperature, top_p=top_p, seed=number, max_new_tokens=16, ignore_eos=True)


@pytest.mark.long
async def test_64_sessions_at_once_are_as_alone(served: Cluster) -> None:
    """A single session is drafted ahead, 64 sessions are not: the proposals are the same too."""
    async with AsyncClient(served.address) as client:

        async def run(number: int, prompt: str) -> Completion:
            speculation = SpeculationParams(num_draft_tokens=number % 5, drafter="model")
            return await client.complete(prompt, sampling=sampling(number), speculation=speculation)

        # each of the five numbers of draft tokens comes, greedy and not
        alone = [await run(number, prompt) for number, prompt in enumerate(prompts()) if number % 3 == 0]
        num_hits, before = read("specdec_draft_ahead_hits_total"), large_batches()
        all_together = await asyncio.gather(*(run(number, prompt) for number, prompt in enumerate(prompts())))
    together = all_together[::3]
    num_large = large_batches() - before
    num_ahead = read("specdec_draft_ahead_rounds_total")
    print(f"{num_hits:.0f} of at most {num_ahead:.0f} rounds drafted ahead were asked for, with one session at a time")
    print(f"{NUM_SESSIONS} sessions: more than {LARGE} of them in each of {num_large:.0f} forwards")
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert [each.text for each in together] == [each.text for each in alone]
    drafted = [
        [(each.finish.statistics.num_rounds, each.finish.statistics.num_accepted_tokens) for each in completions]
        for completions in (together, alone)
    ]
    assert drafted[0] == drafted[1]
    assert num_large >= 5, "else nothing was compared but sessions that were nearly alone"
    assert num_hits > 10


async def test_greedy_text_is_that_of_plain_decoding(served: Cluster) -> None:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=48, ignore_eos=True)
    async with AsyncClient(served.address) as client:

        async def run(prompt: str, num_draft_tokens: int) -> Completion:
            speculation = SpeculationParams(num_draft_tokens=num_draft_tokens, drafter="model")
            return await client.complete(prompt, sampling=greedy, speculation=speculation)

        chosen = prompts()[:NUM_SESSIONS:6]
        plain = await asyncio.gather(*(run(prompt, 0) for prompt in chosen))
        for num_draft_tokens in (1, 4, 8):
            drafted = [await run(prompt, num_draft_tokens) for prompt in chosen]
            assert [each.tokens for each in drafted] == [each.tokens for each in plain]
            assert sum(each.statistics.num_accepted_tokens for each in drafted) > 0


def large_batches() -> float:
    """Return how many forwards scored more than `LARGE` sessions so far."""
    name = "specdec_target_batch_sessions"
    return read(f"{name}_count") - read(f"{name}_bucket", le=f"{LARGE:.1f}")


def read(name: str, **labels: str) -> float:
    """Return a metric of the services."""
    return REGISTRY.get_sample_value(name, labels) or 0.0
