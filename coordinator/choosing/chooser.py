"""Chooses drafter and number of draft tokens of each round: the plan with the most expected tokens a second.

The choice is made before the round draws anything, and each round has fresh randomness, so it may depend on all earlier
rounds without changing the distribution. Plans other than the best one are tried now and then; the time that trials
lose stays below EXPLORATION_SHARE of all time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from coordinator.choosing.acceptance_history import AcceptanceHistory, SessionAcceptance
from coordinator.choosing.costs import Costs, Counts
from specdec.types import MAX_DRAFT_TOKENS

LENGTHS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, *range(32, MAX_DRAFT_TOKENS + 1, 8)])
PROBE_LENGTH = 4  # draft tokens asked of a drafter whose cost is unknown
MIN_GAIN = 1.05  # speculation must promise this speed-up, so that it does not alternate with plain decoding
EXPLORATION_SHARE = 0.01  # of the time
MAX_SEEDS = 100_000  # remembered; what older sessions accepted has decayed


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How a round drafts."""

    drafter: str | None = None  # None: nobody drafts
    num_draft_tokens: int = 0


PLAIN = DraftPlan()


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a round drafted, accepted and cost."""

    plan: DraftPlan
    num_drafted: int
    path: Sequence[int]  # accepted nodes
    draft_s: float
    score_s: float
    num_sessions: int = 1  # at the target worker, waiting or in the forward
    has_prefill: bool = False  # a worker had to read more than a round's tokens


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
    had_prefill: bool = False  # so that it measured no cost
    is_repeated: bool = False


@dataclass(slots=True)
class Exploration:
    """Keeps the time that is lost by trying other plans than the best one below a share of all time."""

    _total_s: float = 0.0
    _lost_s: float = 0.0
    _num_trials: int = 0
    _tried: dict[str | None, int] = field(default_factory=dict)  # by drafter: its last trial

    def affords(self, loss_s: float) -> bool:
        """Return whether a trial that is expected to lose so much stays within the share."""
        return self._lost_s + loss_s <= EXPLORATION_SHARE * self._total_s

    def least_recent(self, plans: Iterable[DraftPlan]) -> DraftPlan | None:
        """Return the plan whose drafter was tried least recently."""
        return min(plans, key=lambda plan: self._tried.get(plan.drafter, 0), default=None)

    def begin(self, plan: DraftPlan) -> None:
        """Note a trial."""
        self._num_trials += 1
        self._tried[plan.drafter] = self._num_trials

    def observe(self, elapsed_s: float, lost_s: float = 0.0) -> None:
        """Add a round; `lost_s` is how much longer a trial took than the best plan would have."""
        self._total_s += elapsed_s
        self._lost_s = max(0.0, self._lost_s + lost_s)


class SharedStatistics:
    """What all sessions of a coordinator have measured."""

    def __init__(self, costs: Costs | None = None) -> None:
        self.costs = costs or Costs()
        self.exploration = Exploration()
        self._acceptance: dict[tuple[str, bool], AcceptanceHistory] = {}
        self._seeds: dict[int, None] = {}  # in the order in which they came

    def acceptance(self, drafter: str, is_greedy: bool) -> AcceptanceHistory:
        """Return a drafter's history over greedy, or over sampled, sessions."""
        return self._acceptance.setdefault((drafter, is_greedy), AcceptanceHistory())

    def for_seed(self, seed: int | None) -> "SharedStatistics":
        """Return what a session may learn from; `seed` is None for a greedy one, whose text no draw decides.

        Two sessions with one seed make the same draws: a choice made by what those draws accepted in the first would
        depend on the second's own future draws. So a seed's second session shares nothing but costs.
        """
        return SharedStatistics(self.costs) if seed is not None and self._is_repeated(seed) else self

    def _is_repeated(self, seed: int) -> bool:
        """Return whether a session had this seed before, and note it."""
        is_repeated = self._seeds.pop(seed, False) is None
        self._seeds[seed] = None
        if len(self._seeds) > MAX_SEEDS:
            del self._seeds[next(iter(self._seeds))]
        return is_repeated


