"""The values of a round to protobuf and back, checked here and trusted inside.

A worker's mistakes raise MalformedReply: a broken worker must not reach a session's log. Decoding is total: whatever
bytes arrive, the result is a checked value or MalformedReply.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from specdec.exact.lookup import NUM_LENGTHS, NextRound
from specdec.exact.tree import chain_parents, is_tree
from specdec.exact.values import (
    MAX_OBSERVED_LAYERS,
    MAX_SUPPORT_TOKENS,
    MAX_TOP_TOKENS,
    ObservationRequest,
    Observations,
    PositionLogprobs,
    Proposal,
    Scores,
    SparseDistribution,
    TargetDistribution,
    Timing,
    one_hot,
)
from specdec.types import MAX_DRAFT_TOKENS, MAX_LOGPROBS
from specdec.v1 import draft_pb2, target_pb2, types_pb2

UINT32 = np.dtype("<u4")
FLOAT32 = np.dtype("<f4")


class MalformedReply(Exception):
    """A worker's answer contradicts the contract."""


# ---- distributions


def distributions_to_proto(
    distributions: Sequence[SparseDistribution], *, with_probs: bool = True
) -> types_pb2.SparseDistributions:
    """Pack distributions; without probabilities only their supports."""
    if not distributions:
        return types_pb2.SparseDistributions()
    probs = [prob for distribution in distributions for prob in distribution.probs] if with_probs else []
    return types_pb2.SparseDistributions(
        sizes=_packed_ids([len(distribution.token_ids) for distribution in distributions]),
        token_ids=_packed_ids([*chain.from_iterable(distribution.token_ids for distribution in distributions)]),
        probs=np.array(probs, FLOAT32).tobytes(),
    )


def _packed_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def supports_from_proto(
    message: types_pb2.SparseDistributions, max_supports: int = MAX_DRAFT_TOKENS
) -> list[list[int]]:
    """Unpack the supports. Raises MalformedReply where the arrays contradict each other."""
    sizes = _unpack(message.sizes, UINT32, max_supports)
    if any(not 1 <= size <= MAX_SUPPORT_TOKENS for size in sizes):
        raise MalformedReply(f"supports of sizes {sizes[:8]}; each has 1 to {MAX_SUPPORT_TOKENS} tokens")
    ids = _unpack(message.token_ids, UINT32, sum(sizes))
    if sum(sizes) != len(ids):
        raise MalformedReply(f"supports of sizes {sizes[:8]} with {len(ids)} token ids")
    supports = _cut(ids, sizes)
    if any(len(set(support)) != len(support) for support in supports):
        raise MalformedReply("a support names a token twice")
    return supports


def distributions_from_proto(
    message: types_pb2.SparseDistributions, max_distributions: int = MAX_DRAFT_TOKENS
) -> list[SparseDistribution]:
    """Unpack distributions. Raises MalformedReply unless each is finite, positive and sums to 1 within rounding."""
    supports = supports_from_proto(message, max_distributions)
    num_tokens = sum(map(len, supports))
    values = _unpack(message.probs, FLOAT32, num_tokens)
    if len(values) != num_tokens:
        raise MalformedReply(f"{len(values)} probabilities for {num_tokens} tokens")
    cut = _cut(values, map(len, supports))
    distributions = [SparseDistribution(tuple(ids), tuple(probs)) for ids, probs in zip(supports, cut, strict=True)]
    for distribution in distributions:
        # "not (>)" also catches NaN
        if not abs(sum(distribution.probs) - 1) < 1e-3 or not min(distribution.probs) > 0:
            raise MalformedReply("a distribution is not positive, or does not sum to 1")
    return distributions


def _unpack(data: bytes, dtype: np.dtype[Any], max_values: int) -> list[Any]:
    """Return the values of an array. Raises MalformedReply for more than may be expected, which are not looked at."""
    if not data:
        return []
    if len(data) > max_values * dtype.itemsize:
        raise MalformedReply(f"{len(data)} bytes, where at most {max_values} {dtype.itemsize}-byte values are expected")
    if len(data) % dtype.itemsize:
        raise MalformedReply(f"{len(data)} bytes are not a whole number of {dtype.itemsize}-byte values")
    values: list[Any] = np.frombuffer(data, dtype).tolist()
    return values


def _cut(values: list[Any], sizes: Iterable[int]) -> list[list[Any]]:
    bounds = accumulate(sizes, initial=0)
    return [values[begin:end] for begin, end in pairwise(bounds)]


# ---- proposals


def proposal_to_proto(proposal: Proposal) -> draft_pb2.ProposeResponse:
    """Pack a proposal; the caller adds cached_len and timing."""
    shipped, sources = _shipped(proposal)
    return draft_pb2.ProposeResponse(
        tokens=proposal.tokens,
        parents=() if proposal.is_chain else proposal.parents,
        sources=sources,
        distributions=distributions_to_proto(shipped),
    )


