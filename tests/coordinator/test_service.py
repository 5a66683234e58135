"""What clients see through all three services: parameters, log probabilities, stops, sessions, lost workers."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from prometheus_client import REGISTRY
from transformers import AutoModelForCausalLM

from draft_service.model import ahead
from specdec import (
    AsyncClient,
    Completion,
    FinishReason,
    SamplingParams,
    SessionStatus,
    SpeculationParams,
    TokenOrigin,
)
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import Cluster, cluster, save_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [5, 17, 3, 200, 9]
SPECULATED = SpeculationParams(num_draft_tokens=4, drafter="model")
PLAIN = SpeculationParams(num_draft_tokens=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is its own draft: every token is accepted, so runs are long."""
    return save_tokenizer(build("llama", tmp_path_factory.mktemp("model")), VOCAB_SIZE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(folder: Path) -> AsyncIterator[Cluster]:
    """Both services with the same model."""
    async with cluster(folder, folder, max_draft_tokens=32) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Cluster) -> AsyncIterator[AsyncClient]:
    """A client of it."""
    async with AsyncClient(served.address) as opened:
        yield opened


GREEDY_PARAMETERS = {
    "plain": SamplingParams(),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "presence": SamplingParams(presence_penalty=3.0),
    "frequency": SamplingParams(frequency_penalty=1.5),
    "bias": SamplingParams(logit_bias={11: 4.0, 12: -4.0}),
    "all": SamplingParams(repetition_penalty=1.2, presence_penalty=1.0, frequency_penalty=0.7, logit_bias={7: 2.0}),
}


@pytest.mark.parametrize("name", GREEDY_PARAMETERS)
async def test_greedy_parameters_speculated_or_not(name: str, client: AsyncClient, folder: Path) -> None:
    """Penalties see the draft tokens before each row: the text is that of a plain loop over transformers."""
    given = GREEDY_PARAMETERS[name]
    sampling = SamplingParams(
        temperature=0,
        max_new_tokens=40,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=given.logit_bias,
        ignore_eos=True,
    )
    expected = greedy_loop(folder, sampling)
    for speculation in (PLAIN, SPECULATED, SpeculationParams(num_draft_tokens=4, drafter="ngram")):
        completion = await client.complete(prompt_token_ids=PROMPT, sampling=sampling, speculation=speculation)
        assert list(completion.tokens) == expected, speculation
    assert len(set(expected)) > 1


def greedy_loop(folder: Path, sampling: SamplingParams) -> list[int]:
    """Generate token by token, from the definitions of the penalties (Keskar et al. 2019; OpenAI's for the others)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    completion: list[int] = []
    for _ in range(sampling.max_new_tokens or 0):
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + completion])).logits[0, -1].tolist()
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        for token in {*PROMPT, *completion}:
            penalty = sampling.repetition_penalty
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        for token in set(completion):
            logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * completion.count(token)
        completion.append(max(range(len(logits)), key=logits.__getitem__))
    return completion


@pytest.mark.parametrize("speculation", [PLAIN, SPECULATED], ids=["plain", "speculated"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_logprobs(client: AsyncClient, folder: Path, speculation: SpeculationParams, temperature: float) -> None:
    """Each token's log probability and the best tokens are the model's own, for any sampling parameters."""
    sampling = SamplingParams(
        temperature=temperature, top_k=5, max_new_tokens=20, num_logprobs=3, seed=4, ignore_eos=True
    )
    completion = await client.complete(prompt_token_ids=PROMPT, sampling=sampling, speculation=speculation)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *completion.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    distributions = logits.log_softmax(-1)
    assert len(completion.logprobs) == len(completion.tokens) == 20
    for token, entry, distribution in zip(completion.tokens, completion.logprobs, distributions, strict=True):
        assert math.isclose(entry.logprob, distribution[token].item(), abs_tol=1e-3)
        best = distribution.topk(3)
        assert [top for top, _ in entry.top] == best.indices.tolist()
        assert torch.allclose(torch.tensor([value for _, value in entry.top]), best.values, atol=1e-3)


async def test_same_seed_same_text(client: AsyncClient) -> None:
    sampling = SamplingParams(seed=11, max_new_tokens=30, ignore_eos=True)
    first, again = [
        await client.complete(prompt_token_ids=PROMPT, sampling=sampling, speculation=SPECULATED) for _ in range(2)
    ]
    other = await client.complete(
        prompt_token_ids=PROMPT, sampling=SamplingParams(seed=12, max_new_tokens=30, ignore_eos=True)
    )
    assert first.tokens == again.tokens
    assert first.digest == again.digest
    assert first.tokens != other.tokens


async def test_a_draft_like_the_target_is_always_accepted(client: AsyncClient) -> None:
    """The only symptom of a stale draft row or a hole in the draft's cache is a lower acceptance rate."""
    sampling = SamplingParams(temperature=0, max_new_tokens=41, ignore_eos=True)
    completion = await client.complete(prompt_token_ids=PROMPT, sampling=sampling, speculation=SPECULATED)
    statistics = completion.finish.statistics
    assert statistics.acceptance_rate == 1
    assert statistics.num_rounds == math.ceil(41 / 5)
    assert set(completion.origins) == {TokenOrigin.ACCEPTED, TokenOrigin.BONUS}


