"""The table of sampling parameters: dataclass, keywords, protobuf messages and flags agree."""

import argparse
from dataclasses import fields
from typing import get_type_hints

import pytest

from specdec import ModelInfo, SamplingParams, SpeculationParams, Statistics
from specdec.arguments import add_sampling_flags, sampling_of
from specdec.parameters import nearest
from specdec.types import SAMPLING_PARAMETERS, AcceptanceRuleName, FinishReason, SamplingKeywords, TokenOrigin
from specdec.v1 import generation_pb2, types_pb2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (SamplingParams, types_pb2.SamplingParams),
        (SpeculationParams, types_pb2.SpeculationParams),
        (ModelInfo, types_pb2.ModelInfo),
        (Statistics, generation_pb2.Statistics),
    ],
)
def test_values_and_messages_have_the_same_fields(kind: type, message: type) -> None:
    names = {entry.name for entry in fields(kind)}
    assert names == {field.name for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "enum"),
    [
        (AcceptanceRuleName, types_pb2.AcceptanceRule),
        (FinishReason, generation_pb2.FinishReason),
        (TokenOrigin, generation_pb2.TokenOrigin),
    ],
)
def test_enumerations_have_the_same_values(kind: type, enum: type) -> None:
    values = set(enum.values()) - {0}  # type: ignore[attr-defined]
    assert {member.value for member in kind} == values  # type: ignore[attr-defined]


def test_keywords_are_the_sampling_parameters() -> None:
    keywords, values = get_type_hints(SamplingKeywords), get_type_hints(SamplingParams)
    assert list(keywords) == list(values) == list(SAMPLING_PARAMETERS)
    # the keyword `stop` also accepts a single text; all others have the type of the field
    assert {name for name in keywords if keywords[name] != values[name]} == {"stop"}


def test_defaults_are_valid() -> None:
    neutral = SamplingParams()
    for name, parameter in SAMPLING_PARAMETERS.items():
        value = getattr(neutral, name)
        assert value is None or parameter.kind.problem(value) is None, name


def test_every_parameter_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    for name, parameter in SAMPLING_PARAMETERS.items():
        assert (parameter.flag or f"--{name.replace('_', '-')}") in parser.format_help()
    assert sampling_of(parser.parse_args([])) == SamplingParams()
    words = ["--logit-bias", "1=2", "--logit-bias", "3=-4", "--stop", "a", "--stop", "b", "--stop-token-id", "5"]
    given = SamplingParams(logit_bias={1: 2.0, 3: -4.0}, stop=("a", "b"), stop_token_ids=(5,))
    assert sampling_of(parser.parse_args(words)) == given


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("--top-n", ["--top-k", "--seed"], "--top-k"),
        ("--max", ["--min-p", "--max-new-tokens"], "--max-new-tokens"),
        ("--temp", ["--help", "--temperature"], "--temperature"),
        ("--stop-token", ["--stop", "--stop-token-id"], "--stop-token-id"),
        ("--model", ["--help", "--json"], None),
        ("SPECDEC_COLOUR", ["SPECDEC_HOST", "SPECDEC_PORT"], None),
        ("x", [], None),
    ],
)
def test_nearest_name_is_found(name: str, known: list[str], expected: str | None) -> None:
    assert nearest(name, known) == expected


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (-1, f"is -1; give a whole number from 0 to {2**64 - 1}, or leave it unset"),
        (2**64, f"is {2**64}; the maximum is {2**64 - 1}"),
    ],
)
def test_seed_names_its_upper_limit(value: int, problem: str) -> None:
    assert SAMPLING_PARAMETERS["seed"].kind.problem(value) == problem
