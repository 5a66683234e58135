"""Once more through the network: real workers and a real coordinator, each a process, have the target's distribution.

`make exactness` runs the same with more generations, and prints the figures.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.exactness import (
    CASES,
    MAX_DEVIATIONS,
    NUM_TOKENS,
    PROMPT,
    Services,
    distributions_of,
    judge,
    save_pair,
    services,
)
from benchmarks.judging import agreement_of_counts, joint_distribution
from specdec import AcceptanceRuleName, AsyncClient, Completion, SamplingParams, SpeculationParams
from specdec.channel import open_channel
from specdec.exact.codec import distributions_from_proto
from specdec.exact.randomness import Key, Purpose, uniform
from specdec.exact.sampling import draw
from specdec.serving.session_stream import open_session
from specdec.v1 import draft_pb2, draft_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_GENERATIONS = 250  # a session takes some 15 ms; `make exactness` generates 20,000 a case
MORE_GENERATIONS = {
    "K = 3": 1_000,
    "penalties": 400,
    "plain, penalties": 400,
}  # whose disturbed target is the hardest to tell
NUM_SEEDS, NUM_COMPARED = 24, 32  # texts of so many tokens
REJECT_BELOW = 1e-6
LEFT_TO_MAKE_EXACTNESS = {  # which has every case; these differ from one below in what is proved without a network
    *("top_p 0.8", "top_k 3", "recycle, top_p 0.8", "eagle3, top_p 0.8", "tree, top_p 0.8"),
    *("suffix", "draft in int8", "dflash", "medusa", "self", "other tokenizer, penalties"),
    *("n-gram", "token rule", "grammar", "grammar, forced text", "grammar, other tokenizer"),
}
assert set(CASES) >= LEFT_TO_MAKE_EXACTNESS
# where the service chooses K come first: it drafts until it has learned that these small models gain nothing
TESTED = sorted(
    (name for name in CASES if name not in LEFT_TO_MAKE_EXACTNESS),
    key=lambda name: CASES[name].speculation.num_draft_tokens is not None,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Save target and draft."""
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers does not annotate it
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(pair: tuple[Path, Path]) -> AsyncIterator[Services]:
    """Run the services."""
    async with services(*pair) as started:
        yield started


@pytest.mark.parametrize("seed", range(20))
async def test_shipped_drafts_are_drawn_from_shipped_distributions(started: Services, seed: int) -> None:
    """Drawing again from the decoded distributions with the round's uniforms gives the shipped tokens, bit for bit."""
    response = await proposed(started.draft_address, SamplingParams(seed=seed, temperature=0.5 + seed / 10), 5)
    again = [
        draw(distribution, uniform(seed, Key(len(PROMPT), index, Purpose.DRAFT)))
        for index, distribution in enumerate(distributions_from_proto(response.distributions))
    ]
    assert again == list(response.tokens)
    assert len(again) == 5


async def proposed(address: str, sampling: SamplingParams, num_draft_tokens: int) -> draft_pb2.ProposeResponse:
    """Ask a draft worker for one proposal after the prompt."""
    opening = draft_pb2.OpenDraft(
        session=open_session(f"distribution-{sampling.seed}", 1, sampling, len(PROMPT)), drafter="model"
    )
    async with open_channel(address) as channel:
        stream = draft_pb2_grpc.DraftServiceStub(channel).Propose()
        await stream.write(draft_pb2.ProposeRequest(open=opening))
        propose = draft_pb2.Propose(start=0, tokens=PROMPT, num_draft_tokens=num_draft_tokens)
        await stream.write(draft_pb2.ProposeRequest(propose=propose))
        response = await stream.read()
        assert isinstance(response, draft_pb2.ProposeResponse)
        await stream.done_writing()
        return response


@pytest.mark.parametrize("name", [name for name in TESTED if CASES[name].draft == "draft"])
@pytest.mark.long(but=("automatic", "tree", "grammar, tree"))
async def test_text_through_the_network_has_the_targets_distribution(
    name: str, started: Services, pair: tuple[Path, Path]
) -> None:
    """Joint chi-square over four tokens; the acceptance rate is the analytic one."""
    await check(name, started, *pair)


