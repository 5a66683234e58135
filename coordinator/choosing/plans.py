"""How a round may draft, what such a plan promises, and what a round came to."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.exact.lookup import NO_MATCH, Match
from specdec.exact.values import Proposal


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How a round drafts."""

    drafter: str | None = None  # None: nobody drafts
    num_draft_tokens: int = 0
    stop_below: float = 0.0  # a draft token with less chance of being accepted is not worth what it costs
    observes: bool = True  # whether the target shall observe what the session's drafters asked for
    fallback: "DraftPlan | None" = None  # to be followed where the drafter finds less than MIN_FOUND tokens


@dataclass(frozen=True, slots=True)
class Found:
    """What a round may draft without asking anybody."""

    match: Match = NO_MATCH  # in the session's own text
    num_offered: int = 0  # draft tokens of the target's own, which it has begun to score
    is_foreseen: bool = False  # the target has answered already what was said of this round
    is_redrawn: bool = False  # its tokens may have been drawn before: no draft may be drawn


NOTHING = Found()
MIN_FOUND = 2  # draft tokens; the guess of a drafter with a model is better than a single token that was looked up
PLAIN = DraftPlan()
RESTING = DraftPlan(observes=False)


@dataclass(frozen=True, slots=True)
class Missed:
    """A proposal in whose place a fallback was asked for another one."""

    plan: DraftPlan
    proposal: Proposal
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward of the target worker, with the rounds of all its sessions and no prompt."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a round drafted, accepted and cost."""

    plan: DraftPlan  # by which the scored proposal was drafted
    num_drafted: int
    path: Sequence[int]  # accepted nodes
    draft_s: float
    score_s: float
    num_sessions: int = 1  # at the target worker, waiting or in the forward
    has_prefill: bool = False  # a worker had to read more than a round's tokens
    other_s: float = 0.0  # what the coordinator itself took
    missed: Missed | None = None
    forward: Forward | None = None  # in which it was scored; None: not told


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a plan promises."""

    plan: DraftPlan
    num_tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Trial:
    """A round with another plan than the best one."""

    plan: DraftPlan
    best: Estimate
    expected_loss_s: float = 0.0  # that is counted already
    had_prefill: bool = False  # so that it measured no cost
    is_repeated: bool = False
