"""Chooses K, the number of draft tokens: the K with the highest expected number of tokens a second.

With acceptance rate a, a round of K draft tokens yields (1 - a^(K+1)) / (1 - a) tokens on average (Leviathan et al.
2023, equation 1) and costs score(K) + K draft. K is chosen before the round draws anything, and each round has fresh
randomness, so the choice may depend on all earlier rounds without changing the distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

DECAY = 0.95  # of an observation's weight, a round
FORGOTTEN = 0.03  # a fit of less weight counts as unknown: 70 to 130 plain rounds after the last drafted one
PRIOR_WEIGHT = 8.0  # the prior acceptance rate counts as much as this many tested draft tokens
PRIOR_ACCEPTANCE = 0.7
PRIOR_SLOPE = 0.03  # scoring one more token costs this fraction of a forward, until measured
MIN_GAIN = 1.05  # speculation must promise this speed-up, so that K does not alternate with 0
PROBE_EVERY = 64  # plain rounds after which drafting is tried once more
PROBE_LENGTH = 2


@dataclass(slots=True)
class DecayedLinearFit:
    """Seconds as a linear function of K: ridge regression on rounds whose weight decays with age.

    `prior_slope(k, s)` is the ridge prior for the slope around the mean round (k, s); it decides while all rounds had
    nearly the same K.
    """

    prior_slope: Callable[[float, float], float]
    _weight: float = 0.0
    _k: float = 0.0
    _kk: float = 0.0
    _s: float = 0.0
    _ks: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether any observation still counts."""
        return self._weight > FORGOTTEN

    def observe(self, k: int, seconds: float) -> None:
        """Add one round."""
        self.age()
        self._weight += 1
        self._k, self._kk = self._k + k, self._kk + k * k
        self._s, self._ks = self._s + seconds, self._ks + k * seconds

    def age(self) -> None:
        """Decay all weights by one round."""
        self._weight, self._k, self._kk = DECAY * self._weight, DECAY * self._k, DECAY * self._kk
        self._s, self._ks = DECAY * self._s, DECAY * self._ks

    def predict(self, k: int) -> float:
        """Return the expected seconds, more than 0."""
        mean_k, mean_s = self._k / self._weight, self._s / self._weight
        spread = self._kk / self._weight - mean_k**2
        covariance = self._ks / self._weight - mean_k * mean_s
        slope = max((covariance + self.prior_slope(mean_k, mean_s)) / (spread + 1), 0.0)
        return max(mean_s + slope * (k - mean_k), 0.1 * mean_s)


def _score_fit() -> DecayedLinearFit:
    return DecayedLinearFit(lambda _, s: PRIOR_SLOPE * s)


@dataclass(slots=True)
class Costs:
    """The cost of rounds with one drafter in seconds, learned over all sessions of a coordinator.

    Scoring costs are kept apart by the target worker's load (in powers of two of its sessions), so that a change of
    load changes the choice at once. The cost of drafting is forgotten while no session drafts, and then
    measured again: one slow round must not disable speculation.
    """

    draft: DecayedLinearFit = field(default_factory=lambda: DecayedLinearFit(lambda k, s: s / k))
    _score: dict[int, DecayedLinearFit] = field(default_factory=dict)  # by load level
    _load_level: int = 1

    def observe(self, num_draft_tokens: int, draft_s: float, score_s: float, num_sessions: int = 1) -> None:
        """Add one round without prefill; `num_sessions` are the target worker's, waiting or in the forward."""
        if num_draft_tokens:
            self.draft.observe(num_draft_tokens, draft_s)
        else:
            self.draft.age()
        self._load_level = num_sessions.bit_length()
        self._score.setdefault(self._load_level, _score_fit()).observe(num_draft_tokens, score_s)

    def round_s(self, num_draft_tokens: int) -> float:
        """Return the expected seconds of a round of K draft tokens at the current load."""
        draft_s = self.draft.predict(num_draft_tokens) if num_draft_tokens else 0.0
        return draft_s + self._score[self._load_level].predict(num_draft_tokens)


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Return the mean tokens of a round, the closing token included."""
    return float(sum(acceptance_rate**length for length in range(num_draft_tokens + 1)))


@dataclass(slots=True)
class DraftLength:
    """Chooses K for the rounds of one session."""

    costs: Costs
    maximum: int
    fixed: int | None = None
    _accepted: float = PRIOR_WEIGHT * PRIOR_ACCEPTANCE
    _tested: float = PRIOR_WEIGHT
    _plain_rounds: int = field(default=0)

    @property
    def acceptance_rate(self) -> float:
        """The estimated probability that a draft token is accepted, given that those before it were."""
        return self._accepted / self._tested

    def choose(self, remaining_tokens: int) -> int:
        """Return K for a round that may commit at most `remaining_tokens` tokens, one of which closes it."""
        maximum = max(remaining_tokens - 1, 0)
        if self.fixed is not None:
            return min(self.fixed, maximum)
        if not self.costs.draft.is_known or self._plain_rounds >= PROBE_EVERY:
            return min(PROBE_LENGTH, self.maximum, maximum)
        return min(self._best(), maximum)

    def observe(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Add one round's verdict; of a tree, its depth. Tokens up to the first rejection were tested, the rest not."""
        self._plain_rounds = 0 if num_draft_tokens else self._plain_rounds + 1
        tested = min(num_accepted + 1, num_draft_tokens)
        if tested:
            self._accepted = DECAY**tested * self._accepted + num_accepted
            self._tested = DECAY**tested * self._tested + tested

    def _best(self) -> int:
        speeds = [
            expected_tokens(self.acceptance_rate, count) / self.costs.round_s(count)
            for count in range(self.maximum + 1)
        ]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] > MIN_GAIN * speeds[0] else 0
