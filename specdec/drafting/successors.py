"""Which tokens a target found most probable after each token (Luo et al. 2024, "Token Recycling")."""

from collections import deque
from collections.abc import Sequence
from struct import unpack_from

from specdec.drafting.candidate_tree import RANK_CHANCES

NUM_SUCCESSORS = len(RANK_CHANCES)
MAX_SHARED_TOKENS = 1 << 18  # of a table: as many as the largest vocabularies; some 200 bytes each


class SessionSuccessors:
    """The latest report after each token of one session. Truncation takes reports back.

    It keeps those of `max_tokens` tokens, and of all but the last `max_log` reports it does not know what they
    replaced: where truncation comes to something that was given up, nothing is left.
    """

    def __init__(self, max_log: int | None = None, max_tokens: int | None = None) -> None:
        self._max_log, self._max_tokens = max_log, max_tokens
        self._reports: dict[int, bytes] = {}  # by token, as they came in first
        self._log: deque[tuple[int, int, bytes | None]] = deque()  # position, token, the report before
        self._given_up_end = 0  # after the last position at which anything was given up

    @property
    def end(self) -> int:
        """The position after the last report's."""
        return self._log[-1][0] + 1 if self._log else 0

    def report(self, position: int, token: int, successors: bytes) -> None:
        """Remember what the target reported after a token; positions do not fall."""
        self._log.append((position, token, self._reports.get(token)))
        self._reports[token] = successors
        if self._max_tokens is not None and len(self._reports) > self._max_tokens:
            del self._reports[next(iter(self._reports))]
            self._given_up_end = position + 1
        if self._max_log is not None and len(self._log) > self._max_log:
            self._given_up_end = max(self._given_up_end, self._log.popleft()[0] + 1)

    def truncate(self, length: int) -> None:
        """Take back what was reported at the positions from `length` on."""
        if length < self._given_up_end:
            self._reports.clear()
            self._log.clear()
            self._given_up_end = 0
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
    """For each token the latest report of any session; for greedy sessions (specdec/serving/sharing.py)."""

    def __init__(self, max_tokens: int = MAX_SHARED_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._reports: dict[int, bytes] = {}

    def report(self, token: int, successors: bytes) -> None:
        """Remember a report after a token, unless the table is full of others."""
        if token in self._reports or len(self._reports) < self._max_tokens:
            self._reports[token] = successors

    def of(self, token: int) -> bytes | None:
        """Return the latest report after a token."""
        return self._reports.get(token)


def unpacked(successors: bytes) -> Sequence[int]:
    """Return the tokens of a report, as many as count."""
    return unpack_from(f"<{min(len(successors) // 4, NUM_SUCCESSORS)}I", successors)
