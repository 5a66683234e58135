"""What the target worker drafts itself for rounds that it scores ahead, and offers to the coordinator.

A head of its own drafts it, if the worker has one (`own_head.py`) and the states before the text's end were observed;
what followed earlier occurrences of the text's end joins its tree.
Else it needs no model, no training and no message: after each token of a round the worker knows which tokens the target
found most probable there, and remembers them (Luo et al. 2024, "Token Recycling"). A tree joins these successors with
what followed earlier occurrences of the text's end. A session's own reports come first; a greedy one then reads those
of other sessions of its tenant (specdec/serving/sharing.py). So a draft of a sampled session depends on nothing but
text that was committed before its round, on what was drafted there, and on the target's distributions: on its draws
from then on only where a head guesses them, in a session all of whose drafts are matched.
"""

from collections import OrderedDict
from collections.abc import Sequence

from specdec.drafting.candidate_tree import Continuation, grow, most_promising, no_successors, reach
from specdec.drafting.successors import SessionSuccessors, SharedTable, unpacked
from specdec.exact.lookup import NextRound, TextLookup, following
from specdec.exact.values import Proposal
from specdec.serving.session_stream import WorkerSession
from specdec.serving.sharing import may_read_reports
from target_service.own_head import HeadDraft, States, WaitingStates

MAX_LOG = 1024  # reports of a session that can be taken back, some 150 bytes each
MAX_OWN_TOKENS = 4096  # of a session, of which reports are kept, some 200 bytes each
MAX_TENANTS = 16  # with a table; the least recently used goes first
MAX_TOKENS = 1 << 16  # of a table; some 200 bytes each


class SharedSuccessors:
    """What a worker's sessions share: a table a tenant."""

    def __init__(self, shares: bool = True) -> None:
        self._shares = shares
        self._tables: OrderedDict[str, SharedTable] = OrderedDict()  # by tenant, least recently used first

    def of(self, session: WorkerSession) -> SharedTable | None:
        """Return the table of a session's tenant, if sessions share anything."""
        if not self._shares:
            return None
        table = self._tables.setdefault(session.group, SharedTable(MAX_TOKENS))
        self._tables.move_to_end(session.group)
        if len(self._tables) > MAX_TENANTS:
            self._tables.popitem(last=False)
        return table


class SessionOffers:
    """What one session's rounds have told. Used by one task at a time."""

    def __init__(self, session: WorkerSession, table: SharedTable | None) -> None:
        self._session = session
        self._states = WaitingStates()
        self._table, self._reads_table = table, may_read_reports(session)
        self._own = SessionSuccessors(MAX_LOG, MAX_OWN_TOKENS)

    def report(self, committed_length: int, tokens: Sequence[int], successors: Sequence[bytes]) -> None:
        """Remember what the target found most probable after each token of a round: the last committed one, the draft.

        What later rounds told is forgotten: the session has gone back, and will make their draws again.
        """
        self._own.truncate(committed_length)
        for token, report in zip(tokens, successors, strict=True):
            self._own.report(committed_length - 1, token, report)
            if self._table is not None:
                self._table.report(token, report)

    def observe(self, committed_length: int, states: States | None) -> None:
        """Keep the states of a round that began at so many tokens for the head; what a left text showed goes."""
        self._own.truncate(committed_length)
        self._states.truncate(committed_length)
        if states is not None:
            self._states.add(states)

    def head_draft(self, text: Sequence[int], lookup: TextLookup, next_round: NextRound) -> HeadDraft | None:
        """Return what the worker's own head is to draft after a text; None without states."""
        count = _count(text, next_round)
        if self._states.end != len(text) - 1 or not count:
            return None
        states = self._states.take()
        found = most_promising(
            _continuations(text, lookup, count), text[-1], no_successors, count, next_round.stop_below
        )
        return HeadDraft(self._session, text, states, count, next_round.stop_below, found)

    def draft(self, text: Sequence[int], lookup: TextLookup, next_round: NextRound) -> Proposal:
        """Return a tree of draft tokens after a text, of what was seen in it."""
        count = _count(text, next_round)
        found = _continuations(text, lookup, count)
        return grow(found, text[-1], self._successors, count, next_round.stop_below)

    def _successors(self, token: int) -> Sequence[int]:
        report = self._own.of(token)
        if report is None and self._table and self._reads_table:
            report = self._table.of(token)
        return unpacked(report) if report else ()


def _continuations(text: Sequence[int], lookup: TextLookup, count: int) -> list[Continuation]:
    """Return what followed earlier occurrences of a text's end."""
    return [
        Continuation(following(text, match, reach(match.num_tokens, count)), match.num_tokens)
        for match in lookup.matches(text)
    ]


def _count(text: Sequence[int], next_round: NextRound) -> int:
    """Return how many tokens may be offered after a text."""
    return max(0, min(next_round.num_offered, next_round.max_length - len(text) - 1))
