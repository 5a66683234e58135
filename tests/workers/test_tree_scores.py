"""The target worker on trees and observations, through real servers."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from specdec.engine import LanguageModel
from specdec.exact import codec
from specdec.exact.tree import path_to
from specdec.exact.values import ObservationRequest, Proposal, Scores, SparseDistribution, one_hot
from specdec.serving.session_stream import open_session
from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from specdec.v1 import target_pb2_grpc
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer
from tests.workers.test_target_service import served

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [5, 6, 7, 8, 9, 10]
WINDOW = 4
SHARED = SparseDistribution((11, 12, 200), (0.5, 0.25, 0.25))
OTHER = SparseDistribution((12, 40), (0.5, 0.5))
# two drawn siblings and a chosen one at the root, one of which comes twice; then two levels below the second
TREE = Proposal(
    tokens=(11, 12, 12, 40, 30, 31),
    distributions=(SHARED, SHARED, OTHER, OTHER, one_hot(30), one_hot(31)),
    parents=(0, 0, 0, 2, 2, 4),
)
PARAMETERS = {
    "plain": SamplingParams(seed=7),
    "greedy": SamplingParams(seed=7, temperature=0),
    "penalties": SamplingParams(seed=7, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
    "truncated": SamplingParams(seed=7, top_p=0.7, top_k=40),
}


class Session:
    """One session at a worker, as the coordinator plays it."""

    def __init__(
        self, channel: grpc.aio.Channel, name: str, sampling: SamplingParams, request: ObservationRequest | None = None
    ) -> None:
        self._call = target_pb2_grpc.TargetServiceStub(channel).Score()
        self._observations = codec.observation_request_to_proto(request or ObservationRequest())
        self._opening: Any = (name, sampling)

    async def score(self, start: int, tokens: Sequence[int], proposal: Proposal) -> Scores:
        """Score a proposal after the committed tokens."""
        if self._opening:
            name, sampling = self._opening
            opening = open_session(name, 1, sampling, len(PROMPT))
            await self._call.write(
                pb.ScoreRequest(open=pb.OpenTarget(session=opening, observations=self._observations))
            )
            self._opening = None
        await self._call.write(pb.ScoreRequest(score=codec.score_to_proto(start, tokens, proposal)))
        reply = await self._call.read()
        assert reply is not grpc.aio.EOF
        assert reply.cached_len == start + len(tokens)
        return codec.scores_from_proto(reply, proposal, VOCAB_SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(build("llama", tmp_path_factory.mktemp("target")), VOCAB_SIZE)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """Transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with served(folder, observation_window=WINDOW) as connected:
        yield connected


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Iterator[str]:
    """Session ids that no other test uses."""
    return (f"{request.node.name} {number}" for number in range(1000))


@pytest.fixture
def num_fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that each forward computes."""
    counts: list[int] = []
    forward = LanguageModel.forward

    def counting(self: LanguageModel, feeds: Any) -> Any:
        feeds = list(feeds)
        counts.append(sum(len(feed.tokens) for feed in feeds))
        return forward(self, feeds)

    monkeypatch.setattr(LanguageModel, "forward", counting)
    return counts


def assert_equal(scores: Scores, other: Scores) -> None:
    """Compare scores of two ways of asking."""
    for position, expected in zip(scores.positions, other.positions, strict=True):
        assert position.support_probs == pytest.approx(expected.support_probs, abs=1e-5)
        assert position.tail_mass == pytest.approx(expected.tail_mass, abs=1e-5)


@pytest.mark.parametrize("name", PARAMETERS)
async def test_every_position_scores_as_on_its_own_path(
    name: str, channel: grpc.aio.Channel, names: Iterator[str]
) -> None:
    """A tree position has the target's distribution after its path, whatever its siblings are."""
    scores = await Session(channel, next(names), PARAMETERS[name]).score(0, PROMPT, TREE)
    for position, union in enumerate(TREE.unions()):
        path = [TREE.tokens[index] for index in path_to(position, TREE.tree)]
        asked = SparseDistribution(union or (0, 1), (1 / len(union or (0, 1)),) * len(union or (0, 1)))
        chain = Proposal((*path, asked.token_ids[0]), (*map(one_hot, path), asked))
        alone = await Session(channel, next(names), PARAMETERS[name]).score(0, PROMPT, chain)
        expected = alone.positions[len(path)]
        found = scores.positions[position]
        if union:
            assert found.support_probs == pytest.approx(expected.support_probs, abs=1e-5)
            assert found.tail_mass == pytest.approx(expected.tail_mass, abs=1e-5)
        else:
            assert found.tail_mass == pytest.approx(1)


