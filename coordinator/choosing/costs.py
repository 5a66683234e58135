"""What rounds cost: seconds of drafting by drafter, and of scoring by drafter and by the target worker's load."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coordinator.choosing.forward_costs import ForwardCosts
from coordinator.choosing.plans import Forward

RESTING = ""  # in place of a drafter's name: rounds of sessions that rest, which are faster than other plain ones

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

DECAY = 0.95  # of an observation's weight, a round
PRIOR_RESTING = 0.65  # of an awake round's seconds, at a load at which no session has rested: too little, so one will
UNUSED_DECAY = 0.99  # of a drafter's costs, a round that could have used it and did not
FORGOTTEN = 0.03  # a fit of less weight counts as unknown: 350 to 600 rounds after the last observation
NUM_TRUSTED = 3  # observations that make a fit known; among the first ones, a first call may have been slow
SLOW_START = 2.0  # an early observation that is so many times faster than the fit replaces it
MAX_OUTLIER = 4.0  # a round that took more times what was expected counts as this many times
MIN_BUSY_SESSIONS = 3  # at a target worker: its forwards run for others anyway
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

    def observe(self, k: float, seconds: float, decay: float = DECAY) -> None:
        """Add one round."""
        if self._weight <= FORGOTTEN or (not self.is_trusted and SLOW_START * seconds < self.predict(k)):
            self.age(0.0)
        if self.is_known:
            seconds = min(seconds, MAX_OUTLIER * self.predict(k))
        self.age(decay)
        self._num_observed += 1
        self._weight += 1
        self._k, self._kk = self._k + k, self._kk + k * k
        self._s, self._ks = self._s + seconds, self._ks + k * seconds

    def age(self, decay: float = DECAY) -> None:
        """Decay all weights."""
        self._weight, self._k, self._kk = decay * self._weight, decay * self._k, decay * self._kk
        self._s, self._ks = decay * self._s, decay * self._ks

    def scale(self, factor: float) -> None:
        """Expect all seconds to be so many times as long."""
        self._s, self._ks = factor * self._s, factor * self._ks

    def slope(self) -> float:
        """Return the expected seconds of one more token, as its rounds say."""
        mean_k, mean_s = self._k / self._weight, self._s / self._weight
        spread = self._kk / self._weight - mean_k**2
        covariance = self._ks / self._weight - mean_k * mean_s
        return max((covariance + self.prior_slope(mean_k, mean_s)) / (spread + 1), 0.0)

    def predict(self, k: float, slope: float | None = None) -> float:
        """Return the expected seconds, more than 0; `slope` is known where its rounds need not say it."""
        mean_k, mean_s = self._k / self._weight, self._s / self._weight
        return max(mean_s + (self.slope() if slope is None else slope) * (k - mean_k), 0.1 * mean_s)

    def predict_each(self, k: Floats | Counts, slope: float | None = None) -> Floats:
        """Return the expected seconds of each of many numbers."""
        mean_k, mean_s = self._k / self._weight, self._s / self._weight
        return np.maximum(mean_s + (self.slope() if slope is None else slope) * (k - mean_k), 0.1 * mean_s)


def _draft_fit() -> DecayedLinearFit:
    return DecayedLinearFit(lambda k, s: 0.5 * s / k if k else s)


def _score_fit() -> DecayedLinearFit:
    return DecayedLinearFit(lambda k, s: PRIOR_SLOPE * s / (1 + PRIOR_SLOPE * k))


@dataclass(slots=True)
class RoundFits:
    """Rounds of one drafter: their seconds by tokens in the forward, and by the seconds expected of that forward."""

    by_tokens: DecayedLinearFit = field(default_factory=_score_fit)
    by_forward: DecayedLinearFit = field(default_factory=_score_fit)  # a second more takes a second more


@dataclass(slots=True)
class ScoreCosts:
    """Seconds of scoring at one load by tokens in the forward, those of all sessions.

    Of all rounds, and by drafter: a drafter at work may slow the target down, and a round that was not scored ahead
    waits for the forward that is running. What more tokens cost is the same for all of them, and it is learned from
    the forwards themselves: a round's own time says it badly, as it has waited for others too.
    """

    _forward: ForwardCosts = field(default_factory=ForwardCosts)  # as the worker measures it
    _all: RoundFits = field(default_factory=RoundFits)
    _by_drafter: dict[str | None, RoundFits] = field(default_factory=dict)  # None: rounds without a draft

    def predict(self, num_tokens: float, drafter: str | None) -> float:
        """Return the expected seconds of a drafter's round."""
        fits = self._of(drafter)
        if self.knows_forwards and fits.by_forward.is_trusted:
            return fits.by_forward.predict(self._forward.predict(num_tokens), slope=1.0)
        return fits.by_tokens.predict(num_tokens)

    def predict_each(self, num_tokens: Floats, drafter: str | None) -> Floats:
        """Return the expected seconds of rounds with so many tokens each in the forward."""
        fits = self._of(drafter)
        if self.knows_forwards and fits.by_forward.is_trusted:
            return fits.by_forward.predict_each(self._forward.predict_each(num_tokens), slope=1.0)
        return fits.by_tokens.predict_each(num_tokens)

    def added_each(self, num_tokens: float, num_more: Floats, drafter: str | None) -> Floats:
        """Return the expected seconds that so many more tokens each take in a forward of `num_tokens`."""
        if self.knows_forwards:
            return self._forward.predict_each(num_tokens + num_more) - self._forward.predict(num_tokens)
        return self._of(drafter).by_tokens.slope() * num_more

    def _of(self, drafter: str | None) -> RoundFits:
        """Return the fits of a drafter's rounds, those of all rounds while they are too few."""
        fits = self._by_drafter.get(drafter)
        return fits if fits and fits.by_tokens.is_trusted else self._all

    def has_measured(self, drafter: str | None) -> bool:
        """Whether a drafter's rounds were scored often enough."""
        return drafter in self._by_drafter and self._by_drafter[drafter].by_tokens.is_trusted

    @property
    def knows_forwards(self) -> bool:
        """Whether the worker told of enough forwards, and not too long ago."""
        return self._forward.is_known

    def age_forwards(self, decay: float) -> None:
        """Let what is known of forwards fade, where the worker told of none."""
        self._forward.age(decay)

    def observe(
        self, drafter: str | None, num_tokens: float, seconds: float, weight: float, forward: Forward | None
    ) -> None:
        """Add one round, and its forward where the worker told of that: the part of it that is one session's.

        A round that was slower than expected makes those of other drafters expected slower, too.
        """
        decay, own = DECAY**weight, self._by_drafter.setdefault(drafter, RoundFits())
        if own.by_tokens.is_trusted:
            ratio = min(seconds / self.predict(num_tokens, drafter), MAX_OUTLIER)
            for fits in self._by_drafter.values():
                if fits is not own:
                    fits.by_tokens.scale(1 + (1 - decay) * (ratio - 1))
        if forward:
            self._forward.observe(forward, weight)
        for fits in (own, self._all):
            fits.by_tokens.observe(num_tokens, seconds, decay)
            if forward:
                fits.by_forward.observe(self._forward.predict(num_tokens), seconds, decay)


