"""Drafting from what the target thought last time: the successors that it found most probable after each token.

It needs no model and no training, and serves any target: the target reports its most probable tokens at each committed
position, and a table keeps the latest report after each token (Luo et al. 2024, "Turning Trash into Treasure: Token
Recycling"). A tree joins these successors with what followed earlier occurrences of the text's end. A session's own
table comes first; then, for greedy sessions, one that all sessions with the same target share, which holds nothing but
which tokens may follow a token.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AsyncExitStack

from pydantic import BaseModel, Field

from draft_service.context_index import ContextIndex
from draft_service.drafter import DrafterKind
from draft_service.found import found_before
from draft_service.session_texts import MAX_HELD_TOKENS, TextDrafter
from specdec.drafting.candidate_tree import grow
from specdec.drafting.successors import NUM_SUCCESSORS, SessionSuccessors, SharedTable, unpacked
from specdec.exact.values import ObservationRequest, Observations, Proposal
from specdec.serving.server import Server
from specdec.serving.session_stream import WorkerSession
from specdec.serving.sharing import group_of, may_read_reports

MAX_SHARED_TABLES = 8  # the least recently used goes first; a target has one


class RecycleSettings(BaseModel):
    """Settings of the drafter `recycle`."""

    recycle_shared: bool = Field(
        True,
        description="greedy sessions of `recycle` learn which tokens follow a token from all of a target",
    )


class RecycledText(ContextIndex):
    """A session's tokens, and the target's latest report after each of them. Truncation takes reports back, too."""

    def __init__(self) -> None:
        super().__init__()
        self._reported = SessionSuccessors()

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and what was reported there."""
        self._reported.truncate(length)
        super().truncate(length)

    def report(self, position: int, successors: bytes) -> None:
        """Remember what the target reported at a position, unless it has done so."""
        if position >= self._reported.end:
            self._reported.report(position, self.tokens[position], successors)

    def successors(self, token: int) -> bytes | None:
        """Return the latest report after a token."""
        return self._reported.of(token)


class RecycleDrafter(TextDrafter[RecycledText]):
    """Drafts a tree of recycled successors and of what followed before."""

    observations = ObservationRequest(num_top_tokens=NUM_SUCCESSORS)

    def __init__(self, shares: bool = True, max_held_tokens: int = MAX_HELD_TOKENS) -> None:
        super().__init__("recycle", RecycledText, max_held_tokens)
        self._shares = shares
        self._tables: OrderedDict[str, SharedTable] = OrderedDict()  # by group, least recently used first

    def observe(self, session: WorkerSession, text: RecycledText, observations: Observations) -> None:
        """Remember the most probable tokens at each observed position."""
        table = self._table(session)
        for position, top in enumerate(observations.top_tokens, start=observations.start):
            text.report(position, top)
            if table:
                table.report(text.tokens[position], top)

    def draft(
        self, session: WorkerSession, text: RecycledText, num_draft_tokens: int, stop_below: float = 0.0
    ) -> Proposal:
        """Return a tree of at most `num_draft_tokens` tokens."""
        table = self._table(session) if may_read_reports(session) else None

        def successors(token: int) -> Sequence[int]:
            report = text.successors(token) or (table and table.of(token))
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


async def build(settings: RecycleSettings, server: Server, stack: AsyncExitStack) -> RecycleDrafter:
    """Return the drafter."""
    return RecycleDrafter(settings.recycle_shared)


KIND = DrafterKind("recycle", RecycleSettings, build)
