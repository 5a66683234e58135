"""A head in the worker drafts what its network predicts, whatever arrived when, and for many sessions at once."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.random_heads import save_heads
from draft_service.heads.drafter import HeadDrafter
from specdec.drafting.request import DraftRequest
from specdec.errors import InvalidArgumentError, NonFiniteLogitsError, UnavailableError
from specdec.exact import race
from specdec.exact.prefix import chain
from specdec.exact.race import Race
from specdec.exact.randomness import Purpose, uniforms
from specdec.exact.sampling import draw
from specdec.exact.values import Observations, Proposal, one_hot
from specdec.heads.formats.dflash import load_dflash
from specdec.heads.formats.eagle3 import load_eagle3
from specdec.heads.formats.medusa import load_medusa
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from tests.heads.test_forwards import drafted
from tests.support.architectures import build
from tests.support.cluster import save_tokenizer
from tests.support.head_drafting import KINDS, TargetStates, asked, drafting, packed, session

NUM_TOKENS = 310  # of the tokenizer; the target has 320 rows
REDUCED = 60
TEXT = [7, 31, 250, 9, 100, 7, 31, 44, 2, 300, 17]
K = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with padded logits."""
    return save_tokenizer(build("qwen3", tmp_path_factory.mktemp("target")), NUM_TOKENS)


@pytest.fixture(scope="module")
def states(target: Path) -> TargetStates:
    """What the target computes."""
    return TargetStates(target)


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads of all kinds, with a reduced vocabulary."""
    return save_heads(target, tmp_path_factory.mktemp("heads"), REDUCED)


@pytest.fixture
def drafter(request: pytest.FixtureRequest, heads: dict[str, Path], target: Path) -> Any:
    """The drafter of a kind."""
    with drafting(request.param, heads[request.param], target) as drafter:
        yield drafter


all_kinds = pytest.mark.parametrize("drafter", KINDS, indirect=True)


def predicted(kind: str, head: Path, target: Path, states: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return the network's own probabilities [steps, V] of the most probable chain after a text; V is reduced."""
    text = torch.tensor(tokens)
    root = len(tokens) - 2
    if kind == "eagle3":
        network = load_eagle3(head, target)
        ids = network.vocabulary.target_ids
        for step in range(3):
            logits = drafted(network, states.float(), text[1:], root, step + 1)
            text = torch.cat((text, ids[logits[step].argmax()][None]))
    elif kind == "dflash":
        block = load_dflash(head, target)
        context = block.offered(states[:-1].float(), torch.arange(root + 1))
        logits = block.predict(text[-1], torch.tensor(root + 1), context, None)
    else:
        logits = load_medusa(head, target)(states[root, 0].float())
    return torch.softmax(logits, dim=-1)


@all_kinds
async def test_tree_follows_the_networks_predictions(
    drafter: HeadDrafter, heads: dict[str, Path], target: Path, states: TargetStates
) -> None:
    layers = drafter.observations.hidden_layers
    result = await asked(drafter, session(), TEXT, states.observations(TEXT, layers), K)
    probs = predicted(drafter.name, heads[drafter.name], target, states.states(TEXT, layers), TEXT)
    ids = load_medusa(heads["medusa"], target).vocabulary.target_ids
    proposal = result.proposal
    roots = [token for token, parent in zip(proposal.tokens, proposal.tree, strict=True) if parent == 0]
    assert roots == ids[probs[0].topk(len(roots)).indices].tolist()
    path = most_probable_path(proposal)
    assert path == [int(ids[row.argmax()]) for row in probs[: len(path)]]
    assert len(path) > 1 or probs[0].max() * probs[1].max() < 0.02, "a tree of one level shows too little"
    assert proposal.distributions == tuple(map(one_hot, proposal.tokens))


