"""Trying other plans than the best one, for a small share of the time."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.choosing.plans import DraftPlan

EXPLORATION_SHARE = 0.01  # of the time


@dataclass(slots=True)
class Exploration:
    """Keeps the time that is lost by trying other plans than the best one below a share of all time.

    What a trial is expected to lose counts from its beginning: sessions that begin together shall not all try the same.
    """

    share: float = EXPLORATION_SHARE
    _total_s: float = 0.0
    _lost_s: float = 0.0
    _num_trials: int = 0
    _tried: dict[str | None, int] = field(default_factory=dict)  # by drafter: its last trial

    @property
    def is_due(self) -> bool:
        """Whether any trial is affordable."""
        return self.affords(0.0)

    def affords(self, loss_s: float) -> bool:
        """Return whether a trial that is expected to lose so much stays within the share."""
        return self._lost_s + loss_s <= self.share * self._total_s

    def least_recent(self, plans: Iterable[DraftPlan]) -> DraftPlan | None:
        """Return the plan whose drafter was tried least recently."""
        return min(plans, key=lambda plan: self._tried.get(plan.drafter, 0), default=None)

    def begin(self, plan: DraftPlan, loss_s: float) -> None:
        """Note a trial that is expected to lose so much."""
        self._num_trials += 1
        self._tried[plan.drafter] = self._num_trials
        self._lost_s = max(0.0, self._lost_s + loss_s)

    def observe(self, elapsed_s: float, lost_s: float = 0.0) -> None:
        """Add a round; `lost_s` is how much longer a trial took than the best plan would have, and than expected."""
        self._total_s += elapsed_s
        self._lost_s = max(0.0, self._lost_s + lost_s)
