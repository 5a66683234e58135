"""The values that the services exchange: frozen, checked once at the border (`specdec.exact.codec`), trusted inside.

Number types are open on purpose: production rows hold floats, the proofs run the same code on fractions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

MAX_DRAFT_TOKENS = 32  # a row's support is at most 1024 tokens of 8 bytes: 32 rows stay under 300 kB


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn from logits; the defaults change nothing. Ranges: protos/specdec/v1/types.proto."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_new_tokens: int | None = None
    num_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def has_penalties(self) -> bool:
        """Say whether a row depends on which tokens came before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How a session is speculated; None is automatic."""

    num_draft_tokens: int | None = None
    drafter: str | None = None


class TokenOrigin(Enum):
    """Where a committed token came from."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model is, for comparing a draft with a target."""

    name: str
    tokenizer_fingerprint: str = ""
    vocab_size: int = 0
    context_length: int = 0
    dtype: str = ""
    device: str = ""
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""  # of everything that its output depends on


class FinishReason(Enum):
    """Why a session ended; the values are those of specdec.v1.FinishReason."""

    EOS = 1
    STOP = 2
    LENGTH = 3
    CANCELLED = 4


@dataclass(frozen=True, slots=True)
class Statistics:
    """How a session went: sums over all of its rounds, durations in seconds."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_tokens: int = 0
    draft_s: float = 0.0
    score_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """Return accepted / drafted; 0 where nothing was drafted."""
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
    """A token's log probability under the model's own distribution, in nats; the most probable tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]
