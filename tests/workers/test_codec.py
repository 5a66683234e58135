"""The values of a round to protobuf and back; malformed answers of workers are refused."""

import math
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import InvalidArgumentError
from specdec.exact import codec
from specdec.exact.lookup import NUM_LENGTHS, NextRound
from specdec.exact.tree import chain_parents
from specdec.exact.values import (
    Observations,
    PositionLogprobs,
    Proposal,
    Scores,
    SparseDistribution,
    TargetDistribution,
    one_hot,
)
from specdec.serving import session_stream
from specdec.types import MAX_DRAFT_TOKENS, SamplingParams
from specdec.v1 import draft_pb2, target_pb2, types_pb2

VOCAB_SIZE = 50
PROPERTY = settings(deadline=None, derandomize=True, database=None)


def distribution(weights: list[float]) -> tuple[float, ...]:
    array = np.array(weights, np.float32) + np.float32(1e-3)
    return tuple((array / array.sum()).tolist())


@st.composite
def sparse_distributions(draw: st.DrawFn) -> SparseDistribution:
    ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6, unique=True))
    weights = draw(st.lists(st.floats(0, 1), min_size=len(ids), max_size=len(ids)))
    return SparseDistribution(tuple(ids), distribution(weights))


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Chains and trees, with distributions that siblings share and one-hot ones."""
    chosen = draw(st.lists(sparse_distributions(), max_size=5))
    chosen = [draw(st.sampled_from(chosen)) for _ in chosen]
    tokens = tuple(draw(st.sampled_from(each.token_ids)) for each in chosen)
    parents = tuple(draw(st.integers(0, index)) for index in range(len(tokens)))
    return Proposal(tokens, tuple(chosen), () if parents == chain_parents(len(tokens)) else parents)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Proposal, Scores]:
    """A proposal and the target's answer to it."""
    proposal = draw(proposals())
    sizes = [len(token_ids) for token_ids in proposal.unions()]
    distributions = [
        distribution(draw(st.lists(st.floats(0, 1), min_size=size + 1, max_size=size + 1))) for size in sizes
    ]
    tails = [draw(st.integers(0, VOCAB_SIZE - 1)) for _ in sizes]
    targets = tuple(
        TargetDistribution(each[:-1], each[-1], tail) for each, tail in zip(distributions, tails, strict=True)
    )
    logprobs = draw(st.sampled_from([(), logprobs_for(proposal, tails)]))
    return proposal, Scores(targets, logprobs, draw(st.none() | observations(len(proposal))))


@st.composite
def observations(draw: st.DrawFn, num_draft_tokens: int) -> Observations:
    """Observations of some committed tokens and of all draft tokens."""
    count = draw(st.integers(1, 4)) + num_draft_tokens
    kinds = draw(st.sampled_from([(4, 0), (0, 8), (4, 8)]))
    hidden, top = ([bytes([index]) * size for index in range(count)] if size else [] for size in kinds)
    return Observations(draw(st.integers(0, 9)), tuple(hidden), tuple(top))


def logprobs_for(proposal: Proposal, tails: list[int]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs({token: -0.5 for token in (*support, tail)}, ((3, -0.25), (4, -math.inf)))
        for support, tail in zip(proposal.unions(), tails, strict=True)
    )


# ---- round trips


@PROPERTY
@given(st.lists(sparse_distributions(), max_size=4))
def test_distributions_come_back_bit_for_bit(given_: list[SparseDistribution]) -> None:
    assert codec.distributions_from_proto(codec.distributions_to_proto(given_)) == given_
    supports = codec.distributions_to_proto(given_, with_probs=False)
    assert supports.probs == b""
    assert codec.supports_from_proto(supports) == [list(one.token_ids) for one in given_]


