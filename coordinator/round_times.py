"""How long a round is waited for: a multiple of what the rounds before it took."""

import math
from collections import deque
from dataclasses import dataclass, field

NUM_REMEMBERED = 256  # rounds; a change of load shows within them
MIN_ROUNDS = 16  # below, nothing is known
QUANTILE = 0.95
FEW_TOKENS = 32  # a round that has to read more is a prefill
TOKENS_PER_CEILING = 2048  # that a worker may read for as long as a round without them may take


@dataclass(slots=True)
class RoundTimes:
    """The times of the last rounds of all sessions at one kind of worker, in seconds.

    Rounds that read a prompt are measured by the token: their time grows with it, and so does their ceiling.
    """

    floor_s: float
    ceiling_s: float
    factor: float  # times the quantile of what rounds took
    _decode_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    _prefill_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))  # a token

    def observe(self, elapsed_s: float, num_fed: int) -> None:
        """Note a round that read so many tokens; one that was given up counts with the time that it was waited for."""
        if num_fed > FEW_TOKENS:
            self._prefill_s.append(elapsed_s / num_fed)
        else:
            self._decode_s.append(elapsed_s)

    def limit_s(self, num_fed: int) -> float:
        """Return how long a round that reads so many tokens is waited for."""
        is_prefill = num_fed > FEW_TOKENS
        expected_s = _high(self._decode_s) + (_high(self._prefill_s) * num_fed if is_prefill else 0.0)
        ceiling_s = self.ceiling_s * (1 + num_fed / TOKENS_PER_CEILING if is_prefill else 1)
        return min(max(self.floor_s, self.factor * expected_s), ceiling_s)


def _high(times_s: deque[float]) -> float:
    """Return a high quantile of what is remembered; infinite where too little is."""
    if len(times_s) < MIN_ROUNDS:
        return math.inf
    return sorted(times_s)[int(QUANTILE * len(times_s))]
