"""Public values to protobuf and back; errors name the wrong field, its value and the remedy."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import messages
from specdec.errors import InvalidArgumentError
from specdec.types import (
    MAX_DRAFT_TOKENS,
    MAX_LOGPROBS,
    AcceptanceRuleName,
    ModelInfo,
    SamplingParams,
    SpeculationParams,
    Statistics,
)
from specdec.v1 import generation_pb2, types_pb2

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
    repetition_penalty=float32(0.01, 100),
    presence_penalty=float32(-100, 100),
    frequency_penalty=float32(-100, 100),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_new_tokens=st.none() | st.integers(1, 2**32 - 1),
    num_logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), float32(-100, 100), max_size=4),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=4).map(tuple),
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4).map(tuple),
    ignore_eos=st.booleans(),
)


@PROPERTY
@given(SAMPLING)
def test_sampling_round_trips(params: SamplingParams) -> None:
    message = messages.sampling_to_proto(params)
    again = types_pb2.SamplingParams.FromString(message.SerializeToString())
    assert messages.sampling_from_proto(again, VOCAB_SIZE) == params


def test_unset_sampling_is_neutral() -> None:
    assert messages.sampling_from_proto(types_pb2.SamplingParams()) == SamplingParams()


@pytest.mark.parametrize("count", [None, 0, 1, MAX_DRAFT_TOKENS])
@pytest.mark.parametrize("rule", [None, *AcceptanceRuleName])
def test_speculation_round_trips(count: int | None, rule: AcceptanceRuleName | None) -> None:
    params = SpeculationParams(num_draft_tokens=count, drafter="ngram", acceptance_rule=rule)
    assert messages.speculation_from_proto(messages.speculation_to_proto(params)) == params
    assert messages.speculation_from_proto(types_pb2.SpeculationParams()) == SpeculationParams()


def test_unknown_acceptance_rules_are_refused() -> None:
    message = types_pb2.SpeculationParams.FromString(b"\x18\x09")
    with pytest.raises(InvalidArgumentError, match="acceptance_rule is 9, which this service does not know"):
        messages.speculation_from_proto(message)


def test_model_info_round_trips() -> None:
    info = ModelInfo("name", "print", 7, 9, "float32", "cpu", (1, 2), "f" * 32, 3, 64)
    assert messages.model_from_proto(messages.model_to_proto(info)) == info


def test_statistics_come_back() -> None:
    statistics = Statistics(3, 4, 2, 5, 0.5, 1.0, 0.25, 2.0, (3, 1), (2, 0))
    assert messages.statistics_from_proto(messages.statistics_to_proto(statistics)) == statistics
    assert messages.statistics_from_proto(generation_pb2.Statistics()) == Statistics()


BAD_SAMPLING = [
    ({"temperature": -1.0}, "temperature", "-1", "[0, 100]"),
    ({"temperature": 101.0}, "temperature", "101", "[0, 100]"),
    ({"temperature": math.nan}, "temperature", "nan", "[0, 100]"),
    ({"temperature": math.inf}, "temperature", "inf", "leave it unset"),
    ({"top_p": 0.0}, "top_p", "0", "(0, 1]"),
    ({"top_p": 1.5}, "top_p", "1.5", "(0, 1]"),
    ({"min_p": -0.5}, "min_p", "-0.5", "[0, 1]"),
    ({"min_p": 2.0}, "min_p", "2", "[0, 1]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "0", "[0.01, 100]"),
    ({"repetition_penalty": 2**-7}, "repetition_penalty", "0.0078125", "[0.01, 100]"),
    ({"repetition_penalty": math.nan}, "repetition_penalty", "nan", "[0.01, 100]"),
    ({"presence_penalty": -101.0}, "presence_penalty", "-101", "[-100, 100]"),
    ({"frequency_penalty": math.inf}, "frequency_penalty", "inf", "[-100, 100]"),
    ({"max_new_tokens": 0}, "max_new_tokens", "0", "at least 1"),
    ({"num_logprobs": 21}, "num_logprobs", "21", "the maximum is 20"),
    ({"stop": ["x"] * 17}, "stop", "17", "the maximum is 16"),
    ({"stop": ["ok", ""]}, "stop", "0 characters", "1 to 256"),
    ({"stop": ["x" * 257]}, "stop", "257 characters", "1 to 256"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "257", "the maximum is 256"),
    ({"stop_token_ids": [1, 50]}, "stop_token_ids", "50", "ends at 49"),
    ({"logit_bias": {50: 1.0}}, "logit_bias", "50", "ends at 49"),
    ({"logit_bias": {7: 100.5}}, "logit_bias", "100.5 for token 7", "[-100, 100]"),
    ({"logit_bias": {7: math.nan}}, "logit_bias", "nan for token 7", "[-100, 100]"),
    ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias", "1025", "the maximum is 1024"),
]


@pytest.mark.parametrize(("fields", "name", "value", "remedy"), BAD_SAMPLING, ids=lambda each: str(each)[:24])
def test_bad_sampling_names_the_field(fields: dict[str, Any], name: str, value: str, remedy: str) -> None:
    vocab_size = 2000 if name == "logit_bias" and len(fields[name]) > 1000 else VOCAB_SIZE
    with pytest.raises(InvalidArgumentError) as refused:
        messages.sampling_from_proto(types_pb2.SamplingParams(**fields), vocab_size)
    assert list(refused.value.violations) == [f"sampling.{name}"]
    problem = refused.value.violations[f"sampling.{name}"]
    assert value in problem
    assert remedy in problem


def test_all_wrong_fields_are_reported_together() -> None:
    message = types_pb2.SamplingParams(temperature=-1, top_p=2, stop=[""], stop_token_ids=[99])
    with pytest.raises(InvalidArgumentError) as refused:
        messages.sampling_from_proto(message, VOCAB_SIZE)
    assert len(refused.value.violations) == 4


def test_too_many_draft_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"num_draft_tokens is 33; give 0 \(plain decoding\) to 32"):
        messages.speculation_from_proto(types_pb2.SpeculationParams(num_draft_tokens=33))


def test_tokens_past_the_vocabulary_are_refused() -> None:
    messages.check_tokens([], 5, "field")
    messages.check_tokens([4], 5, "field")
    with pytest.raises(InvalidArgumentError, match="field has token id 5; the vocabulary ends at 4"):
        messages.check_tokens([0, 5, 1], 5, "field")


@pytest.mark.parametrize(
    ("flood", "words"),
    [
        (types_pb2.SamplingParams(stop=[""] * 200_000), "stop has 200000 strings; the maximum is 16"),
        (types_pb2.SamplingParams(stop_token_ids=[1] * 200_000), "stop_token_ids has 200000 ids; the maximum is 256"),
        (
            types_pb2.SamplingParams(logit_bias=dict.fromkeys(range(200_000), 0.0)),
            "logit_bias has 200000 entries; the maximum is 1024",
        ),
    ],
)
def test_long_lists_are_refused_without_a_copy(flood: types_pb2.SamplingParams, words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgumentError, match=words):
            messages.sampling_from_proto(flood, VOCAB_SIZE)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200_000


def test_long_lists_of_texts_are_counted_first() -> None:
    """The entries are checked only where their number is allowed."""
    with pytest.raises(InvalidArgumentError, match="has 17 strings"):
        messages.check_sampling(SamplingParams(stop=[""] * 16 + ["\ud800"]))


def test_a_number_just_out_of_range_is_shown_in_full() -> None:
    with pytest.raises(InvalidArgumentError, match=r"is 100\.00001; give a number in \[0, 100\]"):
        messages.check_sampling(SamplingParams(temperature=100.00001))
    with pytest.raises(InvalidArgumentError, match=r"is 100\.00001 for token 1"):
        messages.check_sampling(SamplingParams(logit_bias={1: 100.00001}))


def test_the_least_repetition_penalty_is_accepted() -> None:
    """Also as the 32-bit number that the message holds, which is a little less."""
    message = messages.sampling_to_proto(SamplingParams(repetition_penalty=0.01))
    assert messages.sampling_from_proto(message).repetition_penalty == np.float32(0.01)
