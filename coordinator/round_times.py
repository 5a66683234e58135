"""How long a round is waited for: a multiple of what the rounds before it took."""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

NUM_REMEMBERED = 256  # rounds; a change of load shows within them
MIN_ROUNDS = 16  # below, nothing is known
QUANTILE = 0.95
FEW_TOKENS = 32  # a round that has to read more is a prefill
TOKENS_PER_CEILING = 2048  # that a worker may read for as long as a round without them may take


class _Latest:
    """The latest values, kept in order of time and of size: a quantile is asked for every round."""

    def __init__(self) -> None:
        self._by_age = deque[float]()
        self._by_size: list[float] = []

    def add(self, value: float) -> None:
        """Remember a value, and forget one that is too old."""
        if len(self._by_age) == NUM_REMEMBERED:
            del self._by_size[bisect_left(self._by_size, self._by_age.popleft())]
        self._by_age.append(value)
        insort(self._by_size, value)

    @property
    def high(self) -> float:
        """A high quantile; infinite where too little is remembered."""
        if len(self._by_size) < MIN_ROUNDS:
            return math.inf
        return self._by_size[int(QUANTILE * len(self._by_size))]


@dataclass(slots=True)
class RoundTimes:
    """The times of the last rounds of all sessions at one kind of worker, in seconds.

    Rounds that read a prompt are measured by the token: their time grows with it, and so does their ceiling.
    """

    floor_s: float
    ceiling_s: float
    factor: float  # times the quantile of what rounds took
    _decode_s: _Latest = field(default_factory=_Latest)
    _prefill_s: _Latest = field(default_factory=_Latest)  # a token

    def observe(self, elapsed_s: float, num_fed: int) -> None:
        """Note a round that read so many tokens; one that was given up counts with the time that it was waited for."""
        if num_fed > FEW_TOKENS:
            self._prefill_s.add(elapsed_s / num_fed)
        else:
            self._decode_s.add(elapsed_s)

    def limit_s(self, num_fed: int) -> float:
        """Return how long a round that reads so many tokens is waited for."""
        is_prefill = num_fed > FEW_TOKENS
        expected_s = self._decode_s.high + (self._prefill_s.high * num_fed if is_prefill else 0.0)
        ceiling_s = self.ceiling_s * (1 + num_fed / TOKENS_PER_CEILING if is_prefill else 1)
        return min(max(self.floor_s, self.factor * expected_s), ceiling_s)
