"""Requests to values: what OpenAI's two calls may ask for, checked; what this service cannot do is refused.

Fields that change no text (`user`, `prompt_cache_key`, `safety_identifier`) are taken and not used.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.fields import Fields, shown
from gateway.problems import refused
from gateway.response_format import form_of_answer
from specdec.messages import check_speculation
from specdec.parameters import MAX_UINT32
from specdec.types import (
    GRAMMARS,
    MAX_DRAFT_TOKENS,
    MAX_LOGPROBS,
    AcceptanceRuleName,
    SamplingParams,
    SpeculationParams,
)

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI documents it
MAX_SEED = 2**64 - 1
MIN_SEED = -(2**63)  # OpenAI's seeds are signed
TOKEN_ID_DIGITS = 10
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# names of what a request has by another name in the client and the services
CHAT_NAMES = {
    "chat": "messages",
    "chat.messages": "messages",
    "prompt": "messages",
    "text": "messages",
    "sampling.max_new_tokens": "max_completion_tokens",
    "sampling.num_logprobs": "top_logprobs",
    "sampling.stop_token_ids": "specdec.stop_token_ids",
    "sampling.json_schema": "response_format",
    "sampling.regex": "specdec.regex",
    "sampling.lark": "specdec.lark",
}
COMPLETION_NAMES = {
    "text": "prompt",
    "tokens": "prompt",
    "tokens.ids": "prompt",
    "sampling.max_new_tokens": "max_tokens",
    "sampling.num_logprobs": "logprobs",
    "sampling.stop_token_ids": "specdec.stop_token_ids",
    "sampling.json_schema": "specdec.json_schema",
    "sampling.regex": "specdec.regex",
    "sampling.lark": "specdec.lark",
}


class TokenIds(tuple[int, ...]):
    """A prompt that is encoded."""


class Messages(tuple[tuple[str, str], ...]):
    """A chat: roles and contents."""


Prompt = str | TokenIds | Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A checked request. Its choices are `num_choices` of each prompt, those of the first prompt first."""

    is_chat: bool
    model: str
    prompts: tuple[Prompt, ...]
    num_choices: int
    sampling: SamplingParams
    speculation: SpeculationParams | None
    is_streamed: bool
    with_usage: bool  # as a last event of a stream
    with_details: bool  # the field `specdec` in the answer

    @property
    def total_choices(self) -> int:
        """Return the sessions that it takes."""
        return len(self.prompts) * self.num_choices

    @property
    def with_logprobs(self) -> bool:
        """Return whether the answer has log probabilities."""
        return self.sampling.num_logprobs is not None

    def choice(self, index: int) -> tuple[Prompt, SamplingParams]:
        """Return the prompt and the parameters of one choice; each has a seed of its own, the first one the given."""
        seed = self.sampling.seed
        if seed is not None and index:
            digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest)
        return self.prompts[index // self.num_choices], replace(self.sampling, seed=seed)


def chat_asked(body: Any, max_choices: int) -> Asked:
    """Return a request to /v1/chat/completions. Raises HttpProblem."""
    fields = Fields(body)
    model, messages = fields.required_text("model"), _messages(fields.take("messages"))
    limits = {name: fields.sampling(name, "max_new_tokens") for name in ("max_completion_tokens", "max_tokens")}
    if all(limits.values()) and len({each["max_new_tokens"] for each in limits.values()}) > 1:
        raise refused("max_tokens", "and max_completion_tokens differ; give max_completion_tokens alone")
    values = limits["max_tokens"] | limits["max_completion_tokens"]
    is_wanted, num_top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    if num_top is not None and not is_wanted:
        raise refused("top_logprobs", "needs logprobs; set logprobs to true")
    if is_wanted:
        values["num_logprobs"] = num_top or 0
    values |= form_of_answer(fields.take("response_format"))
    _refuse_unsupported_of_chat(fields)
    return _asked(fields, True, model, (messages,), values, max_choices)


def completion_asked(body: Any, max_choices: int) -> Asked:
    """Return a request to /v1/completions. Raises HttpProblem."""
    fields = Fields(body)
    model, prompts = fields.required_text("model"), _prompts(fields.take("prompt"))
    values = {"max_new_tokens": DEFAULT_MAX_TOKENS} | fields.sampling("max_tokens", "max_new_tokens")
    values |= fields.sampling("logprobs", "num_logprobs")
    fields.neutral("best_of", 1)
    fields.neutral("echo", False)
    fields.neutral("suffix", "")
    return _asked(fields, False, model, prompts, values, max_choices)


def _asked(
    fields: Fields, is_chat: bool, model: str, prompts: tuple[Prompt, ...], values: dict[str, Any], max_choices: int
) -> Asked:
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "stop"):
        values |= fields.sampling(name)
    seed = fields.whole("seed", MIN_SEED, MAX_SEED)
    is_streamed = fields.flag("stream")
    num_choices = fields.whole("n", 1, max_choices) or 1
    if len(prompts) * num_choices > max_choices:
        raise refused("prompt", f"and n make {len(prompts) * num_choices} choices; the maximum is {max_choices}")
    with_usage = _with_usage(fields.take("stream_options"), is_streamed)
    values |= _biases(fields)
    details = fields.take("specdec")
    speculation, extra = _extension(details)
    for hint in ("user", "prompt_cache_key", "safety_identifier"):
        fields.text(hint)
    fields.finish()
    return Asked(
        is_chat=is_chat,
        model=model,
        prompts=prompts,
        num_choices=num_choices,
        sampling=SamplingParams(**values, **extra, seed=None if seed is None else seed % (MAX_SEED + 1)),
        speculation=speculation,
        is_streamed=is_streamed,
        with_usage=with_usage,
        with_details=details is not None,
    )


