"""The sentence that tells a user of the command that it waits for its service."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

from specdec.retry import Retry

QUIET_S = 2.0  # a coordinator that is replaced answers sooner
SILENT_S = 10.0  # of a stream that is not broken: a worker that is replaced answers sooner
SILENCE = (
    "nothing came for {silent_s:g} s: a long prompt or a queue, or a worker is away; the service goes on by itself, "
    "and `specdec watch` shows it; Ctrl-C leaves"
)


class OutageNotice:
    """Calls `say` once in each outage, after `quiet_s` without progress, and in each silence, after `silent_s`."""

    def __init__(self, say: Callable[[str], None], quiet_s: float = QUIET_S, silent_s: float = SILENT_S) -> None:
        self._say, self._quiet_s, self._silent_s = say, quiet_s, silent_s
        self._last: Retry | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None

    def retrying(self, retry: Retry) -> None:
        """Take note of a failure; the client's `on_retry`."""
        self._last = retry
        self._end_silence()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._announce)

    def waiting(self) -> None:
        """Take note that a stream is waited for from now on."""
        self._end_silence()
        self._silence = asyncio.get_running_loop().call_later(self._silent_s, self._announce_silence)

    def progress(self) -> None:
        """Take note that something arrived: outage and silence are over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.waiting()

    def ended(self) -> None:
        """Take note that nothing is waited for any more."""
        self.progress()
        self._end_silence()

    def _end_silence(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _announce(self) -> None:
        assert self._last is not None
        self._say(sentence(self._last, datetime.now()))

    def _announce_silence(self) -> None:
        self._say(SILENCE.format(silent_s=self._silent_s))


def sentence(retry: Retry, now: datetime) -> str:
    """Return what failed, until when it is tried again, and what the user can do."""
    problem = retry.failure.message.partition(";")[0]  # what follows are remedies, and this line has its own
    until = now + timedelta(seconds=retry.left_s)
    leave = "Ctrl-C leaves"
    if retry.session_id:
        leave += f", `specdec session resume {retry.session_id}` continues"
    return f"{problem}; trying again until {until:%H:%M:%S}; {leave}"
