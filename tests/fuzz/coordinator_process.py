"""`python -m tests.fuzz.coordinator_process FLAGS...`: a coordinator that asks a worker that has lied again at once.

Otherwise a worker that lies is asked for one round in half a minute, and hardly any lie is heard. A lie that looks like
a sign of life is followed by no answer: it is waited for no longer than any answer here takes.
"""

from contextlib import ExitStack
from unittest import mock

from coordinator.__main__ import main
from specdec.retry import RetryPolicy

NO_PAUSES = RetryPolicy(first_s=0.0)
SHORT = {
    "coordinator.pool.breaker.TRIALS": NO_PAUSES,
    "coordinator.draft.RETRY": NO_PAUSES,
    "coordinator.target.RETRY": RetryPolicy(first_s=0.01, maximum_s=0.05),
    "coordinator.target.MIN_ROUND_S": 2.0,
}

if __name__ == "__main__":
    with ExitStack() as stack:
        for name, value in SHORT.items():
            stack.enter_context(mock.patch(name, value))
        main()
