"""A target in int8 through real servers: its text is its own, whatever is drafted, and whatever the load."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.measure import held_out_prompts
from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.engine import Feed, load_language_model
from specdec.serving.tokenizer import load_tokenizer
from tests.support.cluster import Cluster, cluster, patient_rounds

MODELS = Path(__file__).parents[2] / "models"
NUM_TOKENS = 24
NUM_SESSIONS = 16
PLAIN = SpeculationParams(num_draft_tokens=0)
CHAINS, TREES = (
    SpeculationParams(num_draft_tokens=count, drafter=drafter) for drafter, count in (("model", 4), ("recycle", 8))
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Cluster]:
    """The demo pair in int8; prompts are read in small pieces, which rounds of others make smaller still."""
    rounded = {"draft_quantization": "int8"}
    target = {"quantization": "int8", "prefill_chunk_tokens": 64}
    pair = MODELS / "target", MODELS / "draft"
    with patient_rounds() as patience_s:
        served = cluster(
            *pair, drafters="model,recycle", draft_settings=rounded, target_settings=target, draft_timeout_s=patience_s
        )
        async with served as running:
            yield running


def prompts() -> list[str]:
    """Return prompts of different lengths from the held-out files."""
    texts = list(held_out_prompts(MODELS / "heldout").values())
    return [texts[number % len(texts)][: 60 + 31 * number] for number in range(NUM_SESSIONS)]


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS, ignore_eos=True)


def seeded(number: int) -> SamplingParams:
    """Return parameters that differ from session to session."""
    temperature, top_p = 1.0 if number % 2 else 0.8, 0.95 if number % 3 else 1.0
    return SamplingParams(temperature=temperature, top_p=top_p, seed=number, max_new_tokens=NUM_TOKENS, ignore_eos=True)


async def texts_at_once(
    served: Cluster, asked: Sequence[tuple[str, SamplingParams]], speculation: SpeculationParams
) -> list[tuple[int, ...]]:
    async with AsyncClient(served.address) as client:
        calls = [client.complete(prompt, sampling=sampling, speculation=speculation) for prompt, sampling in asked]
        return [completion.tokens for completion in await asyncio.gather(*calls)]


@pytest.fixture(scope="module")
def plain_decoding() -> list[tuple[int, ...]]:
    """The greedy texts of the model in int8, decoded token by token without any service."""
    model = load_language_model(
        str(MODELS / "target"), device="cpu", dtype="float32", kv_cache_bytes=64 << 20, quantization="int8"
    )
    tokenizer = load_tokenizer(str(MODELS / "target"))
    results = []
    for number, text in enumerate(prompts()):
        sequence, tokens = model.cache.open(str(number)), list(tokenizer.encode(text).ids)
        prompt_length = len(tokens)
        while len(tokens) < prompt_length + NUM_TOKENS:
            logits = model.forward([Feed(sequence, tokens[sequence.length :], 1)]).logits
            tokens.append(int(logits.argmax()))
        results.append(tuple(tokens[prompt_length:]))
    return results


@pytest.mark.parametrize("speculation", [PLAIN, CHAINS, TREES], ids=["plain", "model", "recycle"])
@pytest.mark.long(but=("recycle",))
async def test_greedy_text_equals_plain_decoding(
    served: Cluster, plain_decoding: list[tuple[int, ...]], speculation: SpeculationParams
) -> None:
    found = await texts_at_once(served, [(prompt, greedy()) for prompt in prompts()], speculation)
    assert found == plain_decoding


@pytest.mark.long
async def test_seeded_texts_do_not_depend_on_load(served: Cluster) -> None:
    asked = [(prompt, seeded(number)) for number, prompt in enumerate(prompts())]
    for speculation in (PLAIN, CHAINS):
        alone = [(await texts_at_once(served, [each], speculation))[0] for each in asked[::3]]
        assert (await texts_at_once(served, asked, speculation))[::3] == alone
        assert len(set(alone)) == len(alone)