@all_kinds
async def test_in_a_matched_session_candidates_are_who_most_likely_wins(
    drafter: HeadDrafter, heads: dict[str, Path], target: Path, states: TargetStates
) -> None:
    """At two depths, each by the race of its place; the first is the most probable token, whose row is known."""
    layers = drafter.observations.hidden_layers
    probs = predicted(drafter.name, heads[drafter.name], target, states.states(TEXT, layers), TEXT)[:2]
    ids = load_medusa(heads["medusa"], target).vocabulary.target_ids

    def won(seed: int) -> list[list[int]]:
        races = [Race(seed, len(TEXT)), Race(seed, len(TEXT) + 1)]
        return race.likely_winners(probs.double().numpy(), races, 3, ids.numpy())[0]

    seeds = [seed for seed in range(300) if won(seed)[0][0] == int(ids[probs[0].argmax()])][:3]
    for seed in seeds:
        own = WorkerSession(f"matched {seed}", 1, SamplingParams(seed=seed), len(TEXT), is_matched=True)
        proposal = (await asked(drafter, own, TEXT, states.observations(TEXT, layers), K)).proposal
        children = proposal.children()
        assert proposal.is_chosen
        for winners, siblings in zip(won(seed), (children[0], children[children[0][0] + 1]), strict=True):
            tokens = [proposal.tokens[index] for index in siblings][:3]
            assert tokens == winners[: len(tokens)]
        assert children[0]


def most_probable_path(proposal: Proposal) -> list[int]:
    """Return the tokens of the first child of the first child and so on."""
    path, position = [], 0
    children = proposal.children()
    while children[position]:
        path.append(proposal.tokens[children[position][0]])
        position = children[position][0] + 1
    return path


async def after_rounds(
    drafter: HeadDrafter, name: str, states: TargetStates, ends: Sequence[int], tokens: Sequence[int] = TEXT
) -> Proposal:
    """Send a text in pieces that end at these lengths, with what is observed by then; return the last proposal."""
    layers, start, proposal = drafter.observations.hidden_layers, 0, Proposal()
    observed = states.states(tokens, layers)
    for end in ends:
        begin = max(0, start - 1)
        observations = packed(observed[begin : end - 1], begin) if end - 1 > begin else None
        result = await asked(drafter, session(name), tokens[:end], observations, K, start)
        proposal, start = result.proposal, end
    return proposal


@all_kinds
async def test_pieces_draft_as_the_whole(drafter: HeadDrafter, states: TargetStates) -> None:
    whole = await after_rounds(drafter, "whole", states, [len(TEXT)])
    assert len(whole) > 1
    assert await after_rounds(drafter, "pieces", states, [1, 4, 5, 9, len(TEXT)]) == whole


@all_kinds
async def test_rolled_back_text_leaves_nothing(drafter: HeadDrafter, states: TargetStates) -> None:
    layers = drafter.observations.hidden_layers
    other = [*TEXT[:6], 200, 201, 202, 203, 204]
    await asked(drafter, session("s"), other, states.observations(other, layers), K)
    observed = states.states(TEXT, layers)
    result = await asked(drafter, session("s"), TEXT, packed(observed[5:-1], 5), K, start=6)
    assert result.proposal == await after_rounds(drafter, "fresh", states, [len(TEXT)])


@all_kinds
async def test_repeated_request_gets_the_same_answer(drafter: HeadDrafter, states: TargetStates) -> None:
    observations = states.observations(TEXT, drafter.observations.hidden_layers)
    first = await asked(drafter, session(), TEXT, observations, K)
    again = await asked(drafter, session(), TEXT, observations, K)
    resent = await asked(drafter, session(), TEXT, None, K, start=len(TEXT) - 2)
    assert first.proposal == again.proposal == resent.proposal
    assert len(first.proposal)
    fewer = await asked(drafter, session(), TEXT, None, 3, start=len(TEXT))
    assert fewer.proposal.tokens == first.proposal.tokens[:3], "a shorter proposal is the beginning of a longer one"