@dataclass(slots=True)
class Costs:
    """The cost of rounds in seconds, learned over all sessions of a coordinator.

    Scoring costs are kept apart by the target worker's load (by factors of two of its sessions), so that a change of
    load changes the choice at once. A forward scores the tokens of all waiting sessions together, and all of them wait
    for it: so costs are learned by the tokens in the whole forward, and a plan is charged as if every session at the
    worker chose it. A plan that was not used for a while is not preferred because the machine has become
    slower since. A drafter's cost is forgotten while nobody uses it, and then measured again: one slow round must not
    disable it.
    """

    _draft: dict[str, DecayedLinearFit] = field(default_factory=dict)  # by drafter
    _score: dict[int, ScoreCosts] = field(default_factory=dict)  # by load level
    _other: dict[bool, DecayedLinearFit] = field(default_factory=dict)  # of the coordinator, by whether sessions rest
    num_sessions: int = 1  # at the target worker, in the last round
    _mean_drafted: float = 0.0  # draft tokens of a round, lately

    def note_sessions(self, num_sessions: int) -> bool:
        """Take note of how many sessions a target worker has, if rounds were scored at that load; return whether."""
        is_known = _load_of(num_sessions) in self._score
        if is_known:
            self.num_sessions = num_sessions
        return is_known

    def observe_draft(self, drafter: str, num_asked: int, seconds: float) -> None:
        """Add one round's drafting."""
        self._draft.setdefault(drafter, _draft_fit()).observe(num_asked, seconds)

    def age_unused(self, drafters: Iterable[str]) -> None:
        """Let the costs of drafters fade that a round could have used and did not."""
        for name in drafters:
            if name in self._draft:
                self._draft[name].age(UNUSED_DECAY)

    def observe_score(
        self,
        num_draft_tokens: int,
        seconds: float,
        num_sessions: int = 1,
        drafter: str | None = None,
        forward: Forward | None = None,
    ) -> None:
        """Add one round's scoring, and the forward that it was in, if the worker told of it.

        `num_sessions` are the target worker's, waiting or in the forward. Where workers tell of forwards, a round
        without one was scored beside prompts: what these took has to be done however it drafts, so that it is no cost.
        Where all rounds are like that, or older workers took their place, costs are learned from rounds again.
        """
        self.num_sessions = num_sessions
        num_tokens = num_sessions + num_draft_tokens + (num_sessions - 1) * self._mean_drafted
        self._mean_drafted += (num_draft_tokens - self._mean_drafted) / num_sessions
        costs = self._score.setdefault(self.load, ScoreCosts())
        if costs.knows_forwards and not forward:
            costs.age_forwards(UNUSED_DECAY ** (1 / num_sessions))
            return
        if forward:
            num_tokens = forward.num_tokens
        costs.observe(drafter, num_tokens, seconds, 1 / num_sessions, forward)

    def observe_other(self, is_resting: bool, seconds: float) -> None:
        """Add what the coordinator itself took in a round."""
        self._other.setdefault(is_resting, _score_fit()).observe(0, seconds)

    @property
    def is_busy(self) -> bool:
        """Whether the target worker has so many sessions that its forwards run for others anyway."""
        return self.num_sessions >= MIN_BUSY_SESSIONS

    @property
    def load(self) -> int:
        """The level of the target worker's load: its sessions by factors of two, with a power of two amid each."""
        return _load_of(self.num_sessions)

    @property
    def knows_scoring(self) -> bool:
        """Whether a round was scored at the current load."""
        return self.load in self._score

    def has_measured(self, drafter: str) -> bool:
        """Whether the drafter's cost was measured often enough, however long ago."""
        return drafter in self._draft and self._draft[drafter].is_trusted

    def knows_drafting(self, drafter: str) -> bool:
        """Whether the drafter's cost is known and recent."""
        return drafter in self._draft and self._draft[drafter].is_known

    def draft_s(self, drafter: str, num_asked: int) -> float:
        """Return the expected seconds of drafting."""
        return self._draft[drafter].predict(num_asked)

    def draft_each_s(self, drafter: str, num_asked: Counts) -> Floats:
        """Return the expected seconds of drafting so many tokens each."""
        return self._draft[drafter].predict_each(num_asked)

    def score_s(self, num_draft_tokens: float, drafter: str | None = None) -> float:
        """Return the expected seconds of scoring at the current load."""
        return self._score[self.load].predict(self.num_sessions * (1 + num_draft_tokens), drafter)

    def score_each_s(self, num_draft_tokens: Floats, drafter: str | None = None) -> Floats:
        """Return the expected seconds of scoring at the current load so many draft tokens each."""
        return self._score[self.load].predict_each(self.num_sessions * (1 + num_draft_tokens), drafter)

    def other_s(self, is_resting: bool = False) -> float:
        """Return the seconds that the coordinator itself is expected to take in a round."""
        return self._other[is_resting].predict(0) if is_resting in self._other else 0.0

    def plain_s(self) -> float:
        """Return the expected seconds of a round without a draft: at rest, where that is faster."""
        awake_s = self.score_s(0) + self.other_s()
        if not self._score[self.load].has_measured(RESTING):
            return PRIOR_RESTING * awake_s
        return min(awake_s, self.score_s(0, RESTING) + self.other_s(is_resting=True))

    def looked_up_each_s(self, num_draft_tokens: Floats, drafter: str) -> Floats:
        """Return the expected seconds of rounds that draft so many tokens of what was looked up."""
        if self.is_busy:
            return self._ahead_each_s(num_draft_tokens)
        return self.score_each_s(num_draft_tokens, drafter) + self.other_s()

    def offered_each_s(self, num_draft_tokens: Floats, drafter: str) -> Floats:
        """Return the expected seconds of rounds with so many draft tokens that the target scores ahead."""
        if self.is_busy or not self._score[self.load].has_measured(drafter):
            return self._ahead_each_s(num_draft_tokens)
        return self.score_each_s(num_draft_tokens, drafter) + self.other_s(is_resting=True)

    def _ahead_each_s(self, num_draft_tokens: Floats) -> Floats:
        """Return the expected seconds of rounds whose drafts the target knows before they are asked for: those of a
        plain one, and what more tokens take in a forward.

        So it is at a busy target, where a round's own time says nothing of its draft: its forward runs for others as
        well, and more or less of it is over when the round is asked for, by how many are answered together.
        """
        added = self._score[self.load].added_each
        return self.plain_s() + added(self.num_sessions, self.num_sessions * num_draft_tokens, None)

    def slope_s(self, drafter: str, num_draft_tokens: float) -> float:
        """Return the expected seconds of one more draft token of every session, drafted and scored.

        It is the mean of the second half of so many draft tokens: the first ones are drafted in any case.
        """
        half = max(num_draft_tokens, 1) / 2
        num_tokens = self.num_sessions * (1 + half)
        (added_s,) = self._score[self.load].added_each(num_tokens, np.array([self.num_sessions * half]), drafter)
        return float(added_s) / half + (self._draft[drafter].slope() if self.has_measured(drafter) else 0.0)


def _load_of(num_sessions: int) -> int:
    return (num_sessions + num_sessions // 2).bit_length()
