"""Values to protobuf and back; what clients and workers get wrong is refused, and said in words."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import messages
from specdec.errors import InvalidArgumentError
from specdec.exact import codec
from specdec.exact.values import PositionLogprobs, Proposal, Scores, SparseDistribution, TargetDistribution
from specdec.serving import session_stream
from specdec.types import MAX_DRAFT_TOKENS, ModelInfo, SamplingParams, SpeculationParams
from specdec.v1 import draft_pb2, target_pb2, types_pb2

VOCAB_SIZE = 50
PROPERTY = settings(deadline=None, derandomize=True, database=None)


def float32(low: float, high: float, **options: Any) -> st.SearchStrategy[float]:
    return st.floats(np.float32(low).item(), np.float32(high).item(), width=32, **options)


SAMPLING = st.builds(
    SamplingParams,
    temperature=float32(0, 100),
    top_k=st.integers(0, 2**32 - 1),
    top_p=float32(0, 1, exclude_min=True),
    min_p=float32(0, 1),
    repetition_penalty=float32(0, 100, exclude_min=True),
    presence_penalty=float32(-100, 100),
    frequency_penalty=float32(-100, 100),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_new_tokens=st.none() | st.integers(1, 2**32 - 1),
    num_logprobs=st.none() | st.integers(0, messages.MAX_LOGPROBS),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), float32(-100, 100), max_size=4),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=4).map(tuple),
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4).map(tuple),
    ignore_eos=st.booleans(),
)


def distribution(weights: list[float]) -> tuple[float, ...]:
    array = np.array(weights, np.float32) + np.float32(1e-3)
    return tuple((array / array.sum()).tolist())


@st.composite
def rows(draw: st.DrawFn) -> SparseDistribution:
    ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6, unique=True))
    weights = draw(st.lists(st.floats(0, 1), min_size=len(ids), max_size=len(ids)))
    return SparseDistribution(tuple(ids), distribution(weights))


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    chosen = draw(st.lists(rows(), max_size=4))
    return Proposal(tuple(draw(st.sampled_from(row.token_ids)) for row in chosen), tuple(chosen))


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Proposal, Scores]:
    """A proposal and the target's answer to it."""
    proposal = draw(proposals())
    sizes = [len(row.token_ids) for row in proposal.rows] + [0]
    distributions = [
        distribution(draw(st.lists(st.floats(0, 1), min_size=size + 1, max_size=size + 1))) for size in sizes
    ]
    tails = [draw(st.integers(0, VOCAB_SIZE - 1)) for _ in sizes]
    targets = tuple(
        TargetDistribution(each[:-1], each[-1], tail) for each, tail in zip(distributions, tails, strict=True)
    )
    return proposal, Scores(targets, draw(st.sampled_from([(), logprobs_for(proposal, tails)])))


def logprobs_for(proposal: Proposal, tails: list[int]) -> tuple[PositionLogprobs, ...]:
    supports = [row.token_ids for row in proposal.rows] + [()]
    return tuple(
        PositionLogprobs({token: -0.5 for token in (*support, tail)}, ((3, -0.25), (4, -math.inf)))
        for support, tail in zip(supports, tails, strict=True)
    )


# ---- there and back


@PROPERTY
@given(SAMPLING)
def test_sampling_comes_back(params: SamplingParams) -> None:
    message = messages.sampling_to_proto(params)
    again = types_pb2.SamplingParams.FromString(message.SerializeToString())
    assert messages.sampling_from_proto(again, VOCAB_SIZE) == params


def test_unset_sampling_is_neutral() -> None:
    assert messages.sampling_from_proto(types_pb2.SamplingParams()) == SamplingParams()


@pytest.mark.parametrize("count", [None, 0, 1, MAX_DRAFT_TOKENS])
def test_speculation_keeps_unset_apart_from_0(count: int | None) -> None:
    message = types_pb2.SpeculationParams(num_draft_tokens=count, drafter="ngram")
    assert messages.speculation_from_proto(message) == SpeculationParams(count, "ngram")
    assert messages.speculation_from_proto(types_pb2.SpeculationParams()) == SpeculationParams(None, None)


@PROPERTY
@given(st.lists(rows(), max_size=4))
def test_rows_come_back_bit_for_bit(given_rows: list[SparseDistribution]) -> None:
    assert codec.distributions_from_proto(codec.distributions_to_proto(given_rows)) == given_rows
    supports = codec.distributions_to_proto(given_rows, with_probs=False)
    assert supports.probs == b""
    assert codec.supports_from_proto(supports) == [list(row.token_ids) for row in given_rows]


@PROPERTY
@given(proposals())
def test_proposals_come_back(proposal: Proposal) -> None:
    message = draft_pb2.ProposeResponse(
        tokens=proposal.tokens, distributions=codec.distributions_to_proto(proposal.rows)
    )
    assert codec.proposal_from_proto(message, len(proposal), VOCAB_SIZE) == proposal


