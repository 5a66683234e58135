"""A target worker observes the accepted draft tokens alone where it matches them, through real servers."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from specdec.exact import codec
from specdec.exact.acceptance import matched
from specdec.exact.values import ObservationRequest, Proposal, Scores, SparseDistribution, one_hot
from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer
from tests.support.worker_streams import PROMPT, TargetStream, connected_target

pytestmark = pytest.mark.asyncio(loop_scope="module")
WINDOW = 4
LAYERS = ObservationRequest(hidden_layers=(0, 1), num_top_tokens=2)
NUM_SEEDS = 25


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[grpc.aio.Channel]:
    folder: Path = save_tokenizer(build("llama", tmp_path_factory.mktemp("target")), VOCAB_SIZE)
    async with connected_target(folder, observation_window=WINDOW) as connected:
        yield connected


async def answered(stream: TargetStream, proposal: Proposal) -> Scores:
    """Score a proposal after the prompt, in the first round of a session."""
    answer = await stream.ask(pb.ScoreRequest(score=codec.score_to_proto(0, PROMPT, proposal)))
    return codec.scores_from_proto(answer, proposal, VOCAB_SIZE)


async def likely_tree(channel: grpc.aio.Channel, name: str) -> Proposal:
    """Return the two likeliest tokens after the prompt, and after each of them the two likeliest again."""

    async def best(*drawn: int) -> list[int]:
        scores = await answered(
            TargetStream(channel, f"{name}, after {drawn}", observations=ObservationRequest(num_top_tokens=2)),
            Proposal(drawn, tuple(map(one_hot, drawn))),
        )
        assert scores.observations is not None
        top = scores.observations.top_tokens[-1]
        return [int.from_bytes(top[at : at + 4], "little") for at in (0, 4)]

    first = await best()
    second = [token for parent in first for token in await best(parent)]
    tokens = (*first, *second)
    return Proposal(tokens, tuple(map(one_hot, tokens)), (0, 0, 1, 1, 2, 2))


async def test_they_are_those_that_the_coordinator_accepts(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    """Of many seeds, at temperatures 0 and low: paths of every length, and each of them is the coordinator's own."""
    tree, lengths = await likely_tree(channel, next(names)), Counter[int]()
    for seed, temperature in product(range(1, NUM_SEEDS + 1), (0.0, 0.02, 1.0)):
        sampling = SamplingParams(seed=seed, temperature=temperature)
        told = await answered(TargetStream(channel, next(names), sampling, observations=LAYERS), tree)
        older = TargetStream(channel, next(names), sampling, observations=LAYERS, matches_chosen=False)
        whole = await answered(older, tree)
        path = matched(tree.tokens, tree.tree, told).path
        lengths[len(path)] += 1
        assert whole.observations is not None
        assert told.observed == path
        assert told.observations == whole.observations.select([*range(WINDOW), *(WINDOW + token for token in path)])
    assert min(lengths[length] for length in range(3)) > 0, lengths


async def test_all_are_observed_where_only_top_tokens_are_asked_for(
    channel: grpc.aio.Channel, names: Iterator[str]
) -> None:
    """They are few bytes; leaving some out would take longer than sending them."""
    tree = await likely_tree(channel, next(names))
    request = ObservationRequest(num_top_tokens=2)
    scores = await answered(TargetStream(channel, next(names), observations=request), tree)
    older = TargetStream(channel, next(names), observations=LAYERS, matches_chosen=False)
    whole = await answered(older, tree)
    assert scores.observed is None
    assert scores.observations is not None
    assert whole.observations is not None
    assert scores.observations.top_tokens == whole.observations.top_tokens


@pytest.mark.parametrize("name", ["drawn", "an older coordinator"])
async def test_all_are_observed_where_the_worker_cannot_know(
    name: str, channel: grpc.aio.Channel, names: Iterator[str]
) -> None:
    """Probabilities of draft distributions never reach the worker."""
    tree = await likely_tree(channel, next(names))
    if name == "drawn":
        shared = SparseDistribution(tree.tokens[:2], (0.5, 0.5))
        tree = replace(tree, distributions=(shared, shared, *tree.distributions[2:]))
    scores = await answered(
        TargetStream(channel, next(names), observations=LAYERS, matches_chosen=name == "drawn"), tree
    )
    assert scores.observed is None
    assert scores.observations is not None
    assert len(scores.observations) == WINDOW + len(tree)


@pytest.mark.parametrize("indices", [(1, 0), (0, 0), (6,), range(1000)])
async def test_impossible_draft_tokens_are_refused(
    indices: tuple[int, ...], channel: grpc.aio.Channel, names: Iterator[str]
) -> None:
    tree = await likely_tree(channel, next(names))
    stream = TargetStream(channel, next(names), observations=LAYERS)
    answer = await stream.ask(pb.ScoreRequest(score=codec.score_to_proto(0, PROMPT, tree)))
    answer.observed.indices.extend(indices)
    with pytest.raises(codec.MalformedReply, match="rising indices below 6"):
        codec.scores_from_proto(answer, tree, VOCAB_SIZE)
