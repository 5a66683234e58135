"""The sentence that tells a user of the command that it waits for its service."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

from specdec.retry import Retry

QUIET_S = 2.0  # a coordinator that is replaced answers sooner


class OutageNotice:
    """Calls `say` once in each outage, after `quiet_s` without progress."""

    def __init__(self, say: Callable[[str], None], quiet_s: float = QUIET_S) -> None:
        self._say, self._quiet_s = say, quiet_s
        self._last: Retry | None = None
        self._timer: asyncio.TimerHandle | None = None

    def retrying(self, retry: Retry) -> None:
        """Take note of a failure; the client's `on_retry`."""
        self._last = retry
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._announce)

    def progress(self) -> None:
        """Take note that something arrived: the outage is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _announce(self) -> None:
        assert self._last is not None
        self._say(sentence(self._last, datetime.now()))


def sentence(retry: Retry, now: datetime) -> str:
    """Return what failed, until when it is tried again, and what the user can do."""
    problem = retry.failure.message.partition(";")[0]  # what follows are remedies, and this line has its own
    until = now + timedelta(seconds=retry.left_s)
    leave = "Ctrl-C leaves"
    if retry.session_id:
        leave += f", `specdec session resume {retry.session_id}` continues"
    return f"{problem}; trying again until {until:%H:%M:%S}; {leave}"
