"""When to try again: exponential pauses with jitter, within a budget of time. Pure: clock and chance are handed in.

policy = RetryPolicy(first_s=0.1, maximum_s=2.0, budget_s=30.0)
pause_s = policy.pause_s(num_failures, elapsed_s, random.random())  # None: give up
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to wait after a failure.

    The n-th pause is `first_s * factor**(n - 1)`, at most `maximum_s`, less a random part of at most the fraction
    `jitter`: callers that failed together do not come back together.
    """

    first_s: float = 0.1
    maximum_s: float = 5.0
    factor: float = 2.0
    jitter: float = 0.5  # 0 to 1
    budget_s: float = math.inf  # from the first attempt's start to the last attempt's
    max_failures: int | None = None  # None: as many as the budget allows

    def pause_s(self, num_failures: int, elapsed_s: float, uniform: float, at_least_s: float = 0.0) -> float | None:
        """Return the pause after the `num_failures`-th failure in a row (from 1), or None to give up.

        `elapsed_s` is the time since the first attempt, `uniform` a number in [0, 1), `at_least_s` the pause that the
        other side asked for. The last pause is cut so that one attempt is made when the budget ends.
        """
        if elapsed_s >= self.budget_s or (self.max_failures is not None and num_failures >= self.max_failures):
            return None
        return min(
            max(self._backoff_s(num_failures) * (1 - self.jitter * uniform), at_least_s), self.budget_s - elapsed_s
        )

    def _backoff_s(self, num_failures: int) -> float:
        # past this exponent any sensible pause has reached its maximum, and a float would overflow
        return min(self.first_s * self.factor ** min(num_failures - 1, 64), self.maximum_s)
