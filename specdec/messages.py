"""Public values to protobuf and back: sampling parameters, speculation parameters, models.

Invalid values raise InvalidArgumentError with each field, its value and the remedy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from google.protobuf.message import Message

from specdec.errors import InvalidArgumentError
from specdec.parameters import WholeNumber
from specdec.types import (
    GRAMMARS,
    MAX_DRAFT_TOKENS,
    SAMPLING_PARAMETERS,
    AcceptanceRuleName,
    ModelInfo,
    SamplingParams,
    SpeculationParams,
    Statistics,
)
from specdec.v1 import generation_pb2, types_pb2

MAX_NAME_CHARACTERS = 64  # of ids and names that we give out ourselves


def check_sampling(params: SamplingParams, vocab_size: int | None = None) -> None:
    """Check every field; token ids too if `vocab_size` is given. Raises InvalidArgumentError for all wrong fields."""
    problems = {}
    for name, parameter in SAMPLING_PARAMETERS.items():
        value = getattr(params, name)
        if value is None:
            continue
        problem = parameter.kind.problem(value)
        if problem is None and vocab_size is not None:
            problem = _vocabulary_problem(parameter.kind.token_ids(value), vocab_size)
        if problem:
            problems[f"sampling.{name}"] = problem
    problems |= _grammar_problems(params)
    if problems:
        raise InvalidArgumentError(problems)


def _grammar_problems(params: SamplingParams) -> dict[str, str]:
    given = [name for name in GRAMMARS if getattr(params, name) is not None]
    if len(given) > 1:
        return {f"sampling.{given[1]}": f"cannot be combined with {given[0]}; give one of {', '.join(GRAMMARS)}"}
    if given and params.ignore_eos:
        problem = f"cannot be combined with {given[0]}, whose text ends with that token; leave it unset"
        return {"sampling.ignore_eos": problem}
    return {}


def sampling_from_proto(message: types_pb2.SamplingParams, vocab_size: int | None = None) -> SamplingParams:
    """Check and convert; token ids too if `vocab_size` is given. Raises InvalidArgumentError for all wrong fields."""
    _check_counts(message)
    params = SamplingParams(**_given(message))
    check_sampling(params, vocab_size)
    return params


def _check_counts(message: types_pb2.SamplingParams) -> None:
    """Raise InvalidArgumentError for lists that are too long, before anything is copied: they may have millions."""
    problems = {
        f"sampling.{name}": problem
        for name, parameter in SAMPLING_PARAMETERS.items()
        if (problem := parameter.kind.count_problem(getattr(message, name)))
    }
    if problems:
        raise InvalidArgumentError(problems)


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Convert; every scalar that is not None is set, so that the receiver needs no defaults."""
    return types_pb2.SamplingParams(**_fields_of(params))


def speculation_from_proto(message: types_pb2.SpeculationParams) -> SpeculationParams:
    """Check and convert; whether the drafter exists is the workers' to say. Raises InvalidArgumentError."""
    known = {rule.value for rule in AcceptanceRuleName}
    if message.acceptance_rule and message.acceptance_rule not in known:
        problem = f"is {message.acceptance_rule}, which this service does not know; leave it unset"
        raise InvalidArgumentError({"speculation.acceptance_rule": problem})
    params = SpeculationParams(
        num_draft_tokens=message.num_draft_tokens if message.HasField("num_draft_tokens") else None,
        drafter=message.drafter or None,
        acceptance_rule=AcceptanceRuleName(message.acceptance_rule) if message.acceptance_rule else None,
    )
    check_speculation(params)
    return params


def check_speculation(params: SpeculationParams) -> None:
    """Check every field. Raises InvalidArgumentError."""
    count: Any = params.num_draft_tokens
    if count is not None and WholeNumber(0, MAX_DRAFT_TOKENS).problem(count):
        problem = f"is {count!r}; give 0 (plain decoding) to {MAX_DRAFT_TOKENS}, or leave it unset (automatic)"
        raise InvalidArgumentError({"speculation.num_draft_tokens": problem})
    if not isinstance(params.drafter, str | None):
        raise InvalidArgumentError({"speculation.drafter": f"is {params.drafter!r}; give a drafter's name"})
    if not isinstance(params.acceptance_rule, AcceptanceRuleName | None):
        problem = f"is {params.acceptance_rule!r}; give an AcceptanceRuleName"
        raise InvalidArgumentError({"speculation.acceptance_rule": problem})


def speculation_to_proto(params: SpeculationParams) -> types_pb2.SpeculationParams:
    """Convert; what is None stays unset."""
    message = types_pb2.SpeculationParams(num_draft_tokens=params.num_draft_tokens, drafter=params.drafter)
    if params.acceptance_rule:
        message.acceptance_rule = types_pb2.AcceptanceRule.ValueType(params.acceptance_rule.value)
    return message


def check_id(field: str, value: str, maximum: int) -> None:
    """Raise InvalidArgumentError for an id or name that is too long; its value is not repeated."""
    if len(value) > maximum:
        raise InvalidArgumentError({field: f"has {len(value)} characters; the maximum is {maximum}"})


def check_tokens(tokens: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise InvalidArgumentError for an id past the vocabulary."""
    if problem := _vocabulary_problem(tokens, vocab_size):
        raise InvalidArgumentError({field: problem})


def model_to_proto(info: ModelInfo) -> types_pb2.ModelInfo:
    """Convert."""
    return types_pb2.ModelInfo(**_fields_of(info))


def model_from_proto(message: types_pb2.ModelInfo) -> ModelInfo:
    """Convert."""
    return ModelInfo(**_given(message))


def statistics_to_proto(statistics: Statistics) -> generation_pb2.Statistics:
    """Convert."""
    return generation_pb2.Statistics(**_fields_of(statistics))


def statistics_from_proto(message: generation_pb2.Statistics) -> Statistics:
    """Convert."""
    return Statistics(**_given(message))


def _vocabulary_problem(tokens: Sequence[int], vocab_size: int) -> str | None:
    highest = max(tokens, default=-1)
    return f"has token id {highest}; the vocabulary ends at {vocab_size - 1}" if highest >= vocab_size else None


def _fields_of(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields for the message whose fields have the same names."""
    return {entry.name: getattr(value, entry.name) for entry in fields(value)}


def _given(message: Message) -> dict[str, Any]:
    """Return a message's fields as Python values; optional fields that are unset are left out."""
    return {
        field.name: _plain(getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value