@PROPERTY
@given(proposals())
def test_proposals_come_back(proposal: Proposal) -> None:
    message = draft_pb2.ProposeResponse.FromString(codec.proposal_to_proto(proposal).SerializeToString())
    assert codec.proposal_from_proto(message, len(proposal), VOCAB_SIZE) == proposal


@PROPERTY
@given(proposals())
def test_supports_come_back_for_the_target(proposal: Proposal) -> None:
    message = target_pb2.Score.FromString(codec.score_to_proto(3, [5], proposal).SerializeToString())
    assert message.supports.probs == b""
    assert codec.draft_supports_from_proto(message) == [list(each.token_ids) for each in proposal.distributions]
    assert codec.checked_parents(message.parents, len(proposal)) == proposal.parents


def test_candidates_without_a_draw_ship_ids_only() -> None:
    tree = Proposal((7, 8, 9), (one_hot(7), one_hot(8), one_hot(9)), (0, 0, 1))
    message = codec.proposal_to_proto(tree)
    assert (list(message.tokens), list(message.parents), list(message.sources)) == ([7, 8, 9], [0, 0, 1], [0, 0, 0])
    assert message.distributions == types_pb2.SparseDistributions()


def test_siblings_ship_a_shared_distribution_once() -> None:
    shared = SparseDistribution((1, 2), (0.25, 0.75))
    message = codec.proposal_to_proto(Proposal((1, 2, 1), (shared,) * 3, (0, 0, 0)))
    assert (list(message.sources), len(message.distributions.sizes)) == ([1, 1, 1], 4)


@PROPERTY
@given(exchanges())
def test_scores_come_back(exchange: tuple[Proposal, Scores]) -> None:
    proposal, scores = exchange
    message = target_pb2.ScoreResponse.FromString(codec.scores_to_proto(scores).SerializeToString())
    assert codec.scores_from_proto(message, proposal, VOCAB_SIZE) == scores


def test_a_session_s_opening_comes_back() -> None:
    params = SamplingParams(seed=3, temperature=0.5)
    message = session_stream.open_session("s", 2, params, 4)
    assert (message.session_id, message.epoch, message.num_prompt_tokens) == ("s", 2, 4)
    assert session_stream.check_open(message, VOCAB_SIZE) == params


def test_arrays_are_little_endian() -> None:
    packed = codec.distributions_to_proto([SparseDistribution((1, 258), (0.5, 0.5))])
    assert (packed.sizes, packed.token_ids) == (b"\x02\0\0\0", b"\x01\0\0\0\x02\x01\0\0")
    assert packed.probs == b"\0\0\0\x3f" * 2


# ---- openings


@pytest.mark.parametrize("change", [{"session_id": ""}, {"epoch": 0}, {"sampling": types_pb2.SamplingParams()}])
def test_incomplete_openings_are_refused(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"session_id": "s", "epoch": 1, "sampling": types_pb2.SamplingParams(seed=1)}
    session_stream.check_open(types_pb2.OpenSession(**good), VOCAB_SIZE)
    message = types_pb2.OpenSession(**good | change)
    with pytest.raises(InvalidArgumentError, match=r"needs a session_id|need the resolved"):
        session_stream.check_open(message, VOCAB_SIZE)


# ---- malformed answers of workers

GOOD = [SparseDistribution((1, 2), (0.25, 0.75)), SparseDistribution((3,), (1.0,))]
PROPOSAL = Proposal((2, 3), tuple(GOOD))
U, F = codec.UINT32, codec.FLOAT32


def packed(values: Sequence[float], dtype: np.dtype[Any]) -> bytes:
    return np.array(values, dtype).tobytes()


def good_proposal() -> draft_pb2.ProposeResponse:
    """The proposal with both distributions shipped, the one-hot one too."""
    return draft_pb2.ProposeResponse(tokens=PROPOSAL.tokens, distributions=codec.distributions_to_proto(GOOD))