def _refuse_unsupported_of_chat(fields: Fields) -> None:
    """Refuse what this service cannot do, as tools, unless it is asked to do nothing."""
    fields.neutral("tools", [])
    fields.neutral("tool_choice", "none", "auto")
    fields.neutral("functions", [])
    fields.neutral("function_call", "none", "auto")
    fields.neutral("parallel_tool_calls", True, False)
    fields.neutral("modalities", ["text"])
    fields.neutral("store", False)
    fields.neutral("metadata", {})
    fields.neutral("service_tier", "auto", "default")
    unsupported = ("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options", "moderation")
    for name in (*unsupported, "prompt_cache_options", "prompt_cache_retention"):
        fields.neutral(name)


def _with_usage(options: Any, is_streamed: bool) -> bool:
    if options is None:
        return False
    if not is_streamed:
        raise refused("stream_options", "needs stream; set stream to true, or leave it out")
    fields = Fields(options, "stream_options")
    with_usage = fields.flag("include_usage")
    fields.neutral("include_obfuscation", False)
    fields.finish()
    return with_usage


def _biases(fields: Fields) -> dict[str, Any]:
    """Return the logit biases: in JSON the keys of an object are texts."""
    given = fields.take("logit_bias")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise refused("logit_bias", f"is {shown(given)}; give an object from token ids to numbers")
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) <= TOKEN_ID_DIGITS):
            raise refused("logit_bias", f'has the key {shown(token)}; give token ids, as "50256"')
    return Fields({"logit_bias": {int(token): bias for token, bias in given.items()}}).sampling("logit_bias")


def _extension(given: Any) -> tuple[SpeculationParams | None, dict[str, Any]]:
    """Return what the field `specdec` asks for: speculation, and sampling parameters that OpenAI does not have."""
    if given is None:
        return None, {}
    sampling: dict[str, Any] = {}
    if isinstance(given, Mapping) and isinstance(given.get("json_schema"), Mapping):
        given = {**given, "json_schema": json.dumps(given["json_schema"])}
    fields = Fields(given, "specdec")
    for name in ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", *GRAMMARS):
        sampling |= fields.sampling(name)
    rule = fields.text("acceptance_rule")
    rules = {name.name.lower(): name for name in AcceptanceRuleName}
    if rule is not None and rule not in rules:
        raise refused("specdec.acceptance_rule", f"is {shown(rule)}; give one of {', '.join(rules)}")
    speculation = SpeculationParams(
        num_draft_tokens=fields.whole("num_draft_tokens", 0, MAX_DRAFT_TOKENS),
        drafter=fields.text("drafter"),
        acceptance_rule=rules[rule] if rule else None,
    )
    fields.finish()
    check_speculation(speculation)
    return speculation, sampling


def _prompts(given: Any) -> tuple[Prompt, ...]:
    """Return the prompts: a text, several, token ids, or several lists of them."""
    if isinstance(given, str) and given:
        return (given,)
    if isinstance(given, list) and given:
        if all(isinstance(entry, str) and entry for entry in given):
            return tuple(given)
        if _is_token_ids(given):
            return (TokenIds(given),)
        if all(isinstance(entry, list) and entry and _is_token_ids(entry) for entry in given):
            return tuple(map(TokenIds, given))
    if given is None or given in ("", []):
        raise refused(
            "prompt", "is missing or empty; give at least one character to continue", "missing_required_parameter"
        )
    raise refused("prompt", f"is {shown(given)}; give a text, token ids, or a list of texts or of lists of token ids")


def _is_token_ids(entries: list[Any]) -> bool:
    return all(type(entry) is int and 0 <= entry <= MAX_UINT32 for entry in entries)


def _messages(given: Any) -> Messages:
    if given is None or given == []:
        raise refused("messages", "is missing or empty; give at least one message", "missing_required_parameter")
    if not isinstance(given, list):
        raise refused("messages", f"is {shown(given)}; give a list of messages")
    return Messages(_message(f"messages[{number}]", entry) for number, entry in enumerate(given))


def _message(path: str, given: Any) -> tuple[str, str]:
    fields = Fields(given, path)
    role = fields.required_text("role")
    if role not in ROLES:
        raise refused(f"{path}.role", f"is {shown(role)}; give one of {', '.join(ROLES)}")
    content = _content(f"{path}.content", fields.take("content"))
    for name in ("name", "refusal", "audio", "function_call", "tool_call_id"):
        fields.neutral(name)
    for name in ("tool_calls", "annotations"):
        fields.neutral(name, [])
    fields.finish()
    return ROLES[role], content


def _content(path: str, given: Any) -> str:
    """Return a message's text, which may come in parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise refused(path, f"is {shown(given)}; give a text, or a list of parts of the type text")
    return "".join(_part(f"{path}[{number}]", part) for number, part in enumerate(given))


def _part(path: str, given: Any) -> str:
    fields = Fields(given, path)
    kind = fields.required_text("type")
    if kind != "text":
        raise refused(f"{path}.type", f"is {shown(kind)}; this service takes parts of the type text alone")
    text = fields.text("text")
    fields.finish()
    return text or ""
