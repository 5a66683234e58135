"""`python -m tests.fuzz.coordinator_process FLAGS...`: a coordinator that asks a worker that has lied again at once.

Otherwise a worker that lies is asked for one round in half a minute, and hardly any lie is heard.
"""

from unittest import mock

from coordinator.__main__ import main
from specdec.retry import RetryPolicy

if __name__ == "__main__":
    no_pauses = RetryPolicy(first_s=0.0)
    with mock.patch("coordinator.pool.breaker.TRIALS", no_pauses), mock.patch("coordinator.draft.RETRY", no_pauses):
        main()