def score_to_proto(start: int, tokens: Sequence[int], proposal: Proposal, observes: bool = True) -> target_pb2.Score:
    """Pack a round for the target: the committed tokens from `start` on, the draft tokens and their supports."""
    shipped, sources = _shipped(proposal)
    return target_pb2.Score(
        start=start,
        tokens=tokens,
        draft_tokens=proposal.tokens,
        parents=() if proposal.is_chain else proposal.parents,
        sources=sources,
        supports=distributions_to_proto(shipped, with_probs=False),
        without_observations=not observes,
    )


def next_round_to_proto(next_round: NextRound) -> target_pb2.NextRound:
    """Pack what the next round will most likely draft."""
    return target_pb2.NextRound(
        draft_lengths=next_round.draft_lengths,
        plain=next_round.plain,
        max_length=next_round.max_length,
        num_offered=next_round.num_offered,
        learns=next_round.learns,
        stop_below=next_round.stop_below,
    )


def next_round_from_proto(message: target_pb2.NextRound, context_length: int) -> NextRound:
    """Return what a round is told of the next one, at a worker whose context is so long. Raises MalformedReply."""
    lengths = tuple(message.draft_lengths)
    if len(lengths) > NUM_LENGTHS:
        raise MalformedReply(f"{len(lengths)} draft lengths; at most {NUM_LENGTHS}")
    if max(lengths, default=0) > MAX_DRAFT_TOKENS:
        raise MalformedReply(f"a draft length of {max(lengths)}; at most {MAX_DRAFT_TOKENS}")
    if message.num_offered > MAX_DRAFT_TOKENS:
        raise MalformedReply(f"{message.num_offered} draft tokens to offer; at most {MAX_DRAFT_TOKENS}")
    if not 0 <= message.stop_below <= 1:
        raise MalformedReply(f"a chance of {message.stop_below}; a chance is 0 to 1")
    max_length = min(message.max_length or context_length, context_length)
    learns = message.learns or message.num_offered > 0
    return NextRound(lengths, message.plain, max_length, message.num_offered, learns, message.stop_below)


def offer_from_proto(message: target_pb2.Offer, num_offered: int, vocab_size: int) -> Proposal:
    """Check what a target worker offers to draft: a tree of so many tokens at most, all chosen."""
    if len(message.draft_tokens) > num_offered:
        raise MalformedReply(f"{len(message.draft_tokens)} tokens are offered where {num_offered} were asked for")
    tokens = tuple(message.draft_tokens)
    if max(tokens, default=0) >= vocab_size:
        raise MalformedReply(f"a token is offered past the target's vocabulary of {vocab_size}")
    return Proposal(tokens, tuple(map(one_hot, tokens)), checked_parents(message.parents, len(tokens)))


def _shipped(proposal: Proposal) -> tuple[list[SparseDistribution], Sequence[int]]:
    """Return the distributions to send, each once, and every token's source; one-hot ones need not be sent."""
    places: dict[int, int] = {}  # by identity: siblings share an object
    shipped, sources = [], []
    for distribution in proposal.distributions:
        if len(distribution.token_ids) == 1:
            sources.append(0)
            continue
        if id(distribution) not in places:
            shipped.append(distribution)
            places[id(distribution)] = len(shipped)
        sources.append(places[id(distribution)])
    return shipped, () if sources == list(range(1, len(sources) + 1)) else sources


def proposal_from_proto(message: draft_pb2.ProposeResponse, num_draft_tokens: int, vocab_size: int) -> Proposal:
    """Check a draft worker's answer: a tree of at most K tokens, each in its own distribution's support."""
    if len(message.tokens) > num_draft_tokens:
        raise MalformedReply(f"{len(message.tokens)} tokens where {num_draft_tokens} were asked for")
    tokens = tuple(message.tokens)
    distributions = distributions_from_proto(message.distributions, len(tokens))
    sources = _checked_sources(message.sources, len(tokens), len(distributions))
    drawn_from = tuple(
        distributions[source - 1] if source else one_hot(token) for token, source in zip(tokens, sources, strict=True)
    )
    if any(token not in distribution.token_ids for token, distribution in zip(tokens, drawn_from, strict=True)):
        raise MalformedReply("a token outside the support of its own distribution")
    if any(max(distribution.token_ids) >= vocab_size for distribution in drawn_from):
        raise MalformedReply(f"a token past the target's vocabulary of {vocab_size}")
    return Proposal(tokens, drawn_from, checked_parents(message.parents, len(tokens)))