@pytest.mark.parametrize("num_draft_tokens", [6, None])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "recycle", "eagle3", "dflash", "medusa"])
@pytest.mark.long(but=("recycle-None", "eagle3-6"))
async def test_chosen_drafts_leave_the_text_of_a_seed(
    drafter: str, num_draft_tokens: int | None, started: Services
) -> None:
    """Token for token that of plain decoding, many sessions at a time, whatever they learn from each other."""
    speculation = SpeculationParams(num_draft_tokens=num_draft_tokens, drafter=drafter)
    drafted = await texts_like_plain_ones(started, speculation)
    if num_draft_tokens:  # else the service drafts until it knows that nothing is gained
        assert sum(text.finish.statistics.num_accepted_tokens for text in drafted) > NUM_SEEDS


@pytest.mark.parametrize("drafter", ["model", None])
async def test_drafts_leave_the_text_of_a_seed_where_the_service_chooses(
    drafter: str | None, started: Services
) -> None:
    """Also those of a model, which guesses what the target will draw."""
    drafted = await texts_like_plain_ones(started, SpeculationParams(drafter=drafter))
    if not any(text.finish.statistics.num_draft_tokens for text in drafted):
        assert drafter == "model"  # what is looked up costs nothing, so it is always drafted
        pytest.skip("the model's drafts cost too much beside whatever else runs here")


@pytest.mark.parametrize("rule", [None, AcceptanceRuleName.TOKEN])
async def test_texts_are_others_where_a_rule_tests_drawn_drafts(
    rule: AcceptanceRuleName | None, started: Services
) -> None:
    """So the tests above can fail."""
    speculation = SpeculationParams(drafter="model", num_draft_tokens=4, acceptance_rule=rule)
    plain, drafted = await plain_and_drafted(started, speculation)
    assert [text.tokens for text in drafted] != [text.tokens for text in plain]


async def texts_like_plain_ones(started: Services, speculation: SpeculationParams) -> Sequence[Completion]:
    """Return the texts of all seeds, each of which is that of plain decoding."""
    plain, drafted = await plain_and_drafted(started, speculation)
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]
    assert not any(text.finish.statistics.num_draft_tokens for text in plain)
    return drafted


async def plain_and_drafted(
    started: Services, speculation: SpeculationParams
) -> tuple[Sequence[Completion], Sequence[Completion]]:
    """Return the texts of all seeds, decoded in either way at once."""
    async with AsyncClient(started.stack.address) as client:
        asked = [
            (seed, each) for seed in range(NUM_SEEDS) for each in (SpeculationParams(num_draft_tokens=0), speculation)
        ]
        texts = await asyncio.gather(*(text_of(client, seed, each) for seed, each in asked))
    return texts[::2], texts[1::2]


async def text_of(client: AsyncClient, seed: int, speculation: SpeculationParams) -> Completion:
    sampling = SamplingParams(seed=seed, max_new_tokens=NUM_COMPARED, ignore_eos=True)
    return await client.complete(prompt_token_ids=PROMPT, sampling=sampling, speculation=speculation)


@pytest.mark.parametrize("name", [name for name in TESTED if CASES[name].draft == "other"])
@pytest.mark.long
async def test_drafts_of_another_tokenizer_leave_the_distribution(name: str, pair: tuple[Path, Path]) -> None:
    """As above; the draft lacks one of the target's tokens, and reads the text in other ones."""
    target, disturbed = pair
    other = disturbed.parent / "other"
    async with services(target, other) as started:
        await check(name, started, target, other)


async def check(name: str, started: Services, target: Path, draft: Path) -> None:
    """Judge a case, with so many texts that those of the disturbed target would be rejected by far."""
    num_generations = MORE_GENERATIONS.get(name, NUM_GENERATIONS)
    expected, disturbed = (
        joint_distribution(distributions_of(folder, CASES[name].sampling), NUM_TOKENS)
        for folder in (target, target.parent / "draft")
    )
    assert agreement_of_counts(disturbed * num_generations, expected).p_value < REJECT_BELOW**2
    result = await judge(name, num_generations, started, target, draft)
    print(f"{name}: {result.agreement}, {result.deviations:+.1f} standard errors")
    assert result.agreement.p_value > REJECT_BELOW
    assert abs(result.deviations) < MAX_DEVIATIONS
    assert result.drafts_came, f"{result.num_failed_drafts} rounds went on without their drafter"
    assert len(result.completions) == num_generations