BAD_DISTRIBUTIONS: dict[str, dict[str, bytes]] = {
    "half a value": {"probs": b"\0\0\0"},
    "fewer ids than sizes say": {"token_ids": packed([1, 2], U)},
    "more ids than sizes say": {"token_ids": packed([1, 2, 3, 4], U)},
    "an empty support": {"sizes": packed([3, 0], U)},
    "a support too large": {"sizes": packed([1025, 1], U), "token_ids": packed(list(range(1026)), U)},
    "a token twice": {"token_ids": packed([2, 2, 3], U)},
    "fewer probabilities": {"probs": packed([0.25, 0.75], F)},
    "no probabilities": {"probs": b""},
    "a zero": {"probs": packed([0.0, 1.0, 1.0], F)},
    "a negative": {"probs": packed([-0.25, 1.25, 1.0], F)},
    "NaN": {"probs": packed([math.nan, 0.75, 1.0], F)},
    "infinity": {"probs": packed([math.inf, 0.75, 1.0], F)},
    "a sum of less than 1": {"probs": packed([0.25, 0.74, 1.0], F)},
    "a sum of more than 1": {"probs": packed([0.25, 0.75, 1.01], F)},
    "a distribution too few": {"sizes": packed([3], U), "probs": packed([0.25, 0.5, 0.25], F)},
    "a token past the vocabulary": {"token_ids": packed([50, 2, 3], U)},
    "the token not in its own support": {"token_ids": packed([1, 4, 3], U)},
}


def test_the_good_proposal_is_taken() -> None:
    assert codec.proposal_from_proto(good_proposal(), 2, VOCAB_SIZE) == PROPOSAL


@pytest.mark.parametrize("name", BAD_DISTRIBUTIONS)
def test_bad_proposals_are_refused(name: str) -> None:
    message = good_proposal()
    for field, value in BAD_DISTRIBUTIONS[name].items():
        setattr(message.distributions, field, value)
    with pytest.raises(codec.MalformedReply):
        codec.proposal_from_proto(message, 2, VOCAB_SIZE)


@pytest.mark.parametrize(("tokens", "asked"), [((2,), 2), ((2, 3, 3), 3), ((2, 3), 1), ((3, 2), 2), ((), 2)])
def test_proposals_of_wrong_length_or_order_are_refused(tokens: tuple[int, ...], asked: int) -> None:
    message = good_proposal()
    message.tokens[:] = tokens
    with pytest.raises(codec.MalformedReply):
        codec.proposal_from_proto(message, asked, VOCAB_SIZE)


BAD_TREES: dict[str, dict[str, list[int]]] = {
    "a parent that comes after its child": {"parents": [2, 0]},
    "a token that is its own parent": {"parents": [0, 2]},
    "a parent that does not exist": {"parents": [0, 9]},
    "fewer parents than tokens": {"parents": [0]},
    "more parents than tokens": {"parents": [0, 1, 2]},
    "fewer sources than tokens": {"sources": [1]},
    "a source that does not exist": {"sources": [1, 3]},
    "a distribution that nothing was drawn from": {"sources": [1, 0]},
    "a source without the token": {"sources": [2, 1]},
}


@pytest.mark.parametrize("name", BAD_TREES)
def test_bad_trees_are_refused(name: str) -> None:
    message = good_proposal()
    for field, value in BAD_TREES[name].items():
        getattr(message, field)[:] = value
    with pytest.raises(codec.MalformedReply):
        codec.proposal_from_proto(message, 2, VOCAB_SIZE)


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_every_cycle_is_refused(num_tokens: int) -> None:
    """All parents that there could be: a tree reaches the root from each token, and names parents first."""
    for parents in product(range(num_tokens + 2), repeat=num_tokens):
        if all(parent <= token for token, parent in enumerate(parents)):
            assert codec.checked_parents(parents, num_tokens) in (parents, ())
            continue
        with pytest.raises(codec.MalformedReply, match="that are not a tree, parents first"):
            codec.checked_parents(parents, num_tokens)