async def test_rounds_drafted_ahead_are_requested(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft like the target guesses every closing token, so each round is requested that is drafted ahead of that."""
    monkeypatch.setattr(ahead, "LEAST_CHANCE", 2.0)  # of no rejection

    def total(name: str) -> float:
        return REGISTRY.get_sample_value(f"specdec_draft_ahead_{name}_total") or 0.0

    before = total("rounds"), total("hits")
    sampling = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    for _ in range(4):
        await client.complete(prompt_token_ids=PROMPT, sampling=sampling, speculation=SPECULATED)
    assert total("hits") - before[1] == total("rounds") - before[0]
    print(f"{total('rounds') - before[0]:.0f} rounds drafted ahead")


async def greedy(client: AsyncClient, **fields: object) -> Completion:
    """Return a greedy, speculated completion."""
    sampling = SamplingParams(temperature=0, **{"max_new_tokens": 40, "ignore_eos": True} | fields)  # type: ignore[arg-type]
    return await client.complete(prompt_token_ids=PROMPT, sampling=sampling, speculation=SPECULATED)


async def test_ends(client: AsyncClient) -> None:
    """Never past a stop or the length, at any place in an accepted run; tokens and usage are cut together."""
    whole = await greedy(client)
    for position in range(12):
        token = whole.tokens[position]
        first = whole.tokens.index(token)
        stopped = await greedy(client, stop_token_ids=(token,))
        assert stopped.tokens == whole.tokens[: first + 1]
        assert stopped.finish.reason is FinishReason.STOP
        short = await greedy(client, max_new_tokens=position + 1)
        assert short.tokens == whole.tokens[: position + 1]
        assert short.finish.reason is FinishReason.LENGTH
        assert short.finish.usage.num_completion_tokens == position + 1
    word = f"t{whole.tokens[7]} "
    text = await greedy(client, stop=(word,))
    assert word not in text.text
    assert whole.text.startswith(text.text)
    assert text.finish.reason is FinishReason.STOP


async def test_generation_reaches_the_end_of_the_context(client: AsyncClient) -> None:
    """The last token of the context is reached, with and without speculation, and never passed."""
    context = (await client.get_model()).context_length
    prompt = [7] * (context - 9)
    for speculation in (PLAIN, SPECULATED, SpeculationParams(num_draft_tokens=32)):
        sampling = SamplingParams(temperature=0, ignore_eos=True)
        completion = await client.complete(prompt_token_ids=prompt, sampling=sampling, speculation=speculation)
        assert len(completion.tokens) == 9
        assert completion.finish.reason is FinishReason.LENGTH


async def test_session_is_readable(client: AsyncClient) -> None:
    completion = await greedy(client)
    session = await client.get_session(completion.session_id)
    assert session.status is SessionStatus.FINISHED
    assert session.tokens == completion.tokens
    assert session.text == completion.text
    assert session.digest == completion.digest
    assert session.num_prompt_tokens == len(PROMPT)
    replayed = [chunk async for chunk in client.resume(completion.session_id)]
    assert tuple(token for chunk in replayed for token in chunk.tokens) == completion.tokens
    assert tuple(origin for chunk in replayed for origin in chunk.origins) == completion.origins


async def test_followers_of_one_request(client: AsyncClient) -> None:
    """The same request_id, sent many times at once, is one session."""
    sampling = SamplingParams(seed=3, max_new_tokens=30, ignore_eos=True)
    calls = [client.complete(prompt_token_ids=PROMPT, sampling=sampling, request_id="one") for _ in range(8)]
    completions = await asyncio.gather(*calls)
    assert len({completion.session_id for completion in completions}) == 1
    assert len({completion.tokens for completion in completions}) == 1


async def test_text_is_the_same_without_draft_workers(folder: Path) -> None:
    """Without any draft worker the text is the same."""
    async with cluster(folder, folder, draft="127.0.0.1:1") as running, AsyncClient(running.address) as client:
        sampling = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
        completion = await client.complete(prompt_token_ids=PROMPT, sampling=sampling, speculation=SPECULATED)
        assert completion.finish.statistics.num_draft_tokens == 0
        assert len(completion.tokens) == 20
        assert (await client.get_model()).drafters == ()
