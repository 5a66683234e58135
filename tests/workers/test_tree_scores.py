"""The target worker on trees and observations, through real servers."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from specdec.exact import codec
from specdec.exact.tree import path_to
from specdec.exact.values import ObservationRequest, Proposal, Scores, SparseDistribution, TargetDistribution, one_hot
from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer
from tests.support.worker_streams import PLAIN, PROMPT, TargetStream, connected_target, score_request
from tests.workers.conftest import Forwards

pytestmark = pytest.mark.asyncio(loop_scope="module")
WINDOW = 4
SHARED = SparseDistribution((11, 12, 200), (0.5, 0.25, 0.25))
OTHER = SparseDistribution((12, 40), (0.5, 0.5))
# two drawn siblings and a one-hot one at the root, one of them repeated; then two levels below the second
TREE = Proposal(
    tokens=(11, 12, 12, 40, 30, 31),
    distributions=(SHARED, SHARED, OTHER, OTHER, one_hot(30), one_hot(31)),
    parents=(0, 0, 0, 2, 2, 4),
)
PARAMETERS = {
    "plain": PLAIN,
    "greedy": SamplingParams(seed=7, temperature=0),
    "penalties": SamplingParams(seed=7, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
    "truncated": SamplingParams(seed=7, top_p=0.7, top_k=40),
}


async def scored(stream: TargetStream, start: int, tokens: Sequence[int], proposal: Proposal) -> Scores:
    """Score a proposal after the committed tokens."""
    answer = await stream.ask(pb.ScoreRequest(score=codec.score_to_proto(start, tokens, proposal)))
    assert answer.cached_len == start + len(tokens)
    return codec.scores_from_proto(answer, proposal, VOCAB_SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(build("llama", tmp_path_factory.mktemp("target")), VOCAB_SIZE)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """Transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with connected_target(folder, observation_window=WINDOW) as connected:
        yield connected


def assert_equal(scores: Scores, other: Scores) -> None:
    """Compare scores of two ways of asking."""
    for position, expected in zip(scores.positions, other.positions, strict=True):
        assert position.support_probs == pytest.approx(expected.support_probs, abs=1e-5)
        assert position.tail_mass == pytest.approx(expected.tail_mass, abs=1e-5)