class PlanChooser:
    """Chooses the plans of one session: among drafters, at any K, or at the K that the client set."""

    def __init__(
        self,
        shared: SharedStatistics,
        drafters: Sequence[str],
        maximum: int,
        num_draft_tokens: int | None = None,
        is_greedy: bool = False,
    ) -> None:
        self._costs, self._exploration = shared.costs, shared.exploration
        self._acceptance = {name: SessionAcceptance(shared.acceptance(name, is_greedy)) for name in drafters}
        self._maximum = maximum if num_draft_tokens is None else num_draft_tokens
        self._is_fixed = num_draft_tokens is not None
        self._trial: Trial | None = None  # the last round, if it was one

    def choose(self, remaining_tokens: int, available: Iterable[str] | None = None) -> DraftPlan:
        """Return the plan of a round that may commit at most `remaining_tokens` tokens, one of which closes it.

        `available` are the drafters whose workers answer; None: all.
        """
        names = set(self._acceptance if available is None else available)
        drafters = [name for name in self._acceptance if name in names]
        maximum = min(max(remaining_tokens - 1, 0), self._maximum)
        if self._trial and self._trial.had_prefill and not self._trial.is_repeated:
            self._trial = replace(self._trial, is_repeated=True)
            if self._trial.plan.drafter in drafters and self._trial.plan.num_draft_tokens <= maximum:
                return self._trial.plan
        self._trial = None
        if not drafters or not maximum:
            return PLAIN
        if self._is_fixed and len(drafters) == 1:
            return DraftPlan(drafters[0], maximum)
        unknown = [name for name in drafters if not self._costs.has_measured(name)]
        if unknown or not self._costs.knows_scoring:
            return self._probe((unknown or drafters)[0], maximum)
        return self._best_or_trial(drafters, maximum)

    def observe(self, outcome: RoundOutcome) -> None:
        """Add a round."""
        plan, elapsed_s = outcome.plan, outcome.draft_s + outcome.score_s
        if plan.drafter is not None:
            self._acceptance[plan.drafter].observe(plan.num_draft_tokens, outcome.num_drafted, outcome.path)
        if not outcome.has_prefill:
            if plan.drafter is not None:
                self._costs.observe_draft(plan.drafter, plan.num_draft_tokens, outcome.draft_s)
            self._costs.age_unused(name for name in self._acceptance if name != plan.drafter)
            self._costs.observe_score(outcome.num_drafted, outcome.score_s, outcome.num_sessions)
        if self._trial:
            self._trial = replace(self._trial, had_prefill=outcome.has_prefill)
            self._exploration.observe(elapsed_s, elapsed_s - (len(outcome.path) + 1) / self._trial.best.speed)
        elif not outcome.has_prefill:
            self._exploration.observe(elapsed_s)

    def _best_or_trial(self, drafters: Sequence[str], maximum: int) -> DraftPlan:
        plain = Estimate(PLAIN, 1.0, float(self._costs.score_s(0)))
        lengths = self._lengths(maximum)
        forgotten = [name for name in drafters if not self._costs.knows_drafting(name)]
        known = [self._best_length(name, lengths) for name in drafters if name not in forgotten]
        best = max(known, key=lambda estimate: estimate.speed, default=plain)
        if not self._is_fixed and best.speed <= MIN_GAIN * plain.speed:
            best = plain
        losses = {
            estimate.plan: estimate.seconds - estimate.num_tokens / best.speed
            for estimate in (*known, *([] if self._is_fixed else [plain]), *self._longer(best, lengths))
            if estimate.plan != best.plan
        }
        losses |= {self._probe(name, maximum): plain.seconds for name in forgotten}
        return self._tried(best, losses) or best.plan

    def _tried(self, best: Estimate, losses: Mapping[DraftPlan, float]) -> DraftPlan | None:
        """Return a plan to try, if one is affordable; `losses` are the seconds that each is expected to lose."""
        affordable = [plan for plan, loss_s in losses.items() if self._exploration.affords(loss_s)]
        plan = self._exploration.least_recent(affordable)
        if plan:
            self._exploration.begin(plan)
            self._trial = Trial(plan, best)
        return plan

    def _longer(self, best: Estimate, lengths: Counts) -> list[Estimate]:
        """Return the best plan with twice as many draft tokens, or as many as there may be."""
        longer = lengths[lengths >= 2 * best.plan.num_draft_tokens][:1]
        return [self._best_length(best.plan.drafter, longer)] if best.plan.drafter is not None and longer.size else []

    def _best_length(self, drafter: str, lengths: Counts) -> Estimate:
        """Return the drafter's best plan with one of these numbers of draft tokens."""
        acceptance = self._acceptance[drafter]
        tokens, drafted = acceptance.expected_tokens()[lengths], acceptance.expected_drafted()[lengths]
        seconds = self._costs.draft_s(drafter, lengths) + self._costs.score_s(drafted)
        best = int(np.argmax(tokens / seconds))
        return Estimate(DraftPlan(drafter, int(lengths[best])), float(tokens[best]), float(seconds[best]))

    def _probe(self, drafter: str, maximum: int) -> DraftPlan:
        """Return a plan that measures what a drafter costs."""
        return DraftPlan(drafter, maximum if self._is_fixed else min(PROBE_LENGTH, maximum))

    def _lengths(self, maximum: int) -> Counts:
        """Return the numbers of draft tokens to choose among, rising."""
        return np.array([maximum]) if self._is_fixed else np.append(LENGTHS[maximum > LENGTHS], maximum)
