"""A round's bytes, of serialised messages: kilobytes, unless a drafter asks for the target's hidden states."""

import pytest

from benchmarks.wire import (
    CHAIN_TOKENS,
    FLAT,
    HIDDEN_SIZE,
    NUM_ACCEPTED,
    PEAKED,
    VOCAB_SIZE,
    Way,
    drawn_chain,
    messages,
    observed,
    sizes,
    ways,
)
from specdec.exact import codec
from specdec.v1 import draft_pb2, target_pb2

MAX_BYTES = 8_000
WAYS = ways()
all_ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


@pytest.mark.parametrize("scale", [FLAT, 1.0, 3.0, PEAKED])
def test_a_round_takes_few_kilobytes(scale: float) -> None:
    """From uniform distributions, whose supports have the maximum size, to nearly one-hot ones."""
    total = sum(sizes(Way("model", drawn_chain(CHAIN_TOKENS, scale))).values())
    assert 0 < total < MAX_BYTES
    assert total < 4 * VOCAB_SIZE * CHAIN_TOKENS / 100, "far below dense float32 distributions"


@all_ways
def test_messages_are_what_the_services_read(way: Way) -> None:
    sent = messages(way.proposal, way.wanted)
    proposed, scored = sent["ProposeResponse"], sent["ScoreResponse"]
    assert isinstance(proposed, draft_pb2.ProposeResponse)
    assert isinstance(scored, target_pb2.ScoreResponse)
    proposal = codec.proposal_from_proto(proposed, len(way.proposal), VOCAB_SIZE)
    assert (proposal.tokens, proposal.tree) == (way.proposal.tokens, way.proposal.tree)
    scores = codec.scores_from_proto(scored, way.proposal, VOCAB_SIZE)
    assert len(scores.positions) == len(way.proposal) + 1


@all_ways
def test_observations_travel_only_when_asked_for(way: Way) -> None:
    sent = messages(way.proposal, way.wanted)
    propose, scored = sent["ProposeRequest"], sent["ScoreResponse"]
    assert isinstance(propose, draft_pb2.ProposeRequest)
    assert isinstance(scored, target_pb2.ScoreResponse)
    asks = way.name.split(",")[0] in ("recycle", "medusa", "eagle3", "dflash")
    assert propose.propose.HasField("observations") is scored.HasField("observations") is bool(way.wanted) is asks
    if not asks:
        assert sum(sizes(way).values()) < MAX_BYTES


@all_ways
def test_hidden_states_are_nearly_all_of_it(way: Way) -> None:
    """Two bytes a value, at every committed token, from the target and to the drafter."""
    num_layers = len(way.wanted.hidden_layers)
    hidden_bytes = 2 * 2 * HIDDEN_SIZE * num_layers * (NUM_ACCEPTED + 1)
    assert 0 <= sum(sizes(way).values()) - hidden_bytes < MAX_BYTES


def test_nothing_is_observed_for_nobody() -> None:
    assert observed(WAYS[0].wanted, 5) is None
