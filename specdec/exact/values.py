"""The values of one round: proposal, scores, verdict. Frozen, checked once at the border (`codec.py`), trusted inside.

Number types are open on purpose: production distributions hold floats, the proofs run the same code on fractions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.types import TokenOrigin

MAX_SUPPORT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A sparse next-token distribution: what was truncated, renormalised, drawn from and shipped."""

    token_ids: Sequence[int]  # [S], the support, each id once
    probs: Sequence[float]  # [S], > 0, summing to 1


@dataclass(frozen=True, slots=True)
class Proposal:
    """K draft tokens, each with the row that it was drawn from; K = 0 is plain decoding."""

    tokens: tuple[int, ...] = ()  # [K]
    rows: tuple[SparseDistribution, ...] = ()  # [K]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """What the target says about one position: its distribution on a support, and beside it one draw from the rest."""

    support_probs: Sequence[float]  # [S], on the support of the draft's row; empty for the last row
    tail_mass: float  # mass outside the support, summed over that complement
    tail_token: int  # drawn from the distribution outside the support; meaningless where tail_mass is 0


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log probabilities of one position under the model's own distribution, in nats."""

    by_token: Mapping[int, float]  # every token that could be emitted here
    top: tuple[tuple[int, float], ...]  # the most probable tokens, best first


@dataclass(frozen=True, slots=True)
class Scores:
    """The target's answer to a proposal: K + 1 rows."""

    rows: tuple[TargetDistribution, ...]  # [K + 1]
    logprobs: tuple[PositionLogprobs, ...] = ()  # [K + 1], or empty where none were asked for


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a round ends: the first `num_accepted` draft tokens, then `next_token`."""

    num_accepted: int
    next_token: int
    next_origin: TokenOrigin


@dataclass(frozen=True, slots=True)
class Uniforms:
    """The coordinator's draws of one round."""

    accept: Sequence[float]  # [K], in [0, 1)
    close: float  # in [0, 1)


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a worker's time went, in seconds."""

    queue_s: float = 0.0
    forward_s: float = 0.0
    total_s: float = 0.0