BAD_OBSERVATIONS = {
    "of nothing": types_pb2.Observations(start=1, count=2),
    "at no token": types_pb2.Observations(start=1, hidden_states=b"1234"),
    "that cannot be split": types_pb2.Observations(start=1, count=3, top_tokens=b"1234"),
}


@pytest.mark.parametrize("name", BAD_OBSERVATIONS)
def test_bad_observations_are_refused(name: str) -> None:
    with pytest.raises(codec.MalformedReply):
        codec.observations_from_proto(BAD_OBSERVATIONS[name])


def good_scores() -> target_pb2.ScoreResponse:
    positions = (
        TargetDistribution((0.5, 0.25), 0.25, 9),
        TargetDistribution((1.0,), 0.0, 8),
        TargetDistribution((), 1.0, 7),
    )
    return codec.scores_to_proto(Scores(positions, logprobs_for(PROPOSAL, [9, 8, 7])))


def with_logprobs(index: int, **changes: Any) -> Callable[[target_pb2.ScoreResponse], None]:
    def change(message: target_pb2.ScoreResponse) -> None:
        for field, value in changes.items():
            setattr(message.logprobs[index], field, value)

    return change


def with_fields(**changes: bytes) -> Callable[[target_pb2.ScoreResponse], None]:
    def change(message: target_pb2.ScoreResponse) -> None:
        for field, value in changes.items():
            setattr(message, field, value)

    return change


BAD_SCORES: dict[str, Callable[[target_pb2.ScoreResponse], None]] = {
    "nothing": lambda message: message.Clear(),
    "half a value": with_fields(tail_mass=b"\0" * 11),
    "a distribution too few": with_fields(tail_mass=packed([0.25, 0.0], F), tail_tokens=packed([9, 8], U)),
    "a distribution too many": with_fields(tail_mass=packed([0.25, 0, 1, 1], F), tail_tokens=packed([9, 8, 7, 7], U)),
    "tails of two lengths": with_fields(tail_tokens=packed([9, 8], U)),
    "fewer probabilities": with_fields(support_probs=packed([0.5, 0.25], F)),
    "more probabilities": with_fields(support_probs=packed([0.5, 0.25, 1, 0], F)),
    "NaN on a support": with_fields(support_probs=packed([math.nan, 0.25, 1], F)),
    "a NaN tail": with_fields(tail_mass=packed([0.25, math.nan, 1], F)),
    "a negative": with_fields(support_probs=packed([-0.5, 1.25, 1], F)),
    "infinity": with_fields(tail_mass=packed([math.inf, 0, 1], F)),
    "no distribution": with_fields(support_probs=packed([0.5, 0.2, 1], F)),
    "a bonus distribution that is no distribution": with_fields(tail_mass=packed([0.25, 0, 0.9], F)),
    "a tail token past the vocabulary": with_fields(tail_tokens=packed([9, 8, 50], U)),
    "log probabilities of fewer positions": lambda message: message.logprobs.__delitem__(2),
    "log probabilities of more positions": lambda message: message.logprobs.append(message.logprobs[0]),
    "log probabilities without the tail token": with_logprobs(2, token_ids=packed([6, 3, 4], U)),
    "log probabilities without a token of the support": with_logprobs(0, token_ids=packed([1, 5, 9, 3, 4], U)),
    "log probabilities that are NaN": with_logprobs(2, logprobs=packed([math.nan, -1, -1], F)),
    "top log probabilities that are NaN": with_logprobs(2, logprobs=packed([-1, math.nan, -1], F)),
    "log probabilities of other lengths": with_logprobs(2, logprobs=packed([-1, -1], F)),
    "more top tokens than there are": with_logprobs(2, num_top=4),
    "top tokens past the vocabulary": with_logprobs(2, token_ids=packed([7, 50, 4], U)),
    "too many top tokens": with_logprobs(
        2, token_ids=packed([7] + [1] * 21, U), logprobs=packed([-1] * 22, F), num_top=21
    ),
}


