"""A caller's arguments to requests. Wrong ones raise InvalidArgumentError with the field, its value and the remedy.

An unknown keyword raises TypeError, as for any Python function.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from specdec.channel import MAX_REQUEST_BYTES, address_problem, is_loopback
from specdec.errors import InvalidArgumentError
from specdec.messages import check_sampling, check_speculation, sampling_to_proto, speculation_to_proto
from specdec.parameters import MAX_UINT32, WholeNumber, has_no_encoding, nearest_hint, token_id_problem
from specdec.types import SAMPLING_PARAMETERS, DetachedPolicy, SamplingParams, SpeculationParams
from specdec.v1 import generation_pb2

MAX_TIMEOUT_S = 365 * 86_400.0  # more than a year is a mistake in the unit
DIGEST_BYTES = 16


class ChatMessage(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


Messages = Sequence[tuple[str, str]] | Sequence[Mapping[str, str]]


def merge_sampling(sampling: SamplingParams | None, keywords: Mapping[str, Any]) -> SamplingParams | None:
    """Return the parameters with the keywords in place of their fields; None if nothing is given.

    Raises TypeError for an unknown keyword, InvalidArgumentError for values out of range.
    """
    for name in keywords:
        if name not in SAMPLING_PARAMETERS:
            hint = nearest_hint(name, list(SAMPLING_PARAMETERS), "the nearest sampling parameter is")
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")
    if not isinstance(sampling, SamplingParams | None):
        raise InvalidArgumentError({"sampling": f"is {_shown(sampling)}; give SamplingParams"})
    if sampling is None and not keywords:
        return None
    merged = replace(sampling or SamplingParams(), **keywords)
    check_sampling(merged)
    return merged


def generate_request(
    prompt: generation_pb2.GenerateRequest,
    sampling: SamplingParams | None,
    speculation: SpeculationParams | None,
    request_id: str,
    when_detached: DetachedPolicy | None = None,
) -> generation_pb2.GenerateRequest:
    """Complete a request that has its prompt. `sampling` has been checked."""
    request = prompt
    if not isinstance(when_detached, DetachedPolicy | None):
        raise InvalidArgumentError({"when_detached": f"is {_shown(when_detached)}; give a DetachedPolicy"})
    if when_detached is not None:
        request.when_detached = generation_pb2.DetachedPolicy.ValueType(when_detached.value)
    if not isinstance(request_id, str):
        raise InvalidArgumentError({"request_id": f"is {_shown(request_id)}; give text"})
    request.request_id = request_id
    if sampling is not None:
        request.sampling.CopyFrom(sampling_to_proto(sampling))
    if not isinstance(speculation, SpeculationParams | None):
        raise InvalidArgumentError({"speculation": f"is {_shown(speculation)}; give SpeculationParams"})
    if speculation is not None:
        check_speculation(speculation)
        request.speculation.CopyFrom(speculation_to_proto(speculation))
    if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
        limit = f"the maximum is {MAX_REQUEST_BYTES} bytes; shorten the prompt"
        raise InvalidArgumentError({"prompt": f"makes a request of {size} bytes; {limit}"})
    return request


def prompt_request(prompt: str | None, token_ids: Iterable[int] | None) -> generation_pb2.GenerateRequest:
    """Return a request with a prompt of text or of token ids, exactly one of which is given."""
    if (prompt is None) == (token_ids is None):
        problem = "is missing" if prompt is None else "and prompt_token_ids are both given"
        raise InvalidArgumentError({"prompt": f"{problem}; give exactly one of prompt and prompt_token_ids"})
    if token_ids is not None:
        return generation_pb2.GenerateRequest(tokens=generation_pb2.TokenSequence(ids=_checked_ids(token_ids)))
    if not isinstance(prompt, str):
        remedy = "give text here, token ids as prompt_token_ids, messages to chat()"
        raise InvalidArgumentError({"prompt": f"is {_shown(prompt)}; {remedy}"})
    if not prompt:
        raise InvalidArgumentError({"prompt": "is empty; give at least one character to continue"})
    return generation_pb2.GenerateRequest(text=_encodable("prompt", prompt))


def chat_request(messages: Messages) -> generation_pb2.GenerateRequest:
    """Return a request with a prompt of chat messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidArgumentError({"messages": f"is {_shown(messages)}; give a list of (role, content)"})
    if not messages:
        raise InvalidArgumentError({"messages": "is empty; give at least one message"})
    request = generation_pb2.GenerateRequest()
    for number, entry in enumerate(messages):
        role, content = _role_and_content(f"messages[{number}]", entry)
        request.chat.messages.add(role=role, content=content)
    return request


