"""Drafting from what the target thought last time: the successors that it found most probable after each token.

It needs no model and no training, and serves any target: the target reports its most probable tokens at each committed
position, and a table keeps the latest report after each token (Luo et al. 2024, "Turning Trash into Treasure: Token
Recycling"). A tree joins these successors with what followed earlier occurrences of the text's end. A session's own
table comes first; then one that all sessions with the same target share, which holds nothing but which tokens may
follow a token.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from struct import unpack_from
from typing import NamedTuple

from pydantic import BaseModel, Field

from draft_service.candidate_tree import RANK_CHANCES, found_before, grow
from draft_service.context_index import ContextIndex
from draft_service.drafter import DrafterKind
from draft_service.session_texts import MAX_HELD_TOKENS, TextDrafter
from draft_service.sharing import draws_of, group_of
from specdec.exact.values import ObservationRequest, Observations, Proposal
from specdec.serving.server import Server
from specdec.serving.session_stream import WorkerSession

NUM_SUCCESSORS = len(RANK_CHANCES)
MAX_SHARED_TABLES = 8  # the least recently used goes first; a target has one
MAX_SHARED_TOKENS = 1 << 18  # of a table: as many as the largest vocabularies; some 300 bytes each


class RecycleSettings(BaseModel):
    """Settings of the drafter `recycle`."""

    recycle_shared: bool = Field(
        True, description="the drafter `recycle` learns which tokens follow a token from all sessions of a target"
    )


class Report(NamedTuple):
    """The target's most probable tokens after a token, and the draws that led to that position."""

    successors: bytes  # uint32[at most NUM_SUCCESSORS], the most probable first
    draws: int | None


class RecycledText(ContextIndex):
    """A session's tokens, and the target's latest report after each of them. Truncation takes reports back, too."""

    def __init__(self) -> None:
        super().__init__()
        self._reports: dict[int, bytes] = {}  # by token
        self._log: list[tuple[int, int, bytes | None]] = []  # position, its token, the report before

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and what was reported there."""
        while self._log and self._log[-1][0] >= length:
            _, token, before = self._log.pop()
            if before is None:
                del self._reports[token]
            else:
                self._reports[token] = before
        super().truncate(length)

    def report(self, position: int, successors: bytes) -> None:
        """Remember what the target reported at a position, unless it has done so."""
        if self._log and position <= self._log[-1][0]:
            return
        token = self.tokens[position]
        self._log.append((position, token, self._reports.get(token)))
        self._reports[token] = successors

    def successors(self, token: int) -> bytes | None:
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


class RecycleDrafter(TextDrafter[RecycledText]):
    """Drafts a tree of recycled successors and of what followed before."""

    observations = ObservationRequest(num_top_tokens=NUM_SUCCESSORS)

    def __init__(self, shares: bool = True, max_held_tokens: int = MAX_HELD_TOKENS) -> None:
        super().__init__("recycle", RecycledText, max_held_tokens)
        self._shares = shares
        self._tables: OrderedDict[str, SharedTable] = OrderedDict()  # by group, least recently used first

    def observe(self, session: WorkerSession, text: RecycledText, observations: Observations) -> None:
        """Remember the most probable tokens at each observed position."""
        table, draws = self._table(session), draws_of(session)
        for position, top in enumerate(observations.top_tokens, start=observations.start):
            text.report(position, top)
            if table:
                table.report(text.tokens[position], Report(top, draws))

    def draft(
        self, session: WorkerSession, text: RecycledText, num_draft_tokens: int, stop_below: float = 0.0
    ) -> Proposal:
        """Return a tree of at most `num_draft_tokens` tokens."""
        table, draws = self._table(session), draws_of(session)

        def successors(token: int) -> Sequence[int]:
            report = text.successors(token) or (table and table.successors(token, draws))
            return unpacked(report) if report else ()

        return grow(found_before(text, num_draft_tokens), text.tokens[-1], successors, num_draft_tokens, stop_below)

    def _table(self, session: WorkerSession) -> SharedTable | None:
        """Return the table that the session shares with others, if any."""
        group = group_of(session)
        if not self._shares or group is None:
            return None
        table = self._tables.setdefault(group, SharedTable())
        self._tables.move_to_end(group)
        if len(self._tables) > MAX_SHARED_TABLES:
            self._tables.popitem(last=False)
        return table


def unpacked(successors: bytes) -> Sequence[int]:
    """Return the tokens of a report, as many as count."""
    return unpack_from(f"<{min(len(successors) // 4, NUM_SUCCESSORS)}I", successors)


async def build(settings: RecycleSettings, server: Server, stack: AsyncExitStack) -> RecycleDrafter:
    """Return the drafter."""
    return RecycleDrafter(settings.recycle_shared)


KIND = DrafterKind("recycle", RecycleSettings, build)
