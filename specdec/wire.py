"""Values to protobuf and back, checked here and trusted inside.

A client's mistakes raise InvalidArgument with the field, its value and what would be right. A worker's raise
MalformedReply: a broken worker must not reach a session's log, so its answers are checked as strictly.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from specdec.errors import InvalidArgument
from specdec.types import (
    MAX_DRAFT_TOKENS,
    MAX_SUPPORT_TOKENS,
    ModelInfo,
    Proposal,
    Row,
    RowLogprobs,
    SamplingParams,
    Scores,
    SpeculationParams,
    TargetRow,
    Timing,
)
from specdec.v1 import draft_pb2, target_pb2, types_pb2

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20

UINT32 = np.dtype("<u4")
FLOAT32 = np.dtype("<f4")

# field: (lowest, whether the lowest itself is allowed, highest)
_RANGES: Mapping[str, tuple[float, bool, float]] = {
    "temperature": (0, True, 100),
    "top_p": (0, False, 1),
    "min_p": (0, True, 1),
    "repetition_penalty": (0, False, 100),
    "presence_penalty": (-100, True, 100),
    "frequency_penalty": (-100, True, 100),
}


class MalformedReply(Exception):
    """A worker's answer contradicts the contract."""


# ---- sampling and speculation: from clients


def sampling_from_proto(message: types_pb2.SamplingParams, vocab_size: int | None = None) -> SamplingParams:
    """Check and convert; token ids too if `vocab_size` is given. Raises InvalidArgument for all wrong fields."""
    problems = {**_range_problems(message), **_list_problems(message), **_token_problems(message, vocab_size)}
    if problems:
        raise InvalidArgument({f"sampling.{field}": problem for field, problem in problems.items()})
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
        raise InvalidArgument({"speculation.num_draft_tokens": problem})
    return SpeculationParams(count, message.drafter or None)


# ---- sessions: from the coordinator to workers


def open_session(
    session_id: str, epoch: int, sampling: SamplingParams, num_prompt_tokens: int
) -> types_pb2.OpenSession:
    """Return the first message of a worker's stream; `sampling` has its seed."""
    return types_pb2.OpenSession(
        session_id=session_id,
        epoch=epoch,
        sampling=sampling_to_proto(sampling),
        num_prompt_tokens=num_prompt_tokens,
    )


def check_open(message: types_pb2.OpenSession, vocab_size: int | None) -> SamplingParams:
    """Check a stream's first message in a worker. Raises InvalidArgument."""
    if not message.session_id or message.epoch < 1:
        raise InvalidArgument({"open": "needs a session_id and an epoch of at least 1"})
    if not message.sampling.HasField("seed"):
        raise InvalidArgument({"open.session.sampling.seed": "is unset; workers need the resolved seed"})
    return sampling_from_proto(message.sampling, vocab_size)