@PROPERTY
@given(exchanges())
def test_scores_come_back(exchange: tuple[Proposal, Scores]) -> None:
    proposal, scores = exchange
    message = target_pb2.ScoreResponse.FromString(codec.scores_to_proto(scores).SerializeToString())
    assert codec.scores_from_proto(message, proposal, VOCAB_SIZE) == scores


def test_models_come_back() -> None:
    info = ModelInfo("name", "print", 7, 9, "float32", "cpu", (1, 2))
    assert messages.model_from_proto(messages.model_to_proto(info)) == info


def test_a_session_s_opening_comes_back() -> None:
    params = SamplingParams(seed=3, temperature=0.5)
    message = session_stream.open_session("s", 2, params, 4)
    assert (message.session_id, message.epoch, message.num_prompt_tokens) == ("s", 2, 4)
    assert session_stream.check_open(message, VOCAB_SIZE) == params


def test_arrays_are_little_endian() -> None:
    packed = codec.distributions_to_proto([SparseDistribution((1, 258), (0.5, 0.5))])
    assert (packed.sizes, packed.token_ids) == (b"\x02\0\0\0", b"\x01\0\0\0\x02\x01\0\0")
    assert packed.probs == b"\0\0\0\x3f" * 2


# ---- what clients get wrong


BAD_SAMPLING = [
    ({"temperature": -1.0}, "temperature", "-1", "[0, 100]"),
    ({"temperature": 101.0}, "temperature", "101", "[0, 100]"),
    ({"temperature": math.nan}, "temperature", "nan", "[0, 100]"),
    ({"temperature": math.inf}, "temperature", "inf", "leave it unset"),
    ({"top_p": 0.0}, "top_p", "0", "(0, 1]"),
    ({"top_p": 1.5}, "top_p", "1.5", "(0, 1]"),
    ({"min_p": -0.5}, "min_p", "-0.5", "[0, 1]"),
    ({"min_p": 2.0}, "min_p", "2", "[0, 1]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "0", "(0, 100]"),
    ({"repetition_penalty": math.nan}, "repetition_penalty", "nan", "(0, 100]"),
    ({"presence_penalty": -101.0}, "presence_penalty", "-101", "[-100, 100]"),
    ({"frequency_penalty": math.inf}, "frequency_penalty", "inf", "[-100, 100]"),
    ({"max_new_tokens": 0}, "max_new_tokens", "0", "at least 1"),
    ({"num_logprobs": 21}, "num_logprobs", "21", "the most is 20"),
    ({"stop": ["x"] * 17}, "stop", "17", "the most is 16"),
    ({"stop": ["ok", ""]}, "stop", "0 characters", "1 to 256"),
    ({"stop": ["x" * 257]}, "stop", "257 characters", "1 to 256"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "257", "the most is 256"),
    ({"stop_token_ids": [1, 50]}, "stop_token_ids", "50", "ends at 49"),
    ({"logit_bias": {50: 1.0}}, "logit_bias", "50", "ends at 49"),
    ({"logit_bias": {7: 100.5}}, "logit_bias", "100.5 for token 7", "[-100, 100]"),
    ({"logit_bias": {7: math.nan}}, "logit_bias", "nan for token 7", "[-100, 100]"),
    ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias", "1025", "the most is 1024"),
]


@pytest.mark.parametrize(("fields", "name", "value", "remedy"), BAD_SAMPLING, ids=lambda each: str(each)[:24])
def test_bad_sampling_names_field_value_and_remedy(fields: dict[str, Any], name: str, value: str, remedy: str) -> None:
    vocab_size = 2000 if name == "logit_bias" and len(fields[name]) > 1000 else VOCAB_SIZE
    with pytest.raises(InvalidArgumentError) as refused:
        messages.sampling_from_proto(types_pb2.SamplingParams(**fields), vocab_size)
    assert list(refused.value.violations) == [f"sampling.{name}"]
    problem = refused.value.violations[f"sampling.{name}"]
    assert value in problem
    assert remedy in problem


def test_all_wrong_fields_are_told_at_once() -> None:
    message = types_pb2.SamplingParams(temperature=-1, top_p=2, stop=[""], stop_token_ids=[99])
    with pytest.raises(InvalidArgumentError) as refused:
        messages.sampling_from_proto(message, VOCAB_SIZE)
    assert len(refused.value.violations) == 4


def test_too_many_draft_tokens() -> None:
    with pytest.raises(InvalidArgumentError, match=r"num_draft_tokens is 33; give 0 \(plain decoding\) to 32"):
        messages.speculation_from_proto(types_pb2.SpeculationParams(num_draft_tokens=33))


def test_tokens_past_the_vocabulary() -> None:
    messages.check_tokens([], 5, "field")
    messages.check_tokens([4], 5, "field")
    with pytest.raises(InvalidArgumentError, match="field has token id 5; the vocabulary ends at 4"):
        messages.check_tokens([0, 5, 1], 5, "field")


@pytest.mark.parametrize("change", [{"session_id": ""}, {"epoch": 0}, {"sampling": types_pb2.SamplingParams()}])
def test_openings_that_lack_something(change: dict[str, Any]) -> None:
    message = session_stream.open_session("s", 1, SamplingParams(seed=1), 1)
    for field, value in change.items():
        message.ClearField(field)
        if field == "sampling":
            message.sampling.CopyFrom(value)
    with pytest.raises(InvalidArgumentError, match=r"needs a session_id|need the resolved"):
        session_stream.check_open(message, VOCAB_SIZE)


# ---- what workers get wrong

GOOD_ROWS = [SparseDistribution((1, 2), (0.25, 0.75)), SparseDistribution((3,), (1.0,))]
PROPOSAL = Proposal((2, 3), tuple(GOOD_ROWS))
U, F = codec.UINT32, codec.FLOAT32


def packed(values: list[float], dtype: np.dtype[Any]) -> bytes:
    return np.array(values, dtype).tobytes()


def good_proposal() -> draft_pb2.ProposeResponse:
    return draft_pb2.ProposeResponse(tokens=PROPOSAL.tokens, distributions=codec.distributions_to_proto(GOOD_ROWS))


BAD_ROWS: dict[str, dict[str, bytes]] = {
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
    "a row too few": {"sizes": packed([3], U), "probs": packed([0.25, 0.5, 0.25], F)},
    "a token past the vocabulary": {"token_ids": packed([50, 2, 3], U)},
    "the token not in its own row": {"token_ids": packed([1, 4, 3], U)},
}


def test_the_good_proposal_is_taken() -> None:
    assert codec.proposal_from_proto(good_proposal(), 2, VOCAB_SIZE) == PROPOSAL


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_proposals_are_refused(name: str) -> None:
    message = good_proposal()
    for field, value in BAD_ROWS[name].items():
        setattr(message.distributions, field, value)
    with pytest.raises(codec.MalformedReply):
        codec.proposal_from_proto(message, 2, VOCAB_SIZE)


@pytest.mark.parametrize(("tokens", "asked"), [((2,), 2), ((2, 3, 3), 3), ((2, 3), 1), ((3, 2), 2), ((), 2)])
def test_proposals_of_the_wrong_length_or_order_are_refused(tokens: tuple[int, ...], asked: int) -> None:
    message = good_proposal()
    message.tokens[:] = tokens
    with pytest.raises(codec.MalformedReply):
        codec.proposal_from_proto(message, asked, VOCAB_SIZE)


def good_scores() -> target_pb2.ScoreResponse:
    rows_ = (
        TargetDistribution((0.5, 0.25), 0.25, 9),
        TargetDistribution((1.0,), 0.0, 8),
        TargetDistribution((), 1.0, 7),
    )
    return codec.scores_to_proto(Scores(rows_, logprobs_for(PROPOSAL, [9, 8, 7])))


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
    "a row too few": with_fields(tail_mass=packed([0.25, 0.0], F), tail_tokens=packed([9, 8], U)),
    "a row too many": with_fields(tail_mass=packed([0.25, 0, 1, 1], F), tail_tokens=packed([9, 8, 7, 7], U)),
    "tails of two lengths": with_fields(tail_tokens=packed([9, 8], U)),
    "fewer probabilities": with_fields(support_probs=packed([0.5, 0.25], F)),
    "more probabilities": with_fields(support_probs=packed([0.5, 0.25, 1, 0], F)),
    "NaN on a support": with_fields(support_probs=packed([math.nan, 0.25, 1], F)),
    "a NaN tail": with_fields(tail_mass=packed([0.25, math.nan, 1], F)),
    "a negative": with_fields(support_probs=packed([-0.5, 1.25, 1], F)),
    "infinity": with_fields(tail_mass=packed([math.inf, 0, 1], F)),
    "no distribution": with_fields(support_probs=packed([0.5, 0.2, 1], F)),
    "a bonus row that is no distribution": with_fields(tail_mass=packed([0.25, 0, 0.9], F)),
    "a tail token past the vocabulary": with_fields(tail_tokens=packed([9, 8, 50], U)),
    "log probabilities of fewer rows": lambda message: message.logprobs.__delitem__(2),
    "log probabilities of more rows": lambda message: message.logprobs.append(message.logprobs[0]),
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


def test_the_good_scores_are_taken() -> None:
    scores = codec.scores_from_proto(good_scores(), PROPOSAL, VOCAB_SIZE)
    assert [row.tail_token for row in scores.rows] == [9, 8, 7]
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
    assert all(abs(sum(row.probs) - 1) < 1e-3 for row in proposal.rows)


@PROPERTY
@given(st.binary(max_size=16), st.binary(max_size=16), st.binary(max_size=16))
def test_noise_is_refused_or_is_scores(probs: bytes, mass: bytes, tokens: bytes) -> None:
    message = target_pb2.ScoreResponse(support_probs=probs, tail_mass=mass, tail_tokens=tokens)
    try:
        scores = codec.scores_from_proto(message, PROPOSAL, VOCAB_SIZE)
    except codec.MalformedReply:
        return
    assert all(row.tail_token < VOCAB_SIZE for row in scores.rows)
