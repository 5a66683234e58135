"""What rounds cost: seconds of drafting by drafter, and of scoring by the target worker's load."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

DECAY = 0.95  # of an observation's weight, a round
UNUSED_DECAY = 0.99  # of a drafter's costs, a round that could have used it and did not
FORGOTTEN = 0.03  # a fit of less weight counts as unknown: 350 to 600 rounds after the last observation
NUM_TRUSTED = 3  # observations that make a fit known; among the first ones, a first call may have been slow
SLOW_START = 2.0  # an early observation that is so many times faster than the fit replaces it
PRIOR_SLOPE = 0.03  # scoring one more token costs this fraction of a forward, until measured


@dataclass(slots=True)
class DecayedLinearFit:
    """Seconds as a linear function of a number of tokens: ridge regression on rounds whose weight decays with age.

    `prior_slope(k, s)` is the ridge prior for the slope around the mean round (k, s); it decides while all rounds had
    nearly the same k.
    """

    prior_slope: Callable[[float, float], float]
    _weight: float = 0.0
    _k: float = 0.0
    _kk: float = 0.0
    _s: float = 0.0
    _ks: float = 0.0
    _num_observed: int = 0

    @property
    def is_trusted(self) -> bool:
        """Whether there were enough observations."""
        return self._num_observed >= NUM_TRUSTED

    @property
    def is_known(self) -> bool:
        """Whether there were enough observations, and any of them still counts."""
        return self.is_trusted and self._weight > FORGOTTEN

    def observe(self, k: float, seconds: float) -> None:
        """Add one round."""
        if self._weight <= FORGOTTEN or (not self.is_trusted and SLOW_START * seconds < self.predict(k)):
            self.age(0.0)
        self.age()
        self._num_observed += 1
        self._weight += 1
        self._k, self._kk = self._k + k, self._kk + k * k
        self._s, self._ks = self._s + seconds, self._ks + k * seconds

    def age(self, decay: float = DECAY) -> None:
        """Decay all weights."""
        self._weight, self._k, self._kk = decay * self._weight, decay * self._k, decay * self._kk
        self._s, self._ks = decay * self._s, decay * self._ks

    def predict(self, k: float | Floats | Counts) -> Floats:
        """Return the expected seconds, more than 0, in the shape of `k`."""
        mean_k, mean_s = self._k / self._weight, self._s / self._weight
        spread = self._kk / self._weight - mean_k**2
        covariance = self._ks / self._weight - mean_k * mean_s
        slope = max((covariance + self.prior_slope(mean_k, mean_s)) / (spread + 1), 0.0)
        return np.maximum(mean_s + slope * (np.asarray(k) - mean_k), 0.1 * mean_s)


def _draft_fit() -> DecayedLinearFit:
    return DecayedLinearFit(lambda k, s: s / k if k else s)


def _score_fit() -> DecayedLinearFit:
    return DecayedLinearFit(lambda k, s: PRIOR_SLOPE * s / (1 + PRIOR_SLOPE * k))


@dataclass(slots=True)
class Costs:
    """The cost of rounds in seconds, learned over all sessions of a coordinator.

    Scoring costs are kept apart by the target worker's load (in powers of two of its sessions), so that a change of
    load changes the choice at once. A drafter's cost is forgotten while nobody uses it, and then measured again: one
    slow round must not disable it.
    """

    _draft: dict[str, DecayedLinearFit] = field(default_factory=dict)  # by drafter
    _score: dict[int, DecayedLinearFit] = field(default_factory=dict)  # by load level
    _load_level: int = 1

    def observe_draft(self, drafter: str, num_asked: int, seconds: float) -> None:
        """Add one round's drafting."""
        self._draft.setdefault(drafter, _draft_fit()).observe(num_asked, seconds)

    def age_unused(self, drafters: Iterable[str]) -> None:
        """Let the costs of drafters fade that a round could have used and did not."""
        for name in drafters:
            if name in self._draft:
                self._draft[name].age(UNUSED_DECAY)

    def observe_score(self, num_draft_tokens: int, seconds: float, num_sessions: int = 1) -> None:
        """Add one round's scoring; `num_sessions` are the target worker's, waiting or in the forward."""
        self._load_level = num_sessions.bit_length()
        self._score.setdefault(self._load_level, _score_fit()).observe(num_draft_tokens, seconds)

    @property
    def knows_scoring(self) -> bool:
        """Whether a round was scored at the current load."""
        return self._load_level in self._score

    def has_measured(self, drafter: str) -> bool:
        """Whether the drafter's cost was measured often enough, however long ago."""
        return drafter in self._draft and self._draft[drafter].is_trusted

    def knows_drafting(self, drafter: str) -> bool:
        """Whether the drafter's cost is known and recent."""
        return drafter in self._draft and self._draft[drafter].is_known

    def draft_s(self, drafter: str, num_asked: Counts) -> Floats:
        """Return the expected seconds of drafting, in the shape of `num_asked`."""
        return self._draft[drafter].predict(num_asked)

    def score_s(self, num_draft_tokens: float | Floats) -> Floats:
        """Return the expected seconds of scoring at the current load, in the shape of `num_draft_tokens`."""
        return self._score[self._load_level].predict(num_draft_tokens)