def check_tokens(tokens: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise InvalidArgument for an id past the vocabulary."""
    if tokens and max(tokens) >= vocab_size:
        raise InvalidArgument({field: f"has token id {max(tokens)}; the vocabulary ends at {vocab_size - 1}"})


# ---- rows


def rows_to_proto(rows: Sequence[Row], *, with_probs: bool = True) -> types_pb2.SparseRows:
    """Pack rows; without probabilities only their supports."""
    ids = [token for row in rows for token in row.token_ids]
    probs = [prob for row in rows for prob in row.probs] if with_probs else []
    return types_pb2.SparseRows(
        sizes=np.array([len(row.token_ids) for row in rows], UINT32).tobytes(),
        token_ids=np.array(ids, UINT32).tobytes(),
        probs=np.array(probs, FLOAT32).tobytes(),
    )


def supports_from_proto(message: types_pb2.SparseRows) -> list[list[int]]:
    """Unpack the supports. Raises MalformedReply where the arrays contradict each other."""
    sizes = _unpack(message.sizes, UINT32)
    ids = _unpack(message.token_ids, UINT32)
    if sum(sizes) != len(ids) or any(not 1 <= size <= MAX_SUPPORT_TOKENS for size in sizes):
        raise MalformedReply(f"supports of sizes {sizes} with {len(ids)} token ids")
    supports = _cut(ids, sizes)
    if any(len(set(support)) != len(support) for support in supports):
        raise MalformedReply("a support names a token twice")
    return supports


def rows_from_proto(message: types_pb2.SparseRows) -> list[Row]:
    """Unpack rows. Raises MalformedReply unless each is a law: finite, positive, summing to 1 within rounding."""
    supports = supports_from_proto(message)
    values = _unpack(message.probs, FLOAT32)
    if len(values) != sum(map(len, supports)):
        raise MalformedReply(f"{len(values)} probabilities for {sum(map(len, supports))} tokens")
    cut = _cut(values, map(len, supports))
    rows = [Row(tuple(ids), tuple(probs)) for ids, probs in zip(supports, cut, strict=True)]
    for row in rows:
        # "not (>)" also catches NaN
        if not all(prob > 0 for prob in row.probs) or not abs(sum(row.probs) - 1) < 1e-3:
            raise MalformedReply("a row is not a probability law")
    return rows


def _unpack(data: bytes, dtype: np.dtype[Any]) -> list[Any]:
    if len(data) % dtype.itemsize:
        raise MalformedReply(f"{len(data)} bytes are not a whole number of {dtype.itemsize}-byte values")
    values: list[Any] = np.frombuffer(data, dtype).tolist()
    return values


def _cut(values: list[Any], sizes: Iterable[int]) -> list[list[Any]]:
    bounds = accumulate(sizes, initial=0)
    return [values[begin:end] for begin, end in pairwise(bounds)]


# ---- proposals and scores


def proposal_from_proto(message: draft_pb2.ProposeResponse, num_draft_tokens: int, vocab_size: int) -> Proposal:
    """Check a draft worker's answer: at most K tokens, each in its own row's support, all inside the vocabulary."""
    rows = rows_from_proto(message.rows)
    tokens = tuple(message.tokens)
    if not len(tokens) == len(rows) <= num_draft_tokens:
        raise MalformedReply(f"{len(tokens)} tokens with {len(rows)} rows where {num_draft_tokens} were asked for")
    if any(token not in row.token_ids for token, row in zip(tokens, rows, strict=True)):
        raise MalformedReply("a token outside its own row's support")
    if any(max(row.token_ids) >= vocab_size for row in rows):
        raise MalformedReply(f"a token past the target's vocabulary of {vocab_size}")
    return Proposal(tokens, tuple(rows))


def scores_to_proto(scores: Scores) -> target_pb2.ScoreResponse:
    """Pack the target's answer; the caller adds cached_len, timing and load."""
    probs = [prob for row in scores.rows for prob in row.support_probs]
    return target_pb2.ScoreResponse(
        support_probs=np.array(probs, FLOAT32).tobytes(),
        tail_mass=np.array([row.tail_mass for row in scores.rows], FLOAT32).tobytes(),
        tail_tokens=np.array([row.tail_token for row in scores.rows], UINT32).tobytes(),
        logprobs=[_logprobs_to_proto(row) for row in scores.logprobs],
    )


def scores_from_proto(message: target_pb2.ScoreResponse, proposal: Proposal, vocab_size: int) -> Scores:
    """Check a target worker's answer against the proposal it scored. Raises MalformedReply."""
    sizes = [len(row.token_ids) for row in proposal.rows] + [0]
    probs, mass, tokens = (
        _unpack(data, dtype)
        for data, dtype in (
            (message.support_probs, FLOAT32), (message.tail_mass, FLOAT32), (message.tail_tokens, UINT32)
        )
    )  # fmt: skip
    if not (len(probs) == sum(sizes) and len(mass) == len(tokens) == len(sizes)):
        raise MalformedReply(f"{len(probs)} probabilities and {len(mass)} tails for supports of sizes {sizes}")
    if max(tokens) >= vocab_size:
        raise MalformedReply(f"tail token {max(tokens)} past the vocabulary of {vocab_size}")
    rows = tuple(map(TargetRow, map(tuple, _cut(probs, sizes)), mass, tokens))
    for row in rows:
        _check_target_row(row)
    logprobs = tuple(map(_logprobs_from_proto, message.logprobs))
    if logprobs:
        _check_logprobs(logprobs, proposal, tokens)
        _check_top(logprobs, vocab_size)
    return Scores(rows, logprobs)


def _check_logprobs(logprobs: Sequence[RowLogprobs], proposal: Proposal, tail_tokens: Sequence[int]) -> None:
    """Raise MalformedReply unless each row has the log probability of every token that may be emitted there."""
    if len(logprobs) != len(tail_tokens):
        raise MalformedReply(f"{len(logprobs)} rows of log probabilities for {len(tail_tokens)} positions")
    supports = [row.token_ids for row in proposal.rows] + [()]
    for row, support, tail_token in zip(logprobs, supports, tail_tokens, strict=True):
        if not row.by_token.keys() >= {*support, tail_token}:
            raise MalformedReply("a token that may be emitted has no log probability")
        if any(math.isnan(value) for value in row.by_token.values()):
            raise MalformedReply("a log probability is not a number")


def _check_top(logprobs: Sequence[RowLogprobs], vocab_size: int) -> None:
    for row in logprobs:
        if len(row.top) > MAX_LOGPROBS or any(token >= vocab_size or math.isnan(value) for token, value in row.top):
            raise MalformedReply("the most probable tokens are too many, past the vocabulary, or without a number")


def _check_target_row(row: TargetRow) -> None:
    values = (*row.support_probs, row.tail_mass)
    if not all(value >= 0 for value in values) or not abs(sum(values) - 1) < 1e-3:
        raise MalformedReply("a target row is not a probability law")


def _logprobs_to_proto(row: RowLogprobs) -> target_pb2.RowLogprobs:
    entries = [*row.by_token.items(), *row.top]
    return target_pb2.RowLogprobs(
        token_ids=np.array([token for token, _ in entries], UINT32).tobytes(),
        logprobs=np.array([logprob for _, logprob in entries], FLOAT32).tobytes(),
        num_top=len(row.top),
    )


def _logprobs_from_proto(message: target_pb2.RowLogprobs) -> RowLogprobs:
    tokens, values = _unpack(message.token_ids, UINT32), _unpack(message.logprobs, FLOAT32)
    split = len(tokens) - message.num_top
    if len(tokens) != len(values) or split < 0:
        raise MalformedReply(f"{len(values)} log probabilities, {message.num_top} of them top, {len(tokens)} tokens")
    entries = list(zip(tokens, values, strict=True))
    return RowLogprobs(dict(entries[:split]), tuple(entries[split:]))


# ---- models and timing


def timing_to_proto(timing: Timing) -> types_pb2.Timing:
    """Convert."""
    return types_pb2.Timing(queue_s=timing.queue_s, forward_s=timing.forward_s, total_s=timing.total_s)


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
    )
