"""The values that the services exchange: frozen, checked once at the border (`specdec.messages`), trusted inside.

Number types are open on purpose: production distributions hold floats, the proofs run the same code on fractions.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, TypedDict

from specdec.parameters import (
    MAX_UINT32,
    Biases,
    Number,
    Parameter,
    Switch,
    Text,
    Texts,
    TokenIds,
    WholeNumber,
    parameter,
)

MAX_DRAFT_TOKENS = 32  # a support is at most 1024 tokens of 8 bytes: 32 of them stay under 300 kB
MAX_TOLD_TOKENS = 64  # that one answer of a target worker, to several rounds, tells of at most
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARACTERS = 65_536
MIN_REPETITION_PENALTY = 0.009999999776482582  # 0.01 as a 32-bit float; far smaller ones make logits infinite
DRAWING, ENDING, FORM = "How tokens are drawn", "When generation ends", "What the text must look like"
GRAMMARS = ("json_schema", "regex", "lark")  # fields of which at most one is set
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn from logits; the defaults change nothing.

    The fields are the one table of sampling parameters: validation and the command line's flags derive from it.
    `stop` may be one text or several; `json_schema` may be a mapping, which becomes a text.
    Ranges: protos/specdec/v1/types.proto.
    """

    temperature: float = parameter(1.0, Number(0, 100), "0 takes the most probable token", group=DRAWING)
    top_k: int = parameter(0, WholeNumber(0, MAX_UINT32), "keep the k most probable tokens; 0: all", group=DRAWING)
    top_p: float = parameter(
        1.0, Number(0, 1, excludes_low=True), "keep the most probable tokens with this mass", group=DRAWING
    )
    min_p: float = parameter(
        0.0, Number(0, 1), "drop tokens less probable than this fraction of the most probable one", group=DRAWING
    )
    repetition_penalty: float = parameter(
        1.0, Number(MIN_REPETITION_PENALTY, 100), "divide the logits of tokens seen before; 1: none", group=DRAWING
    )
    presence_penalty: float = parameter(
        0.0, Number(-100, 100), "subtract once from the logit of a generated token; 0: none", group=DRAWING
    )
    frequency_penalty: float = parameter(
        0.0, Number(-100, 100), "subtract for each time that a token was generated; 0: none", group=DRAWING
    )
    seed: int | None = parameter(
        None,
        WholeNumber(0, 2**64 - 1, metavar="SEED"),
        "the same seed, --drafter and --num-draft-tokens give the same text",
        group=DRAWING,
    )
    max_new_tokens: int | None = parameter(
        None,
        WholeNumber(1, MAX_UINT32),
        "maximum number of tokens to generate (default: the service's limit, which is 4096 unless its operator "
        "set another)",
        group=ENDING,
    )
    num_logprobs: int | None = parameter(
        None, WholeNumber(0, MAX_LOGPROBS), "log probabilities of this many tokens a position (--json)", group=DRAWING
    )
    logit_bias: Mapping[int, float] = parameter(
        lambda: _NO_BIAS, Biases(1024, 100), "add to a token's logit; repeatable", group=DRAWING
    )
    stop: Sequence[str] = parameter((), Texts(16, 256), "end before this text; repeatable", group=ENDING)
    stop_token_ids: Sequence[int] = parameter(
        (), TokenIds(256), "end after this token; repeatable", group=ENDING, flag="--stop-token-id"
    )
    ignore_eos: bool = parameter(False, Switch(), "continue after the model's end-of-sequence token", group=ENDING)
    json_schema: str | Mapping[str, Any] | None = parameter(
        None, Text(MAX_GRAMMAR_CHARACTERS, metavar="SCHEMA"), "the text is JSON that this schema allows", group=FORM
    )
    regex: str | None = parameter(
        None, Text(MAX_GRAMMAR_CHARACTERS, metavar="REGEX"), "the text matches this regular expression", group=FORM
    )
    lark: str | None = parameter(
        None,
        Text(MAX_GRAMMAR_CHARACTERS, metavar="GRAMMAR"),
        "the text is derived from the rule `start` of this grammar, in Lark's EBNF",
        group=FORM,
    )

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, Mapping):
            with suppress(TypeError, ValueError):  # what is no JSON is refused where the parameters are checked
                object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), Iterable):
                object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def has_penalties(self) -> bool:
        """Return whether a distribution depends on which tokens came before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def grammar(self) -> tuple[str, str] | None:
        """Return the field that says what the text must look like, and its value; None if none is set."""
        return next(((name, value) for name in GRAMMARS if (value := getattr(self, name)) is not None), None)


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments of the client's methods, for type checkers."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    max_new_tokens: int | None
    num_logprobs: int | None
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    lark: str | None


SAMPLING_PARAMETERS: Mapping[str, Parameter] = {
    entry.name: entry.metadata["parameter"] for entry in fields(SamplingParams)
}


class AcceptanceRuleName(Enum):
    """The rules that accept draft tokens; the values are those of specdec.v1.AcceptanceRule."""

    TOKEN = 1  # each draft token is tested by itself (Leviathan et al. 2023)
    BLOCK = 2  # the draft is tested as a block (Sun et al. 2024)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Speculative decoding options; None leaves an option to the service. None of them changes the distribution."""

    num_draft_tokens: int | None = None  # None: automatic; 0: plain decoding
    drafter: str | None = None
    acceptance_rule: AcceptanceRuleName | None = None


class DetachedPolicy(Enum):
    """What becomes of a session when its last client has left."""

    PARK = 1  # its rounds stop; it waits in the store to be resumed, until it expires
    FINISH = 2  # it runs to its end, as if somebody followed it
    CANCEL = 3  # its rounds stop; it is cancelled unless a client comes back soon


class TokenOrigin(Enum):
    """Where a committed token came from."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3


@dataclass(frozen=True, slots=True)
class RoundDraft:
    """How a round was drafted."""

    # its name; "none" without one, "grammar" for text that the session's grammar forces, "lookup" for what the
    # coordinator found in the session's own text
    drafter: str
    num_draft_tokens: int  # of all branches of a tree
    depth: int  # draft tokens of the longest branch
    end: int  # completion tokens up to the round's end


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model is, for comparing a draft with a target. Fields: specdec.v1.ModelInfo."""

    name: str
    tokenizer_fingerprint: str = ""
    vocab_size: int = 0
    context_length: int = 0
    dtype: str = ""
    device: str = ""
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""  # of everything that the output depends on
    num_layers: int = 0
    hidden_size: int = 0
    quantization: str = ""


class FinishReason(Enum):
    """Why a session ended; the values are those of specdec.v1.FinishReason."""

    EOS = 1
    STOP = 2
    LENGTH = 3
    CANCELLED = 4


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sums over all rounds of a session, durations in seconds."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_tokens: int = 0
    draft_s: float = 0.0
    score_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0
    num_drafts_per_depth: tuple[int, ...] = ()  # rounds that drafted a token there, the first draft token's depth first
    num_accepted_tokens_per_depth: tuple[int, ...] = ()  # rounds that accepted a token there

    @property
    def acceptance_rate(self) -> float:
        """Return accepted / drafted; 0 if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Return committed / rounds, the closing token included."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Return committed tokens a second."""
        return self.num_tokens / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability under the model's own distribution, in nats; then the most probable tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log probability), best first
