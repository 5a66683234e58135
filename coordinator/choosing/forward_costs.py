"""Seconds of a target worker's forwards by the tokens in them, as the worker tells them.

A forward rises in steps: the first tokens of a tile of the processor's products cost little, the next tile as much as
the first. No straight line says that. So the forwards of about as many tokens have a mean, and straight lines join the
means.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2

import numpy as np
from numpy.typing import NDArray

from coordinator.choosing.plans import Forward

NUM_TRUSTED = 3  # forwards that make the costs known; the first ones may have been slow
FORGOTTEN = 0.03  # what has less weight is not known any more
FADE = 0.995  # of a size's weight, a forward of another size: what is not tried any more is forgotten
MAX_WEIGHT = 20.0  # forwards: what those of a size count for, at most
SLOW_START = 2.0  # an early forward that is so many times faster than those before it replaces them
MAX_OUTLIER = 2.0  # a forward that took more times what was expected counts as this many times
PRIOR_SLOPE = 0.03  # one more token costs this fraction of a forward, until measured
STEP = 2  # tokens that are taken together, up to FINE of them; of more, OCTAVE groups a factor of two
FINE, OCTAVE = 16, 8


@dataclass(slots=True)
class Group:
    """Forwards of about as many tokens."""

    num_tokens: float
    seconds: float
    weight: float  # forwards

    def observe(self, forward: Forward, weight: float) -> None:
        """Add a forward, or a part of it."""
        is_early = self.weight < NUM_TRUSTED
        if is_early and SLOW_START * forward.seconds < self.seconds:
            self.seconds = forward.seconds
        self.weight = min(self.weight + weight, MAX_WEIGHT)
        self.num_tokens += weight / self.weight * (forward.num_tokens - self.num_tokens)
        self.seconds += weight / self.weight * (forward.seconds - self.seconds)


@dataclass(slots=True)
class ForwardCosts:
    """What forwards cost at one load."""

    _groups: dict[int, Group] = field(default_factory=dict)
    _weight: float = 0.0  # forwards, of late
    _num_observed: float = 0.0  # since it knew nothing
    _tokens: list[float] = field(default_factory=list)  # of groups, rising
    _seconds: list[float] = field(default_factory=list)  # rising

    @property
    def is_known(self) -> bool:
        """Whether there were enough forwards, and any of them still counts."""
        return self._num_observed >= NUM_TRUSTED and self._weight > FORGOTTEN

    def observe(self, forward: Forward, weight: float) -> None:
        """Add a forward; one that was slower than expected makes those of other sizes expected slower, too.

        `weight` is the part of it that is told of: each of the sessions in a forward tells of the same one.
        """
        if self._weight <= FORGOTTEN:
            self._num_observed = 0.0
        if self._num_observed < NUM_TRUSTED:
            self._groups.clear()  # the first forwards tell too little of their size, and of the machine
        self._num_observed += weight
        self._weight = min(self._weight + weight, MAX_WEIGHT)
        number = _group_of(forward.num_tokens)
        if self._groups:
            expected = self.predict(forward.num_tokens)
            forward = Forward(forward.num_tokens, min(forward.seconds, MAX_OUTLIER * expected))
            self._drift(number, 1 + weight / MAX_WEIGHT * (forward.seconds / expected - 1), FADE**weight)
            self._groups.setdefault(number, Group(forward.num_tokens, expected, 1.0)).observe(forward, weight)
        else:
            self._groups[number] = Group(forward.num_tokens, forward.seconds, weight)
        self._tokens, self._seconds = _rising([self._groups[key] for key in sorted(self._groups)])

    def _drift(self, number: int, factor: float, fade: float) -> None:
        """Expect other groups than the one with this number to be so many times as slow, and let them fade."""
        for other, group in self._groups.items():
            if other != number:
                group.seconds *= factor
                group.weight *= fade
        self._groups = {key: each for key, each in self._groups.items() if key == number or each.weight > FORGOTTEN}

    def age(self, decay: float) -> None:
        """Let what is known fade."""
        self._weight *= decay

    def predict(self, num_tokens: float) -> float:
        """Return the expected seconds of a forward; some forward must have been observed."""
        tokens, seconds = self._tokens, self._seconds
        place = bisect_right(tokens, num_tokens)
        if 0 < place < len(tokens):
            part = (num_tokens - tokens[place - 1]) / (tokens[place] - tokens[place - 1])
            return seconds[place - 1] + part * (seconds[place] - seconds[place - 1])
        at = 0 if place == 0 else -1
        return max(seconds[at] + self._slope(at) * (num_tokens - tokens[at]), 0.1 * seconds[0])

    def predict_each(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the expected seconds of forwards of so many tokens each."""
        tokens, seconds = self._tokens, self._seconds
        before, after = np.minimum(num_tokens - tokens[0], 0.0), np.maximum(num_tokens - tokens[-1], 0.0)
        inside = np.interp(num_tokens, tokens, seconds)
        expected: NDArray[np.float64] = inside + self._slope(0) * before + self._slope(-1) * after
        return np.maximum(expected, 0.1 * seconds[0])

    def _slope(self, at: int) -> float:
        """Return the seconds of one more token before the first group, or after the last one.

        Of forwards that are larger than any so far it is at least the mean of all: what is asked for there is not free.
        """
        tokens, seconds = self._tokens, self._seconds
        if len(tokens) == 1:
            return PRIOR_SLOPE * seconds[0] / (1 + PRIOR_SLOPE * tokens[0])
        mean = (seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0])
        if at == 0:
            return mean
        return max(mean, (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2]))


def _rising(groups: Sequence[Group]) -> tuple[list[float], list[float]]:
    """Return the groups' tokens and seconds where both rise; groups that contradict one another are joined.

    Isotonic regression by pooling adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, float, float]] = []  # weight, tokens, seconds
    for group in groups:
        weight, tokens, seconds = group.weight, group.num_tokens, group.seconds
        while pools and pools[-1][2] >= seconds:
            other, other_tokens, other_seconds = pools.pop()
            total = weight + other
            tokens = (weight * tokens + other * other_tokens) / total
            seconds = (weight * seconds + other * other_seconds) / total
            weight = total
        pools.append((weight, tokens, seconds))
    return [tokens for _, tokens, _ in pools], [seconds for _, _, seconds in pools]


def _group_of(num_tokens: float) -> int:
    """Return the number of the group of forwards of so many tokens; it rises with them."""
    if num_tokens <= FINE:
        return int(num_tokens - 1) // STEP
    return FINE // STEP + int(OCTAVE * log2(num_tokens / FINE))
