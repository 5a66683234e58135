"""Requests to values: prompt to tokens, parameters checked against the model, identity of a request."""

import hashlib
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from coordinator.chat import ChatTemplate
from coordinator.generation import Limits
from specdec import messages
from specdec.errors import InvalidArgumentError
from specdec.exact.randomness import MAX_SEED
from specdec.types import ModelInfo, SamplingParams, SpeculationParams
from specdec.v1 import generation_pb2

MAX_REQUEST_ID_CHARACTERS = 255
MAX_PROMPT_CHARACTERS = 8 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request: everything that a session needs, and nothing that the store does not keep."""

    session_id: str
    fingerprint: bytes  # of the parameters as given; equal for a repeated request
    prompt: tuple[int, ...]
    sampling: SamplingParams  # with seed and max_new_tokens
    speculation: SpeculationParams

    def stored(self) -> bytes:
        """Return what the store keeps beside the tokens."""
        request = generation_pb2.GenerateRequest(sampling=messages.sampling_to_proto(self.sampling))
        if self.speculation.num_draft_tokens is not None:
            request.speculation.num_draft_tokens = self.speculation.num_draft_tokens
        if self.speculation.drafter:
            request.speculation.drafter = self.speculation.drafter
        return request.SerializeToString()


def restored(data: bytes) -> tuple[SamplingParams, SpeculationParams]:
    """Return what `Plan.stored` kept."""
    request = generation_pb2.GenerateRequest.FromString(data)
    return messages.sampling_from_proto(request.sampling), messages.speculation_from_proto(request.speculation)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Turns prompts into tokens of the target."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    def encode(self, request: generation_pb2.GenerateRequest, vocab_size: int) -> tuple[int, ...]:
        """Return the prompt's tokens. Raises InvalidArgumentError if there are none, or ids past the vocabulary."""
        kind = request.WhichOneof("prompt")
        if kind == "tokens":
            messages.check_tokens(request.tokens.ids, vocab_size, "tokens.ids")
            tokens = tuple(request.tokens.ids)
        elif kind == "text":
            tokens = self._encode(request.text, special=True) if request.text else ()
        elif kind == "chat":
            tokens = self._encode(self._render(request.chat), special=False)
        else:
            raise InvalidArgumentError({"prompt": "is missing; set one of text, tokens, chat"})
        if not tokens:
            raise InvalidArgumentError({kind: "is empty; give at least one token to continue"})
        return tokens

    def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise InvalidArgumentError({"prompt": f"has {len(text)} characters; the most is {MAX_PROMPT_CHARACTERS}"})
        return tuple(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def _render(self, chat: generation_pb2.ChatPrompt) -> str:
        if self.chat_template is None:
            raise InvalidArgumentError(
                {"chat": "cannot be rendered: this model has no chat template; send text or tokens"}
            )
        if not chat.messages:
            raise InvalidArgumentError({"chat.messages": "is empty; give at least one message"})
        return self.chat_template.render([(message.role, message.content) for message in chat.messages])


def plan(request: generation_pb2.GenerateRequest, prompts: Prompts, target: ModelInfo, most_new_tokens: int) -> Plan:
    """Check a request as a whole. Raises InvalidArgumentError."""
    sampling = messages.sampling_from_proto(request.sampling, target.vocab_size)
    speculation = messages.speculation_from_proto(request.speculation)
    if len(request.request_id) > MAX_REQUEST_ID_CHARACTERS:
        problem = f"has {len(request.request_id)} characters; the most is {MAX_REQUEST_ID_CHARACTERS}"
        raise InvalidArgumentError({"request_id": problem})
    prompt = prompts.encode(request, target.vocab_size)
    _check_length(prompt, target)
    return Plan(
        session_id=session_id(request.request_id),
        fingerprint=fingerprint(request),
        prompt=prompt,
        sampling=resolved(sampling, most_new_tokens),
        speculation=speculation,
    )


def _check_length(prompt: Sequence[int], target: ModelInfo) -> None:
    if len(prompt) >= target.context_length:
        problem = f"has {len(prompt)} tokens; the model's context holds {target.context_length}, completion included"
        raise InvalidArgumentError({"prompt": problem})


def resolved(sampling: SamplingParams, most_new_tokens: int) -> SamplingParams:
    """Fill in the seed, and cap the length. Raises InvalidArgumentError for a length past the server's limit."""
    wanted = sampling.max_new_tokens or most_new_tokens
    if wanted > most_new_tokens:
        problem = f"is {wanted}; this server's limit is {most_new_tokens}"
        raise InvalidArgumentError({"sampling.max_new_tokens": problem})
    seed = secrets.randbelow(MAX_SEED + 1) if sampling.seed is None else sampling.seed
    return replace(sampling, seed=seed, max_new_tokens=wanted)


def limits(sampling: SamplingParams, target: ModelInfo) -> Limits:
    """Return where a generation must end."""
    assert sampling.max_new_tokens is not None
    return Limits(sampling.max_new_tokens, target.context_length, frozenset(target.eos_token_ids))


def session_id(request_id: str) -> str:
    """Return the session that belongs to an idempotency key, the same at every coordinator; a random one without."""
    return hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest() if request_id else uuid.uuid4().hex


def fingerprint(request: generation_pb2.GenerateRequest) -> bytes:
    """Return a hash of everything in the request but its key."""
    return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()
