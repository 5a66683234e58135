"""When a draft worker that ended is started again: after pauses that grow, and without end."""

import random
import time
from collections.abc import Callable

from specdec.retry import RetryPolicy

POLICY = RetryPolicy(first_s=0.5, maximum_s=60.0)
STABLE_S = 60.0  # a worker that lived as long had no lasting problem


class Restarts:
    """The restarts of one worker. Clock and chance are handed in."""

    def __init__(
        self,
        policy: RetryPolicy = POLICY,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._policy, self._clock, self._uniform = policy, clock, uniform
        self._num_failures = 0
        self._started_s = clock()

    def pause_s(self) -> float:
        """Take note that the worker ended; return the seconds until it is to be started again."""
        lived_s = self._clock() - self._started_s
        self._num_failures = 1 if lived_s >= STABLE_S else self._num_failures + 1
        pause_s = self._policy.pause_s(self._num_failures, 0.0, self._uniform())
        assert pause_s is not None  # the policy has no budget
        return pause_s

    def started(self) -> None:
        """Take note that the worker was started."""
        self._started_s = self._clock()