def resume_request(session_id: str, offset: int, digest: bytes) -> generation_pb2.ResumeRequest:
    """Return a request for a session's chunks from `offset` on."""
    problems = {}
    if problem := WholeNumber(0, MAX_UINT32).problem(offset):
        problems["offset"] = problem
    if not isinstance(digest, bytes) or len(digest) not in (0, DIGEST_BYTES):
        problems["digest"] = f"is {_shown(digest)}; give the {DIGEST_BYTES} bytes of a chunk's digest, or leave it out"
    if problems:
        raise InvalidArgumentError(problems)
    return generation_pb2.ResumeRequest(session_id=checked_session_id(session_id), offset=offset, digest=digest)


def checked_session_id(session_id: str) -> str:
    """Return the id. Raises InvalidArgumentError for what names no session."""
    if not isinstance(session_id, str) or not session_id:
        shown = "is empty" if session_id == "" else f"is {_shown(session_id)}"
        raise InvalidArgumentError({"session_id": f"{shown}; take it from a chunk of the session"})
    return _encodable("session_id", session_id)


def checked_address(address: str) -> str:
    """Return the address of a server. Raises InvalidArgumentError for one that gRPC would try in vain."""
    if problem := address_problem(address):
        raise InvalidArgumentError({"address": problem})
    return address


def refuse_plain_text(address: str) -> None:
    """Raise InvalidArgumentError for an address where others can read and change plain text."""
    if not is_loopback(address):
        problem = f"is {address!r}, where others can read and change plain text"
        raise InvalidArgumentError(
            {"address": f"{problem}; connect with TLS (tls=, --tls-ca), or say insecure (insecure=True, --insecure)"}
        )


def checked_timeout_s(timeout_s: float, name: str = "timeout_s") -> float:
    """Return the time-out. Raises InvalidArgumentError unless it is above 0 and at most a year."""
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or math.isnan(timeout_s) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidArgumentError({name: f"is {timeout_s!r}; give seconds in (0, {MAX_TIMEOUT_S:g}]"})
    return float(timeout_s)


def _checked_ids(token_ids: Iterable[int]) -> list[int]:
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
        raise InvalidArgumentError({"prompt_token_ids": f"is {_shown(token_ids)}; give a list of token ids"})
    ids = list(token_ids)
    problem = token_id_problem(ids) if ids else "is empty; give at least one token to continue"
    if problem:
        raise InvalidArgumentError({"prompt_token_ids": problem})
    return [int(token) for token in ids]


def _role_and_content(field: str, entry: Any) -> tuple[str, str]:
    remedy = "give (role, content) or {'role': ..., 'content': ...}"
    if isinstance(entry, Mapping):
        if set(entry) != {"role", "content"}:
            raise InvalidArgumentError({field: f"has the keys {sorted(map(str, entry))}; {remedy}"})
        entry = (entry["role"], entry["content"])
    if not isinstance(entry, Sequence) or isinstance(entry, str | bytes) or len(entry) != 2:
        raise InvalidArgumentError({field: f"is {_shown(entry)}; {remedy}"})
    for name, value in zip(("role", "content"), entry, strict=True):
        if not isinstance(value, str):
            raise InvalidArgumentError({f"{field}.{name}": f"is {_shown(value)}; give text"})
    return _encodable(field, entry[0]), _encodable(field, entry[1])


def _encodable(field: str, text: str) -> str:
    """Return the text. Raises InvalidArgumentError if it cannot be sent."""
    if has_no_encoding(text):
        raise InvalidArgumentError({field: "has no UTF-8 encoding; mend it first"})
    return text


def _shown(value: object) -> str:
    """Return a short name for a wrong value, without quoting a whole prompt."""
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