CHOSEN = Proposal((5, 6), (one_hot(5), one_hot(6)))


def matched_scores(**changes: bytes) -> target_pb2.ScoreResponse:
    """Return the answer to a chosen draft, with what is changed in it."""
    message = codec.scores_to_proto(
        Scores(tuple(TargetDistribution((), 1.0, token) for token in (5, 8, 7)), is_matched=True)
    )
    with_fields(**changes)(message)
    return message


def test_a_matched_answer_is_its_tokens() -> None:
    message = matched_scores()
    assert message.ByteSize() == 12 + 2 + 3, "three tokens, and that they are matched"
    scores = codec.scores_from_proto(message, CHOSEN, VOCAB_SIZE)
    assert scores.is_matched
    assert scores.positions == tuple(TargetDistribution((), 1.0, token) for token in (5, 8, 7))


@pytest.mark.parametrize(
    "changes", [{"tail_mass": packed([1] * 3, F)}, {"support_probs": packed([1, 1], F)}, {"tail_tokens": b"\0" * 8}]
)
def test_a_matched_answer_with_more_or_less_is_refused(changes: dict[str, bytes]) -> None:
    with pytest.raises(codec.MalformedReply):
        codec.scores_from_proto(matched_scores(**changes), CHOSEN, VOCAB_SIZE)


def test_a_drawn_draft_is_not_matched() -> None:
    """Its tokens would be accepted too rarely, and the text would not be the target's."""
    with pytest.raises(codec.MalformedReply, match="matched that was drawn"):
        codec.scores_from_proto(matched_scores(), PROPOSAL, VOCAB_SIZE)


def test_the_good_scores_are_taken() -> None:
    scores = codec.scores_from_proto(good_scores(), PROPOSAL, VOCAB_SIZE)
    assert [position.tail_token for position in scores.positions] == [9, 8, 7]
    assert scores.logprobs == logprobs_for(PROPOSAL, [9, 8, 7])


@pytest.mark.parametrize("name", BAD_SCORES)
def test_bad_scores_are_refused(name: str) -> None:
    message = good_scores()
    BAD_SCORES[name](message)
    with pytest.raises(codec.MalformedReply):
        codec.scores_from_proto(message, PROPOSAL, VOCAB_SIZE)


@PROPERTY
@given(st.binary(max_size=24), st.binary(max_size=24), st.binary(max_size=24), st.lists(st.integers(0, 60), max_size=3))
def test_noise_is_refused_or_is_a_proposal(sizes: bytes, ids: bytes, probs: bytes, tokens: list[int]) -> None:
    sparse = types_pb2.SparseDistributions(sizes=sizes, token_ids=ids, probs=probs)
    try:
        proposal = codec.proposal_from_proto(
            draft_pb2.ProposeResponse(tokens=tokens, distributions=sparse), 3, VOCAB_SIZE
        )
    except codec.MalformedReply:
        return
    assert all(abs(sum(each.probs) - 1) < 1e-3 for each in proposal.distributions)


@PROPERTY
@given(st.binary(max_size=16), st.binary(max_size=16), st.binary(max_size=16))
def test_noise_is_refused_or_is_scores(probs: bytes, mass: bytes, tokens: bytes) -> None:
    message = target_pb2.ScoreResponse(support_probs=probs, tail_mass=mass, tail_tokens=tokens)
    try:
        scores = codec.scores_from_proto(message, PROPOSAL, VOCAB_SIZE)
    except codec.MalformedReply:
        return
    assert all(position.tail_token < VOCAB_SIZE for position in scores.positions)


FLOOD = 200_000
ONES = packed([1] * FLOOD, U)


def offered() -> target_pb2.Offer:
    return target_pb2.Offer(draft_tokens=[1] * FLOOD)


