"""Which tokens a target found most probable after each token (Luo et al. 2024, "Token Recycling")."""

from collections import deque
from collections.abc import Sequence
from struct import unpack_from
from typing import NamedTuple

from specdec.drafting.candidate_tree import RANK_CHANCES

NUM_SUCCESSORS = len(RANK_CHANCES)
MAX_SHARED_TOKENS = 1 << 18  # of a table: as many as the largest vocabularies; some 300 bytes each


class Report(NamedTuple):
    """The target's most probable tokens after a token, and the draws that led to that position."""

    successors: bytes  # uint32[at most NUM_SUCCESSORS], the most probable first
    draws: int | None


class SessionSuccessors:
    """The latest report after each token of one session. Truncation takes reports back.

    Of all but the last `max_log` reports it does not know what they replaced: where truncation comes to them, nothing
    is left.
    """

    def __init__(self, max_log: int | None = None) -> None:
        self._max_log = max_log
        self._reports: dict[int, bytes] = {}  # by token
        self._log: deque[tuple[int, int, bytes | None]] = deque()  # position, token, the report before
        self._unlogged_end = 0  # after the last position of which the log has been given up

    @property
    def end(self) -> int:
        """The position after the last report's."""
        return self._log[-1][0] + 1 if self._log else 0

    def report(self, position: int, token: int, successors: bytes) -> None:
        """Remember what the target reported after a token; positions do not fall."""
        self._log.append((position, token, self._reports.get(token)))
        self._reports[token] = successors
        if self._max_log is not None and len(self._log) > self._max_log:
            self._unlogged_end = self._log.popleft()[0] + 1

    def truncate(self, length: int) -> None:
        """Take back what was reported at the positions from `length` on."""
        if length < self._unlogged_end:
            self._reports.clear()
            self._log.clear()
            self._unlogged_end = 0
        while self._log and self._log[-1][0] >= length:
            _, token, before = self._log.pop()
            if before is None:
                del self._reports[token]
            else:
                self._reports[token] = before

    def of(self, token: int) -> bytes | None:
        """Return the latest report after a token."""
        return self._reports.get(token)


class SharedTable:
    """For each token the latest report of any session, and the latest one that other draws led to.

    With both, what a session finds never depends on reports of sessions that make the same draws as it does.
    """

    def __init__(self, max_tokens: int = MAX_SHARED_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._reports: dict[int, tuple[Report, Report | None]] = {}

    def report(self, token: int, report: Report) -> None:
        """Remember a report after a token."""
        known = self._reports.get(token)
        if known is None:
            if len(self._reports) < self._max_tokens:
                self._reports[token] = report, None
            return
        latest, other = known
        self._reports[token] = report, (other if latest.draws == report.draws else latest)

    def successors(self, token: int, draws: int | None) -> bytes | None:
        """Return the latest report after a token that no session with these draws made; greedy ones have none."""
        for report in self._reports.get(token, ()):
            if report and (report.draws is None or report.draws != draws):
                return report.successors
        return None


def unpacked(successors: bytes) -> Sequence[int]:
    """Return the tokens of a report, as many as count."""
    return unpack_from(f"<{min(len(successors) // 4, NUM_SUCCESSORS)}I", successors)
