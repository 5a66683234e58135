"""Requests to values: parameters checked against the model and the operator's limits, identity of a request."""

import hashlib
import re
from dataclasses import dataclass, replace

from coordinator.generation import Limits
from coordinator.prompts import EncodedPrompt, Prompts
from coordinator.session_ids import SessionName
from specdec import messages
from specdec.errors import InvalidArgumentError
from specdec.exact.randomness import MAX_SEED
from specdec.outside import REAL, Outside
from specdec.types import DetachedPolicy, ModelInfo, SamplingParams, SpeculationParams
from specdec.v1 import generation_pb2

MAX_REQUEST_ID_CHARACTERS = 255
SESSION_ID = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the operator allows a request."""

    max_new_tokens: int
    max_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request: everything that a session needs; all of it is stored."""

    session_id: str
    fingerprint: bytes  # of the parameters as given; equal for a repeated request
    prompt: EncodedPrompt
    sampling: SamplingParams  # with seed and max_new_tokens
    speculation: SpeculationParams
    when_detached: DetachedPolicy | None = None  # None: as the coordinator's operator says

    def stored(self) -> bytes:
        """Return what the store keeps besides the tokens."""
        request = generation_pb2.GenerateRequest(
            sampling=messages.sampling_to_proto(self.sampling),
            speculation=messages.speculation_to_proto(self.speculation),
            when_detached=_policy_to_proto(self.when_detached),
        )
        return request.SerializeToString()


@dataclass(frozen=True, slots=True)
class Restored:
    """What a session remembers of its request."""

    sampling: SamplingParams
    speculation: SpeculationParams
    when_detached: DetachedPolicy | None


def restored(data: bytes) -> Restored:
    """Return what `Plan.stored` kept."""
    request = generation_pb2.GenerateRequest.FromString(data)
    return Restored(
        messages.sampling_from_proto(request.sampling),
        messages.speculation_from_proto(request.speculation),
        detached_policy(request),
    )


def detached_policy(request: generation_pb2.GenerateRequest) -> DetachedPolicy | None:
    """Return the policy that a request asks for. Raises InvalidArgumentError for one that this service cannot know."""
    try:
        return DetachedPolicy(request.when_detached) if request.when_detached else None
    except ValueError:
        problem = f"is {request.when_detached}, which this service does not know; leave it unset"
        raise InvalidArgumentError({"when_detached": problem}) from None


def _policy_to_proto(policy: DetachedPolicy | None) -> generation_pb2.DetachedPolicy.ValueType:
    return generation_pb2.DetachedPolicy.ValueType(policy.value if policy else 0)


async def plan(
    request: generation_pb2.GenerateRequest,
    session: SessionName,
    prompts: Prompts,
    target: ModelInfo,
    limits: RequestLimits,
    outside: Outside = REAL,
) -> Plan:
    """Check a request as a whole, the cheap parts first. Raises InvalidArgumentError, OverloadedError."""
    messages.check_id("request_id", request.request_id, MAX_REQUEST_ID_CHARACTERS)
    messages.check_id("speculation.drafter", request.speculation.drafter, messages.MAX_NAME_CHARACTERS)
    sampling = messages.sampling_from_proto(request.sampling, target.vocab_size)
    speculation, policy = messages.speculation_from_proto(request.speculation), detached_policy(request)
    _check_draft_length(speculation, limits)
    sampling = resolved(sampling, limits.max_new_tokens, outside)
    prompt = await prompts.encode(request, target)
    return Plan(session.stored, fingerprint(request), prompt, sampling, speculation, policy)


def known_session(session_id: str) -> str:
    """Return a session's id as a client sent it. Raises InvalidArgumentError for what cannot be one."""
    if not session_id:
        raise InvalidArgumentError({"session_id": "is empty; take it from a chunk of the session"})
    messages.check_id("session_id", session_id, messages.MAX_NAME_CHARACTERS)
    if not SESSION_ID.fullmatch(session_id):  # it is logged, and may be no text of the caller's choice
        raise InvalidArgumentError({"session_id": "is none that this service gives out; take it from a chunk"})
    return session_id


def _check_draft_length(speculation: SpeculationParams, limits: RequestLimits) -> None:
    count = speculation.num_draft_tokens
    if count is not None and count > limits.max_draft_tokens:
        problem = f"is {count}; this server's limit is {limits.max_draft_tokens}"
        raise InvalidArgumentError({"speculation.num_draft_tokens": problem})


def resolved(sampling: SamplingParams, max_new_tokens: int, outside: Outside = REAL) -> SamplingParams:
    """Fill in the seed, and cap the length. Raises InvalidArgumentError for a length past the server's limit."""
    wanted = sampling.max_new_tokens or max_new_tokens
    if wanted > max_new_tokens:
        problem = f"is {wanted}; this server's limit is {max_new_tokens}"
        raise InvalidArgumentError({"sampling.max_new_tokens": problem})
    seed = outside.random_bits(MAX_SEED.bit_length()) if sampling.seed is None else sampling.seed
    return replace(sampling, seed=seed, max_new_tokens=wanted)


def limits(sampling: SamplingParams, target: ModelInfo) -> Limits:
    """Return where a generation must end."""
    assert sampling.max_new_tokens is not None
    return Limits(sampling.max_new_tokens, target.context_length, frozenset(target.eos_token_ids))


def fingerprint(request: generation_pb2.GenerateRequest) -> bytes:
    """Return a hash of everything in the request but its key."""
    return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()