@all_kinds
async def test_lost_states_pause_the_drafting(drafter: HeadDrafter, states: TargetStates) -> None:
    layers = drafter.observations.hidden_layers
    observed, end = states.states(TEXT, layers), len(TEXT)
    assert not (await asked(drafter, session(), TEXT[: end - 4], None, K)).proposal, "nothing was observed"
    lost = packed(observed[: end - 4], 0)  # without the state before the last token
    assert not (await asked(drafter, session(), TEXT[: end - 2], lost, K, end - 4)).proposal
    healed = await asked(drafter, session(), TEXT, packed(observed[end - 3 : -1], end - 3), K, end - 2)
    assert len(healed.proposal), "a gap is no obstacle"


@all_kinds
async def test_missing_tokens_are_asked_for_again(drafter: HeadDrafter, states: TargetStates) -> None:
    result = await asked(drafter, session(), TEXT, None, K, start=4)
    assert (result.proposal, result.cached_len) == (Proposal(), 0)
    await asked(drafter, session(), TEXT[:3], None, K)
    assert (await asked(drafter, session(), TEXT, None, K, start=4)).cached_len == 3
    drafter.forget(session())
    assert (await asked(drafter, session(), TEXT, None, K, start=3)).cached_len == 0


@all_kinds
async def test_other_tokens_are_asked_for_again(drafter: HeadDrafter) -> None:
    await asked(drafter, session(), TEXT[:-1], None, K)
    for text, held in ((TEXT, len(TEXT)), ([TEXT[0] + 1, *TEXT[1:]], 0)):
        digest = chain(b"", text[: len(TEXT) - 2])
        request = DraftRequest(len(TEXT) - 2, TEXT[-2:], K, prefix_digest=digest)
        assert (await drafter.propose(session(), request, match=False)).cached_len == held


@all_kinds
async def test_sessions_together_draft_as_alone(drafter: HeadDrafter, states: TargetStates) -> None:
    texts = [[*TEXT[shift:], *range(1, 2 + shift)] for shift in range(6)]
    layers = drafter.observations.hidden_layers
    observed = [states.observations(text, layers) for text in texts]
    alone = [
        (await asked(drafter, session(f"alone {n}"), text, seen, K)).proposal
        for n, (text, seen) in enumerate(zip(texts, observed, strict=True))
    ]
    rounds = [
        asked(drafter, session(f"{n}"), text, seen, K)
        for n, (text, seen) in enumerate(zip(texts, observed, strict=True))
    ]
    assert [result.proposal for result in await asyncio.gather(*rounds)] == alone
    assert len({proposal.tokens for proposal in alone}) > 1


@all_kinds
@pytest.mark.parametrize("num_bytes", [0, 2, 1000])
async def test_states_of_a_wrong_size_are_refused(drafter: HeadDrafter, num_bytes: int) -> None:
    observations = Observations(0, tuple(bytes(num_bytes) for _ in TEXT[1:]))
    with pytest.raises(InvalidArgumentError, match=f"{num_bytes} bytes of hidden states a token; this head reads"):
        await asked(drafter, session(), TEXT, observations, K)


@all_kinds
async def test_states_that_are_not_numbers_count_as_lost(drafter: HeadDrafter, states: TargetStates) -> None:
    layers = drafter.observations.hidden_layers
    observed = states.states(TEXT, layers).clone()
    observed[-2, 0, 0] = torch.nan
    assert not (await asked(drafter, session(), TEXT, packed(observed[:-1], 0), K)).proposal
    healthy = states.observations(TEXT, layers)
    assert len((await asked(drafter, session("other"), TEXT, healthy, K)).proposal)


