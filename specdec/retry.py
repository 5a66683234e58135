"""When a call is repeated: jittered exponential pauses, bounded by the call's deadline. No I/O."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from specdec.errors import OverloadedError, SpecdecError, UnavailableError

MAX_DOUBLINGS = 30  # the cap is reached long before; 2.0 ** 1024 would overflow


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How the attempts of a call follow each other, in seconds.

    The pauses double up to `max_pause_s`, which bounds the rate of attempts; a new chunk resets them to the shortest.
    The deadline bounds their number. `max_retries` also bounds attempts in a row without a new chunk; None: no bound.
    An address on which no specdec server has ever answered is given up after `connect_timeout_s`.
    """

    max_retries: int | None = None
    connect_timeout_s: float = 20.0
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0

    def pause_s(self, num_failures: int, retry_after_s: float, jitter: float) -> float:
        """Return the pause after `num_failures` earlier failures in a row; `jitter` in [0, 1) spreads clients.

        It comes after the pause that the server asks for, so that clients do not return all at once.
        """
        backoff_s = min(self.first_pause_s * 2.0 ** min(num_failures, MAX_DOUBLINGS), self.max_pause_s)
        return retry_after_s + (0.5 + jitter / 2) * backoff_s


class Attempts:
    """The attempts of one call under one deadline. Clock and jitter are handed in."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.timeout_s = timeout_s
        self._policy, self._clock, self._jitter = policy, clock, jitter
        self._begin = clock()
        self._num_failures = 0

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.0, self._begin + self.timeout_s - self._clock())

    def progress(self) -> None:
        """Note that an attempt brought a new chunk."""
        self._num_failures = 0

    def pause_s(self, failure: SpecdecError, *, is_connected: bool) -> float | None:
        """Return the pause before the next attempt, or None to give up.

        `is_connected`: a specdec server has answered on this address before.
        """
        policy = self._policy
        if not failure.is_retryable or self._num_failures == policy.max_retries:
            return None
        asked_s = failure.retry_after_s if isinstance(failure, OverloadedError | UnavailableError) else None
        pause_s = policy.pause_s(self._num_failures, asked_s or 0.0, self._jitter())
        left_s = self.left_s
        if not is_connected:
            left_s = min(left_s, self._begin + policy.connect_timeout_s - self._clock())
        if pause_s >= left_s:
            return None
        self._num_failures += 1
        return pause_s