def draft_supports_from_proto(message: target_pb2.Score) -> list[list[int]]:
    """Return the support of each draft token's distribution, [N]. Raises MalformedReply."""
    supports = supports_from_proto(message.supports, len(message.draft_tokens))
    sources = _checked_sources(message.sources, len(message.draft_tokens), len(supports))
    drawn_from = [
        supports[source - 1] if source else [token] for token, source in zip(message.draft_tokens, sources, strict=True)
    ]
    if any(token not in support for token, support in zip(message.draft_tokens, drawn_from, strict=True)):
        raise MalformedReply("a support lacks its own draft token")
    return drawn_from


def _checked_sources(sources: Sequence[int], num_tokens: int, num_distributions: int) -> Sequence[int]:
    """Return where each token was drawn from. Raises MalformedReply."""
    sources = sources or range(1, num_tokens + 1)
    if len(sources) != num_tokens or max(sources, default=0) > num_distributions:
        raise MalformedReply(f"{num_tokens} tokens with {len(sources)} sources in {num_distributions} distributions")
    if not {*range(1, num_distributions + 1)} <= {*sources}:
        raise MalformedReply("a distribution that no token was drawn from")
    return sources


def checked_parents(parents: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Return a tree's parents, empty for a chain. Raises MalformedReply for anything that is not a tree."""
    if not parents:
        return ()
    if len(parents) != num_tokens or not is_tree(parents):
        raise MalformedReply(f"{len(parents)} parents of {num_tokens} tokens that are not a tree, parents first")
    return () if tuple(parents) == chain_parents(num_tokens) else tuple(parents)


# ---- observations


def observation_request_to_proto(request: ObservationRequest) -> types_pb2.ObservationRequest | None:
    """Pack a request; None if it asks for nothing."""
    if not request:
        return None
    return types_pb2.ObservationRequest(hidden_layers=request.hidden_layers, num_top_tokens=request.num_top_tokens)


def observation_request_from_proto(message: types_pb2.ObservationRequest, num_layers: int) -> ObservationRequest:
    """Check a request for a model of so many layers. Raises MalformedReply."""
    layers = tuple(message.hidden_layers[: MAX_OBSERVED_LAYERS + 1])  # the message may have millions
    if len(layers) > MAX_OBSERVED_LAYERS or max(layers, default=0) > num_layers:
        raise MalformedReply(f"layers {layers}; at most {MAX_OBSERVED_LAYERS} of 0 to {num_layers} can be observed")
    if message.num_top_tokens > MAX_TOP_TOKENS:
        raise MalformedReply(f"{message.num_top_tokens} top tokens; the maximum is {MAX_TOP_TOKENS}")
    return ObservationRequest(layers, message.num_top_tokens)


def observations_to_proto(observations: Observations) -> types_pb2.Observations:
    """Pack observations."""
    return types_pb2.Observations(
        start=observations.start,
        count=len(observations),
        hidden_states=b"".join(observations.hidden_states),
        top_tokens=b"".join(observations.top_tokens),
    )


def observations_from_proto(message: types_pb2.Observations) -> Observations:
    """Split observations by token. Raises MalformedReply where the arrays cannot be split evenly."""
    hidden, top = (_split(data, message.count) for data in (message.hidden_states, message.top_tokens))
    if not hidden and not top:
        raise MalformedReply("observations of nothing")
    return Observations(message.start, hidden, top)


def check_num_observed(message: types_pb2.Observations, num_tokens: int) -> None:
    """Raise MalformedReply for observations of more tokens than there are; asked before they are split by token."""
    if message.count > num_tokens:
        raise MalformedReply(f"observations of {message.count} tokens, where there are {num_tokens}")


def _split(data: bytes, count: int) -> tuple[bytes, ...]:
    if not data:
        return ()
    if not count or len(data) % count:
        raise MalformedReply(f"{len(data)} bytes of observations at {count} tokens")
    size = len(data) // count
    return tuple(data[begin : begin + size] for begin in range(0, len(data), size))


# ---- scores


def scores_to_proto(scores: Scores) -> target_pb2.ScoreResponse:
    """Pack the target's answer; the caller adds cached_len, timing and load."""
    probs = [prob for position in scores.positions for prob in position.support_probs]
    masses = [] if scores.is_matched else [position.tail_mass for position in scores.positions]
    return target_pb2.ScoreResponse(
        support_probs=np.array(probs, FLOAT32).tobytes(),
        tail_mass=np.array(masses, FLOAT32).tobytes(),
        tail_tokens=np.array([position.tail_token for position in scores.positions], UINT32).tobytes(),
        logprobs=[_logprobs_to_proto(position) for position in scores.logprobs],
        observations=observations_to_proto(scores.observations) if scores.observations else None,
        observed=None if scores.observed is None else target_pb2.DraftTokens(indices=scores.observed),
        is_matched=scores.is_matched,
    )


def scores_from_proto(message: target_pb2.ScoreResponse, proposal: Proposal, vocab_size: int) -> Scores:
    """Check a target worker's answer against the proposal it scored. Raises MalformedReply."""
    if message.is_matched and not proposal.is_chosen:
        raise MalformedReply("a draft is matched that was drawn")
    unions = [()] * (len(proposal) + 1) if message.is_matched else proposal.unions()
    sizes = [len(token_ids) for token_ids in unions]
    probs = _unpack(message.support_probs, FLOAT32, sum(sizes))
    mass = _unpack(message.tail_mass, FLOAT32, 0 if message.is_matched else len(sizes))
    mass = [1.0] * len(sizes) if message.is_matched else mass
    tokens = _unpack(message.tail_tokens, UINT32, len(sizes))
    if not (len(probs) == sum(sizes) and len(mass) == len(tokens) == len(sizes)):
        raise MalformedReply(f"{len(probs)} probabilities and {len(mass)} tails for supports of sizes {sizes}")
    if max(tokens) >= vocab_size:
        raise MalformedReply(f"tail token {max(tokens)} past the vocabulary of {vocab_size}")
    positions = tuple(map(TargetDistribution, map(tuple, _cut(probs, sizes)), mass, tokens))
    for position in positions:
        _check_target_distribution(position)
    if len(message.logprobs) not in (0, len(sizes)):
        raise MalformedReply(f"{len(message.logprobs)} entries of log probabilities for {len(sizes)} positions")
    logprobs = tuple(map(_logprobs_from_proto, message.logprobs, sizes))
    if logprobs:
        _check_logprobs(logprobs, unions, tokens)
        _check_top(logprobs, vocab_size)
    observations = observations_from_proto(message.observations) if message.HasField("observations") else None
    observed = _observed_from_proto(message, len(proposal))
    return Scores(positions, logprobs, observations, observed, message.is_matched)


def _observed_from_proto(message: target_pb2.ScoreResponse, num_draft_tokens: int) -> tuple[int, ...] | None:
    if not message.HasField("observed"):
        return None
    observed = tuple(message.observed.indices[: num_draft_tokens + 1])  # the message may have millions
    if list(observed) != sorted({*observed}) or max(observed, default=-1) >= num_draft_tokens:
        raise MalformedReply(f"observed draft tokens that are not rising indices below {num_draft_tokens}")
    return observed


def _check_logprobs(
    logprobs: Sequence[PositionLogprobs], unions: Sequence[Sequence[int]], tail_tokens: Sequence[int]
) -> None:
    """Raise MalformedReply unless each position has the log probability of every token that may be emitted there."""
    for position, token_ids, tail_token in zip(logprobs, unions, tail_tokens, strict=True):
        if not position.by_token.keys() >= {*token_ids, tail_token}:
            raise MalformedReply("a token that may be emitted has no log probability")
        if any(math.isnan(value) for value in position.by_token.values()):
            raise MalformedReply("a log probability is not a number")


def _check_top(logprobs: Sequence[PositionLogprobs], vocab_size: int) -> None:
    for row in logprobs:
        if len(row.top) > MAX_LOGPROBS or any(token >= vocab_size or math.isnan(value) for token, value in row.top):
            raise MalformedReply("the most probable tokens are too many, past the vocabulary, or without a number")


def _check_target_distribution(row: TargetDistribution) -> None:
    values = (*row.support_probs, row.tail_mass)
    if not abs(sum(values) - 1) < 1e-3 or not min(values) >= 0:  # also where one is not a number
        raise MalformedReply("the target's distribution does not sum to 1")


def _logprobs_to_proto(row: PositionLogprobs) -> target_pb2.PositionLogprobs:
    entries = [*row.by_token.items(), *row.top]
    return target_pb2.PositionLogprobs(
        token_ids=np.array([token for token, _ in entries], UINT32).tobytes(),
        logprobs=np.array([logprob for _, logprob in entries], FLOAT32).tobytes(),
        num_top=len(row.top),
    )


def _logprobs_from_proto(message: target_pb2.PositionLogprobs, support_size: int) -> PositionLogprobs:
    max_tokens = support_size + 1 + MAX_LOGPROBS  # with the tail's
    tokens = _unpack(message.token_ids, UINT32, max_tokens)
    values = _unpack(message.logprobs, FLOAT32, max_tokens)
    split = len(tokens) - message.num_top
    if len(tokens) != len(values) or split < 0:
        raise MalformedReply(f"{len(values)} log probabilities, {message.num_top} of them top, {len(tokens)} tokens")
    entries = list(zip(tokens, values, strict=True))
    return PositionLogprobs(dict(entries[:split]), tuple(entries[split:]))


def timing_to_proto(timing: Timing) -> types_pb2.Timing:
    """Convert."""
    return types_pb2.Timing(
        queue_s=timing.queue_s,
        forward_s=timing.forward_s,
        total_s=timing.total_s,
        num_forward_tokens=timing.num_forward_tokens,
    )