@pytest.mark.parametrize("leaf", range(len(TREE)))
async def test_the_accepted_path_is_kept(
    leaf: int, channel: grpc.aio.Channel, names: Iterator[str], num_fed: list[int]
) -> None:
    """The next round computes the closing token and its own tree, and scores as a session that reads everything."""
    session = Session(channel, next(names), PARAMETERS["plain"])
    await session.score(0, PROMPT, TREE)
    accepted = [TREE.tokens[index] for index in path_to(leaf + 1, TREE.tree)]
    committed = [*PROMPT, *accepted, 77]
    num_fed.clear()
    scores = await session.score(len(PROMPT), [*accepted, 77], TREE)
    assert num_fed == [1 + len(TREE)]
    assert_equal(scores, await Session(channel, next(names), PARAMETERS["plain"]).score(0, committed, TREE))


LAYERS = ObservationRequest(hidden_layers=(0, 1, 2), num_top_tokens=3)


async def test_observations_are_the_models_own(channel: grpc.aio.Channel, names: Iterator[str], model: Any) -> None:
    scores = await Session(channel, next(names), PARAMETERS["plain"], LAYERS).score(0, PROMPT, TREE)
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


async def test_later_rounds_observe_what_is_fed(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    """Accepted tokens were observed in the round before."""
    session = Session(channel, next(names), PARAMETERS["plain"], LAYERS)
    await session.score(0, PROMPT, TREE)
    scores = await session.score(len(PROMPT), [12, 77], TREE)
    assert scores.observations is not None
    assert (scores.observations.start, len(scores.observations)) == (len(PROMPT) + 1, 1 + len(TREE))


async def test_nothing_is_observed_unasked(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    scores = await Session(channel, next(names), PARAMETERS["plain"]).score(0, PROMPT, TREE)
    assert scores.observations is None


BAD_REQUESTS = {
    "a layer past the last": ObservationRequest(hidden_layers=(0, 99)),
    "too many layers": ObservationRequest(hidden_layers=(1,) * 9),
    "too many top tokens": ObservationRequest(num_top_tokens=65),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_impossible_observations_are_refused(name: str, channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"open\.observations") as refused:
        await Session(channel, next(names), PARAMETERS["plain"], BAD_REQUESTS[name]).score(0, PROMPT, TREE)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


MALFORMED: dict[str, Callable[[pb.Score], None]] = {
    "a parent after its child": lambda score: score.parents.__setitem__(slice(None), [2, 0, 0, 2, 2, 4]),
    "fewer parents": lambda score: score.parents.__delitem__(0),
    "a source that does not exist": lambda score: score.sources.__setitem__(0, 9),
    "fewer sources": lambda score: score.sources.__delitem__(0),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_trees_are_refused(name: str, channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    call = target_pb2_grpc.TargetServiceStub(channel).Score()
    opening = open_session(next(names), 1, PARAMETERS["plain"], len(PROMPT))
    await call.write(pb.ScoreRequest(open=pb.OpenTarget(session=opening)))
    message = codec.score_to_proto(0, PROMPT, TREE)
    MALFORMED[name](message)
    await call.write(pb.ScoreRequest(score=message))
    with pytest.raises(grpc.aio.AioRpcError, match="malformed proposal") as refused:
        await call.read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
