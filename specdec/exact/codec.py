"""Values to protobuf and back, checked here and trusted inside.

A client's mistakes raise InvalidArgumentError with the field, its value and what would be right. A worker's raise
MalformedReply: a broken worker must not reach a session's log, so its answers are checked as strictly.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from specdec.exact.values import (
    MAX_SUPPORT_TOKENS,
    PositionLogprobs,
    Proposal,
    Scores,
    SparseDistribution,
    TargetDistribution,
    Timing,
)
from specdec.messages import MAX_LOGPROBS
from specdec.v1 import draft_pb2, target_pb2, types_pb2

UINT32 = np.dtype("<u4")
FLOAT32 = np.dtype("<f4")


class MalformedReply(Exception):
    """A worker's answer contradicts the contract."""


# ---- rows


def distributions_to_proto(
    rows: Sequence[SparseDistribution], *, with_probs: bool = True
) -> types_pb2.SparseDistributions:
    """Pack rows; without probabilities only their supports."""
    ids = [token for row in rows for token in row.token_ids]
    probs = [prob for row in rows for prob in row.probs] if with_probs else []
    return types_pb2.SparseDistributions(
        sizes=np.array([len(row.token_ids) for row in rows], UINT32).tobytes(),
        token_ids=np.array(ids, UINT32).tobytes(),
        probs=np.array(probs, FLOAT32).tobytes(),
    )


def supports_from_proto(message: types_pb2.SparseDistributions) -> list[list[int]]:
    """Unpack the supports. Raises MalformedReply where the arrays contradict each other."""
    sizes = _unpack(message.sizes, UINT32)
    ids = _unpack(message.token_ids, UINT32)
    if sum(sizes) != len(ids) or any(not 1 <= size <= MAX_SUPPORT_TOKENS for size in sizes):
        raise MalformedReply(f"supports of sizes {sizes} with {len(ids)} token ids")
    supports = _cut(ids, sizes)
    if any(len(set(support)) != len(support) for support in supports):
        raise MalformedReply("a support names a token twice")
    return supports


def distributions_from_proto(message: types_pb2.SparseDistributions) -> list[SparseDistribution]:
    """Unpack distributions. Raises MalformedReply unless each is finite, positive and sums to 1 within rounding."""
    supports = supports_from_proto(message)
    values = _unpack(message.probs, FLOAT32)
    if len(values) != sum(map(len, supports)):
        raise MalformedReply(f"{len(values)} probabilities for {sum(map(len, supports))} tokens")
    cut = _cut(values, map(len, supports))
    rows = [SparseDistribution(tuple(ids), tuple(probs)) for ids, probs in zip(supports, cut, strict=True)]
    for row in rows:
        # "not (>)" also catches NaN
        if not all(prob > 0 for prob in row.probs) or not abs(sum(row.probs) - 1) < 1e-3:
            raise MalformedReply("a row is not a probability distribution")
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
    rows = distributions_from_proto(message.distributions)
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
    rows = tuple(map(TargetDistribution, map(tuple, _cut(probs, sizes)), mass, tokens))
    for row in rows:
        _check_target_distribution(row)
    logprobs = tuple(map(_logprobs_from_proto, message.logprobs))
    if logprobs:
        _check_logprobs(logprobs, proposal, tokens)
        _check_top(logprobs, vocab_size)
    return Scores(rows, logprobs)


def _check_logprobs(logprobs: Sequence[PositionLogprobs], proposal: Proposal, tail_tokens: Sequence[int]) -> None:
    """Raise MalformedReply unless each row has the log probability of every token that may be emitted there."""
    if len(logprobs) != len(tail_tokens):
        raise MalformedReply(f"{len(logprobs)} rows of log probabilities for {len(tail_tokens)} positions")
    supports = [row.token_ids for row in proposal.rows] + [()]
    for row, support, tail_token in zip(logprobs, supports, tail_tokens, strict=True):
        if not row.by_token.keys() >= {*support, tail_token}:
            raise MalformedReply("a token that may be emitted has no log probability")
        if any(math.isnan(value) for value in row.by_token.values()):
            raise MalformedReply("a log probability is not a number")


def _check_top(logprobs: Sequence[PositionLogprobs], vocab_size: int) -> None:
    for row in logprobs:
        if len(row.top) > MAX_LOGPROBS or any(token >= vocab_size or math.isnan(value) for token, value in row.top):
            raise MalformedReply("the most probable tokens are too many, past the vocabulary, or without a number")


def _check_target_distribution(row: TargetDistribution) -> None:
    values = (*row.support_probs, row.tail_mass)
    if not all(value >= 0 for value in values) or not abs(sum(values) - 1) < 1e-3:
        raise MalformedReply("a target row is not a probability distribution")


def _logprobs_to_proto(row: PositionLogprobs) -> target_pb2.PositionLogprobs:
    entries = [*row.by_token.items(), *row.top]
    return target_pb2.PositionLogprobs(
        token_ids=np.array([token for token, _ in entries], UINT32).tobytes(),
        logprobs=np.array([logprob for _, logprob in entries], FLOAT32).tobytes(),
        num_top=len(row.top),
    )


def _logprobs_from_proto(message: target_pb2.PositionLogprobs) -> PositionLogprobs:
    tokens, values = _unpack(message.token_ids, UINT32), _unpack(message.logprobs, FLOAT32)
    split = len(tokens) - message.num_top
    if len(tokens) != len(values) or split < 0:
        raise MalformedReply(f"{len(values)} log probabilities, {message.num_top} of them top, {len(tokens)} tokens")
    entries = list(zip(tokens, values, strict=True))
    return PositionLogprobs(dict(entries[:split]), tuple(entries[split:]))


def timing_to_proto(timing: Timing) -> types_pb2.Timing:
    """Convert."""
    return types_pb2.Timing(queue_s=timing.queue_s, forward_s=timing.forward_s, total_s=timing.total_s)