@all_kinds
async def test_enormous_states_harm_their_session_only(drafter: HeadDrafter, states: TargetStates) -> None:
    layers = drafter.observations.hidden_layers
    enormous = torch.full_like(states.states(TEXT, layers), 3e38)
    enormous[:, :, ::2] *= -1
    harmed = asked(drafter, session("harmed"), TEXT, packed(enormous[:-1], 0), K)
    healthy = asked(drafter, session("healthy"), TEXT, states.observations(TEXT, layers), K)
    results = await asyncio.gather(harmed, healthy, return_exceptions=True)
    assert isinstance(results[0], NonFiniteLogitsError) or not isinstance(results[0], BaseException)
    assert results[1].proposal == await after_rounds(drafter, "fresh", states, [len(TEXT)])  # type: ignore[union-attr]


@all_kinds
async def test_padding_and_unknown_tokens_are_not_drafted(drafter: HeadDrafter, states: TargetStates) -> None:
    result = await asked(drafter, session(), TEXT, states.observations(TEXT, drafter.observations.hidden_layers), 32)
    assert max(result.proposal.tokens) < NUM_TOKENS
    assert {token % (320 // REDUCED) for token in result.proposal.tokens} == {0}, "the head has every fifth token"


@pytest.mark.parametrize("kind", KINDS)
async def test_least_recent_sessions_are_evicted(
    kind: str, heads: dict[str, Path], target: Path, states: TargetStates
) -> None:
    with drafting(kind, heads[kind], target, kv_cache_bytes=1 << 16) as drafter:
        observations = states.observations(TEXT, drafter.observations.hidden_layers)
        for number in range(64):
            await asked(drafter, session(f"{number}"), TEXT, observations, 2)
        lengths = [
            (await asked(drafter, session(f"{number}"), TEXT, None, 0, len(TEXT))).cached_len for number in (0, 63)
        ]
    assert lengths == [0, len(TEXT)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sampling", [{}, {"top_p": 0.7}, {"frequency_penalty": 1.5}, {"temperature": 0.0}, {"logit_bias": {5: 60.0}}]
)
async def test_chains_are_drawn_from_what_is_shipped(
    kind: str, sampling: dict[str, Any], heads: dict[str, Path], target: Path, states: TargetStates
) -> None:
    with drafting(kind, heads[kind], target, head_shape="chain") as drafter:
        asking = session(num_prompt_tokens=5, **sampling)
        observations = states.observations(TEXT, drafter.observations.hidden_layers)
        proposal = (await asked(drafter, asking, TEXT, observations, 3)).proposal
    draws = uniforms(asking.seed, len(TEXT), 3, Purpose.DRAFT)
    assert len(proposal) == 3
    assert proposal.is_chain
    assert [draw(*pair) for pair in zip(proposal.distributions, draws, strict=True)] == list(proposal.tokens)
    sizes = {len(distribution.token_ids) for distribution in proposal.distributions}
    assert (sizes == {1}) == bool(sampling.keys() & {"temperature", "logit_bias"})
    assert proposal.tokens == (5, 5, 5) or "logit_bias" not in sampling


@pytest.mark.parametrize("kind", KINDS)
async def test_session_with_top_p_ranks_by_it(
    kind: str, heads: dict[str, Path], target: Path, states: TargetStates
) -> None:
    with drafting(kind, heads[kind], target) as drafter:
        observations = states.observations(TEXT, drafter.observations.hidden_layers)
        whole = (await asked(drafter, session("a"), TEXT, observations, K)).proposal
        nucleus = (await asked(drafter, session("b", top_k=1), TEXT, observations, K)).proposal
        penalised = (await asked(drafter, session("c", repetition_penalty=1.4), TEXT, observations, K)).proposal
    assert nucleus.is_chain
    assert not whole.is_chain
    assert len(penalised)


async def test_loop_that_ended_refuses_rounds(heads: dict[str, Path], target: Path, states: TargetStates) -> None:
    with drafting("medusa", heads["medusa"], target) as drafter:
        pass
    with pytest.raises(UnavailableError, match="ask another worker"):
        await asked(drafter, session(), TEXT, None, K)
