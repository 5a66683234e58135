"""When a worker is asked: one circuit breaker a worker, for all sessions of a coordinator. Time is an argument.

    OUT ──a probe is answered──▶ IN_SERVICE ──a probe or a connection fails──▶ OUT
     │                                ▲     ──a round fails──▶ OUT, and must prove itself
     └──answered, must prove itself──▶ ON_TRIAL ──a round succeeds──▶ IN_SERVICE

A worker that describes itself while its rounds fail or hang is not trusted: on trial it gets one session at a time, at
pauses that grow with each trial that fails.
"""

from enum import Enum

from specdec.retry import RetryPolicy

TRIALS = RetryPolicy(first_s=1.0, maximum_s=30.0, jitter=0.0)  # pauses between them


class WorkerState(Enum):
    """Whether a worker is asked; the value is what metrics show."""

    OUT = 0
    ON_TRIAL = 1
    IN_SERVICE = 2


class Breaker:
    """One worker's; out until its first probe is answered."""

    def __init__(self) -> None:
        self.state = WorkerState.OUT
        self._num_failed_trials = 0  # since the last round that succeeded; above 0: it must prove itself
        self._next_trial_s = 0.0

    def probe_answered(self) -> None:
        """Note that the worker described itself."""
        if self.state is WorkerState.OUT:
            self.state = WorkerState.ON_TRIAL if self._num_failed_trials else WorkerState.IN_SERVICE

    def lost(self) -> None:
        """Note that a probe or a connection failed."""
        self.state = WorkerState.OUT

    def round_succeeded(self) -> None:
        """Note that the worker answered a round."""
        self.state = WorkerState.IN_SERVICE
        self._num_failed_trials, self._next_trial_s = 0, 0.0

    def round_failed(self, now_s: float) -> None:
        """Note that a round failed inside the worker, or hung; those that fail together count once."""
        self.state = WorkerState.OUT
        if now_s >= self._next_trial_s:
            self._plan_trial(now_s)

    def is_due(self, now_s: float) -> bool:
        """Return whether a worker on trial may be given a session now."""
        return self.state is WorkerState.ON_TRIAL and now_s >= self._next_trial_s

    def try_now(self, now_s: float) -> None:
        """Note that a worker on trial is given a session."""
        if self.state is WorkerState.ON_TRIAL:
            self._plan_trial(now_s)

    def _plan_trial(self, now_s: float) -> None:
        self._num_failed_trials += 1
        self._next_trial_s = now_s + (TRIALS.pause_s(self._num_failed_trials, 0.0, 0.0) or 0.0)