@pytest.mark.parametrize("name", PARAMETERS)
async def test_positions_score_as_on_their_own_path(name: str, channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    """A tree position has the target's distribution after its path, independent of its siblings."""
    scores = await scored(TargetStream(channel, next(names), PARAMETERS[name]), 0, PROMPT, TREE)
    for position, union in enumerate(TREE.unions()):
        path = [TREE.tokens[index] for index in path_to(position, TREE.tree)]
        asked = SparseDistribution(union or (0, 1), (1 / len(union or (0, 1)),) * len(union or (0, 1)))
        chain = Proposal((*path, asked.token_ids[0]), (*map(one_hot, path), asked))
        stream = TargetStream(channel, next(names), PARAMETERS[name], matches_chosen=False)
        alone = await scored(stream, 0, PROMPT, chain)
        expected = alone.positions[len(path)]
        found = scores.positions[position]
        if union:
            assert found.support_probs == pytest.approx(expected.support_probs, abs=1e-5)
            assert found.tail_mass == pytest.approx(expected.tail_mass, abs=1e-5)
        else:
            assert found.tail_mass == pytest.approx(1)


@pytest.mark.parametrize("name", PARAMETERS)
async def test_a_chosen_tree_is_matched_with_what_plain_decoding_draws(
    name: str, channel: grpc.aio.Channel, names: Iterator[str]
) -> None:
    """At each position the token is the one that a plain round draws after its path; nothing else is answered."""
    tree = replace(TREE, distributions=tuple(map(one_hot, TREE.tokens)))
    scores = await scored(TargetStream(channel, next(names), PARAMETERS[name]), 0, PROMPT, tree)
    assert scores.is_matched
    for position, found in enumerate(scores.positions):
        text = [*PROMPT, *(TREE.tokens[index] for index in path_to(position, TREE.tree))]
        plain = await scored(TargetStream(channel, next(names), PARAMETERS[name]), 0, text, Proposal())
        assert found == TargetDistribution((), 1.0, plain.positions[0].tail_token)


@pytest.mark.parametrize("leaf", range(len(TREE)))
async def test_the_accepted_path_is_kept(
    leaf: int, channel: grpc.aio.Channel, names: Iterator[str], forwards: Forwards
) -> None:
    """The next round computes the closing token and its own tree, and scores as a session that reads everything."""
    session = TargetStream(channel, next(names))
    await scored(session, 0, PROMPT, TREE)
    accepted = [TREE.tokens[index] for index in path_to(leaf + 1, TREE.tree)]
    committed = [*PROMPT, *accepted, 77]
    forwards.sizes.clear()
    scores = await scored(session, len(PROMPT), [*accepted, 77], TREE)
    assert forwards.sizes == [1 + len(TREE)]
    assert_equal(scores, await scored(TargetStream(channel, next(names)), 0, committed, TREE))


LAYERS = ObservationRequest(hidden_layers=(0, 1, 2), num_top_tokens=3)


async def test_observations_are_the_models_own(channel: grpc.aio.Channel, names: Iterator[str], model: Any) -> None:
    scores = await scored(TargetStream(channel, next(names), PLAIN, observations=LAYERS), 0, PROMPT, TREE)
    observations = scores.observations
    assert observations is not None
    assert (observations.start, len(observations)) == (len(PROMPT) - WINDOW, WINDOW + len(TREE))
    for index in range(len(observations)):
        node = index - WINDOW
        text = PROMPT[: len(PROMPT) + node + 1] if node < 0 else path_text(node)
        hidden, top = own_observation(model, text)
        bits = np.frombuffer(observations.hidden_states[index], "<u2").astype(np.uint32) << 16
        assert torch.from_numpy(bits.view(np.float32).copy().reshape(3, -1)).allclose(hidden, atol=0.05, rtol=0.02)
        assert np.frombuffer(observations.top_tokens[index], "<u4").tolist() == top


def path_text(node: int) -> list[int]:
    """Return the text that ends with a token of the tree."""
    return [*PROMPT, *(TREE.tokens[index] for index in path_to(node + 1, TREE.tree))]


def own_observation(model: Any, text: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Return hidden states [layers, width] and top tokens after a text, by transformers' own forward."""
    with torch.inference_mode():
        output = model(torch.tensor([text]), output_hidden_states=True)
    hidden = torch.stack([output.hidden_states[layer][0, -1] for layer in LAYERS.hidden_layers])
    return hidden, output.logits[0, -1].topk(LAYERS.num_top_tokens).indices.tolist()


async def test_later_rounds_observe_only_new_tokens(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    """Accepted tokens were observed in the round before."""
    session = TargetStream(channel, next(names), PLAIN, observations=LAYERS)
    await scored(session, 0, PROMPT, TREE)
    scores = await scored(session, len(PROMPT), [12, 77], TREE)
    assert scores.observations is not None
    assert (scores.observations.start, len(scores.observations)) == (len(PROMPT) + 1, 1 + len(TREE))


async def test_nothing_is_observed_unless_requested(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    scores = await scored(TargetStream(channel, next(names)), 0, PROMPT, TREE)
    assert scores.observations is None


async def test_a_round_may_do_without_observations(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    """It scores the same; the rounds after it observe again, from their own tokens on."""
    session = TargetStream(channel, next(names), PLAIN, observations=LAYERS)
    await scored(session, 0, PROMPT, Proposal())
    quiet = await session.ask(score_request(start=len(PROMPT), tokens=[12], without_observations=True))
    assert not quiet.HasField("observations")
    assert quiet.tail_tokens == (await TargetStream(channel, next(names)).score(0, [*PROMPT, 12])).tail_tokens
    observations = (await scored(session, len(PROMPT) + 1, [77], Proposal())).observations
    assert observations is not None
    assert (observations.start, len(observations)) == (len(PROMPT) + 1, 1)


BAD_REQUESTS = {
    "a layer past the last": ObservationRequest(hidden_layers=(0, 99)),
    "too many layers": ObservationRequest(hidden_layers=(1,) * 9),
    "too many top tokens": ObservationRequest(num_top_tokens=65),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_impossible_observations_are_refused(name: str, channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    stream = TargetStream(channel, next(names), PLAIN, observations=BAD_REQUESTS[name])
    await stream.open()
    with pytest.raises(grpc.aio.AioRpcError, match=r"open\.observations") as refused:
        await stream.read()  # at once: grpc.aio loses the status where a write meets the stream's end
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


MALFORMED: dict[str, Callable[[pb.Score], None]] = {
    "a parent after its child": lambda score: score.parents.__setitem__(slice(None), [2, 0, 0, 2, 2, 4]),
    "fewer parents": lambda score: score.parents.__delitem__(0),
    "a source that does not exist": lambda score: score.sources.__setitem__(0, 9),
    "fewer sources": lambda score: score.sources.__delitem__(0),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_trees_are_refused(name: str, channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    message = codec.score_to_proto(0, PROMPT, TREE)
    MALFORMED[name](message)
    error = await TargetStream(channel, next(names)).fail(pb.ScoreRequest(score=message))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "malformed proposal" in (error.details() or "")