def flooded(**fields: Any) -> target_pb2.ScoreResponse:
    message = good_scores()
    message.MergeFrom(target_pb2.ScoreResponse(**fields))
    return message


def with_many_rows() -> target_pb2.ScoreResponse:
    message = good_scores()
    message.logprobs.extend([message.logprobs[0]] * 20_000)
    return message


def with_a_long_row() -> target_pb2.ScoreResponse:
    message = good_scores()
    message.logprobs[0].MergeFrom(target_pb2.PositionLogprobs(token_ids=ONES, logprobs=ONES))
    return message


def proposed(**fields: Any) -> draft_pb2.ProposeResponse:
    return draft_pb2.ProposeResponse(**fields)


def read_scores(message: target_pb2.ScoreResponse) -> object:
    return codec.scores_from_proto(message, PROPOSAL, VOCAB_SIZE)


def read_proposal(message: draft_pb2.ProposeResponse) -> object:
    return codec.proposal_from_proto(message, 3, VOCAB_SIZE)


def test_observations_of_more_tokens_than_there_are_are_refused() -> None:
    codec.check_num_observed(types_pb2.Observations(count=7), 7)
    with pytest.raises(codec.MalformedReply, match="of 8 tokens, where there are 7"):
        codec.check_num_observed(types_pb2.Observations(count=8), 7)


FLOODS: dict[str, tuple[Callable[[Any], object], Any]] = {
    "observed layers": (
        lambda message: codec.observation_request_from_proto(message, 4),
        types_pb2.ObservationRequest(hidden_layers=[1] * FLOOD),
    ),
    "probabilities of supports": (read_scores, flooded(support_probs=ONES)),
    "tail masses": (read_scores, flooded(tail_mass=ONES)),
    "tail tokens": (read_scores, flooded(tail_tokens=ONES)),
    "log probabilities of many positions": (read_scores, with_many_rows()),
    "log probabilities of many tokens": (read_scores, with_a_long_row()),
    "offered tokens": (lambda message: codec.offer_from_proto(message, 4, VOCAB_SIZE), offered()),
    "draft tokens": (read_proposal, proposed(tokens=[1] * FLOOD)),
    "supports": (read_proposal, proposed(tokens=[1], distributions=types_pb2.SparseDistributions(sizes=ONES))),
    "tokens of supports": (
        read_proposal,
        proposed(
            tokens=[1],
            distributions=types_pb2.SparseDistributions(sizes=packed([1], U), token_ids=ONES, probs=packed([1], F)),
        ),
    ),
    "probabilities of drafts": (
        read_proposal,
        proposed(
            tokens=[1],
            distributions=types_pb2.SparseDistributions(sizes=packed([1], U), token_ids=packed([1], U), probs=ONES),
        ),
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_more_than_is_expected_is_refused_without_a_look(name: str) -> None:
    """A service that reads a million values serves nobody else meanwhile."""
    read, flood = FLOODS[name]
    tracemalloc.start()
    try:
        with pytest.raises(codec.MalformedReply):
            read(flood)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5 * FLOOD  # an array of bytes is copied where it is read, but not taken apart


@given(
    st.builds(
        NextRound,
        st.lists(st.integers(0, MAX_DRAFT_TOKENS), max_size=NUM_LENGTHS).map(tuple),
        st.booleans(),
        st.integers(1, 1000),
        st.integers(0, MAX_DRAFT_TOKENS),
        st.booleans(),
        st.sampled_from([0.0, 0.25, 1.0]),
    )
)
@PROPERTY
def test_what_follows_a_round_comes_back_as_it_was(next_round: NextRound) -> None:
    """But a text ends with the worker's context, and what is offered is learned of."""
    received = codec.next_round_from_proto(codec.next_round_to_proto(next_round), 500)
    learns = next_round.learns or next_round.num_offered > 0
    assert received == replace(next_round, max_length=min(next_round.max_length, 500), learns=learns)
