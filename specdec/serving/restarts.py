"""When a process that ended is started again: after pauses that grow, up to a limit of deaths in a row."""

import random
import time
from collections.abc import Callable

from specdec.retry import RetryPolicy

POLICY = RetryPolicy(first_s=0.5, maximum_s=60.0)
STABLE_S = 60.0  # a process that served as long had no lasting problem
MAX_DEATHS = 5  # in a row, each within STABLE_S of readiness: the next start would end like these


class Restarts:
    """The restarts of one process. Clock and chance are handed in."""

    def __init__(
        self,
        max_deaths: int | None = MAX_DEATHS,
        policy: RetryPolicy = POLICY,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """`max_deaths` None: without end."""
        self._max_deaths, self._policy, self._clock, self._uniform = max_deaths, policy, clock, uniform
        self._ready_s: float | None = None
        self.num_deaths = 0  # in a row

    def ready(self) -> None:
        """Take note that the process serves: the time to load a large model is no sign of health."""
        self._ready_s = self._clock()

    def pause_s(self) -> float | None:
        """Take note that the process ended; return the seconds until it is to be started again, None: never."""
        served_s = 0.0 if self._ready_s is None else self._clock() - self._ready_s
        self._ready_s = None
        self.num_deaths = 1 if served_s >= STABLE_S else self.num_deaths + 1
        if self._max_deaths is not None and self.num_deaths >= self._max_deaths:
            return None
        return self._policy.pause_s(self.num_deaths, 0.0, self._uniform())
