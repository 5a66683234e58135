"""Public values to protobuf and back: sampling and speculation parameters, models.

A client's mistakes raise InvalidArgumentError with the field, its value and the remedy.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from specdec.errors import InvalidArgumentError
from specdec.types import MAX_DRAFT_TOKENS, ModelInfo, SamplingParams, SpeculationParams
from specdec.v1 import types_pb2

MAX_STOP_STRINGS = 16


MAX_STOP_CHARACTERS = 256


MAX_STOP_TOKENS = 256


MAX_LOGIT_BIAS = 1024


MAX_LOGPROBS = 20


# field: (lowest, whether the lowest itself is allowed, highest)
_RANGES: Mapping[str, tuple[float, bool, float]] = {
    "temperature": (0, True, 100),
    "top_p": (0, False, 1),
    "min_p": (0, True, 1),
    "repetition_penalty": (0, False, 100),
    "presence_penalty": (-100, True, 100),
    "frequency_penalty": (-100, True, 100),
}


def sampling_from_proto(message: types_pb2.SamplingParams, vocab_size: int | None = None) -> SamplingParams:
    """Check and convert; token ids too if `vocab_size` is given. Raises InvalidArgumentError for all wrong fields."""
    problems = {**_range_problems(message), **_list_problems(message), **_token_problems(message, vocab_size)}
    if problems:
        raise InvalidArgumentError({f"sampling.{field}": problem for field, problem in problems.items()})
    given = {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if field.has_presence and message.HasField(field.name)  # type: ignore[arg-type]
    }
    return SamplingParams(
        **given | {"ignore_eos": message.ignore_eos},
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
    )


def _range_problems(message: types_pb2.SamplingParams) -> dict[str, str]:
    problems = {}
    for field, (low, closed, high) in _RANGES.items():
        value: float = getattr(message, field)
        inside = math.isfinite(value) and (low <= value if closed else low < value) and value <= high
        if message.HasField(field) and not inside:  # type: ignore[arg-type]  # a name from the table above
            interval = f"{'[' if closed else '('}{low}, {high}]"
            problems[field] = f"is {value:g}; give a number in {interval}, or leave it unset"
    if message.HasField("max_new_tokens") and message.max_new_tokens < 1:
        problems["max_new_tokens"] = "is 0; give at least 1, or leave it unset"
    if message.num_logprobs > MAX_LOGPROBS:
        problems["num_logprobs"] = f"is {message.num_logprobs}; the most is {MAX_LOGPROBS}"
    return problems


def _list_problems(message: types_pb2.SamplingParams) -> dict[str, str]:
    problems = {}
    if len(message.stop) > MAX_STOP_STRINGS:
        problems["stop"] = f"has {len(message.stop)} strings; the most is {MAX_STOP_STRINGS}"
    elif sizes := [len(text) for text in message.stop if not 1 <= len(text) <= MAX_STOP_CHARACTERS]:
        problems["stop"] = f"has a string of {sizes[0]} characters; give 1 to {MAX_STOP_CHARACTERS}, or leave it out"
    if len(message.stop_token_ids) > MAX_STOP_TOKENS:
        problems["stop_token_ids"] = f"has {len(message.stop_token_ids)} ids; the most is {MAX_STOP_TOKENS}"
    if len(message.logit_bias) > MAX_LOGIT_BIAS:
        problems["logit_bias"] = f"has {len(message.logit_bias)} entries; the most is {MAX_LOGIT_BIAS}"
    elif wrong := [entry for entry in message.logit_bias.items() if not -100 <= entry[1] <= 100]:
        token, bias = wrong[0]
        problems["logit_bias"] = f"is {bias:g} for token {token}; give numbers in [-100, 100]"
    return problems


def _token_problems(message: types_pb2.SamplingParams, vocab_size: int | None) -> dict[str, str]:
    if vocab_size is None:
        return {}
    lists: Mapping[str, Iterable[int]] = {"stop_token_ids": message.stop_token_ids, "logit_bias": message.logit_bias}
    return {
        field: f"has token id {max(ids)}; the vocabulary ends at {vocab_size - 1}"
        for field, ids in lists.items()
        if max(ids, default=0) >= vocab_size
    }


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Convert; every scalar that is not None is set, so that the receiver needs no defaults."""
    if isinstance(params.stop, str):
        raise TypeError(f"stop is {params.stop!r}; give a sequence of texts")
    message = types_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        max_new_tokens=params.max_new_tokens,
        num_logprobs=params.num_logprobs,
        logit_bias=params.logit_bias,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )
    return message


def speculation_from_proto(message: types_pb2.SpeculationParams) -> SpeculationParams:
    """Check and convert; whether the drafter exists is the workers' to say."""
    count = message.num_draft_tokens if message.HasField("num_draft_tokens") else None
    if count is not None and count > MAX_DRAFT_TOKENS:
        problem = f"is {count}; give 0 (plain decoding) to {MAX_DRAFT_TOKENS}, or leave it unset (automatic)"
        raise InvalidArgumentError({"speculation.num_draft_tokens": problem})
    return SpeculationParams(count, message.drafter or None)


def check_tokens(tokens: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise InvalidArgumentError for an id past the vocabulary."""
    if tokens and max(tokens) >= vocab_size:
        raise InvalidArgumentError({field: f"has token id {max(tokens)}; the vocabulary ends at {vocab_size - 1}"})


def model_to_proto(info: ModelInfo) -> types_pb2.ModelInfo:
    """Convert."""
    return types_pb2.ModelInfo(
        name=info.name,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        dtype=info.dtype,
        device=info.device,
        eos_token_ids=info.eos_token_ids,
        fingerprint=info.fingerprint,
    )


def model_from_proto(message: types_pb2.ModelInfo) -> ModelInfo:
    """Convert."""
    return ModelInfo(
        name=message.name,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        dtype=message.dtype,
        device=message.device,
        eos_token_ids=tuple(message.eos_token_ids),
        fingerprint=message.fingerprint,
    )
