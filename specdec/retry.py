"""When a call is repeated: jittered exponential pauses within a budget of time. Clock and chance are handed in."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from specdec.errors import OverloadedError, SpecdecError, UnavailableError

LEAST_PAUSE_S = 0.001
MAX_EXPONENT = 64  # past it any sensible pause has reached its maximum, and a float would overflow


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to wait after a failure, in seconds.

    The n-th pause is `first_s * factor**(n - 1)`, at most `maximum_s`, less a random part of at most the fraction
    `jitter`: callers that failed together do not return together.
    """

    first_s: float = 0.1
    maximum_s: float = 5.0
    factor: float = 2.0
    jitter: float = 0.5  # 0 to 1
    budget_s: float = math.inf  # from the first attempt's start to the last attempt's
    max_failures: int | None = None  # in a row; None: as many as the budget allows

    def pause_s(self, num_failures: int, elapsed_s: float, uniform: float, retry_after_s: float = 0.0) -> float | None:
        """Return the pause after the `num_failures`-th failure in a row (from 1), or None to give up.

        `elapsed_s` is the time since the first attempt, `uniform` a number in [0, 1). The pause comes after the one
        that the server asked for, so that callers do not return all at once. The last pause is cut so that one
        attempt is made when the budget ends, but is long enough for the clock to move.
        """
        if elapsed_s >= self.budget_s or (self.max_failures is not None and num_failures >= self.max_failures):
            return None
        pause_s = retry_after_s + self._backoff_s(num_failures) * (1 - self.jitter * uniform)
        return max(LEAST_PAUSE_S, min(pause_s, self.budget_s - elapsed_s))

    def _backoff_s(self, num_failures: int) -> float:
        return min(self.first_s * self.factor ** min(num_failures - 1, MAX_EXPONENT), self.maximum_s)


@dataclass(frozen=True, slots=True)
class Retry:
    """A failure after which the client tries again: what the callback `on_retry` of a client gets."""

    failure: SpecdecError
    session_id: str | None  # None: of a call that is no stream, or before a stream's first chunk
    pause_s: float  # until the next attempt
    left_s: float  # until the client gives up, if nothing arrives


class Attempts:
    """The attempts of one call of a client under one deadline; a new chunk resets the pauses to the shortest.

    An address on which no specdec server has ever answered is given up after `connect_timeout_s`.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float,
        *,
        connect_timeout_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self.timeout_s = timeout_s
        self._policy, self._connect_timeout_s = policy, connect_timeout_s
        self._clock, self._uniform = clock, uniform
        self._begin = clock()
        self._num_failures = 0

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return self.budget_left_s(is_connected=True)

    def budget_left_s(self, *, is_connected: bool) -> float:
        """Return the seconds within which another attempt may begin; `is_connected` as for `pause_s`."""
        return max(0.0, self._begin + self._budget_s(is_connected) - self._clock())

    def progress(self) -> None:
        """Record that an attempt yielded a new chunk."""
        self._num_failures = 0

    def pause_s(self, failure: SpecdecError, *, is_connected: bool) -> float | None:
        """Return the pause before the next attempt, or None to give up.

        `is_connected`: a specdec server has answered on this address before.
        """
        if not failure.is_retryable:
            return None
        asked_s = failure.retry_after_s if isinstance(failure, OverloadedError | UnavailableError) else None
        elapsed_s = self._clock() - self._begin
        pause_s = self._policy.pause_s(self._num_failures + 1, elapsed_s, self._uniform(), asked_s or 0.0)
        if pause_s is None or elapsed_s + pause_s >= self._budget_s(is_connected):
            return None
        self._num_failures += 1
        return pause_s

    def _budget_s(self, is_connected: bool) -> float:
        return self.timeout_s if is_connected else min(self.timeout_s, self._connect_timeout_s)
