"""What clients were shown, and whether it is what the log finally has, and what a run without faults gives.

1. A client gets each token once, in order: a chunk begins where the last one ended.
2. What it got is a prefix of the session's log as it finally is, also if the log was rewritten in between.
3. Greedy text, and text of a fixed seed and number of draft tokens, is that of a run without faults. A round whose
   draft was lost draws with other keys: from there on the text of a seed is another one of the same distribution.
4. No client fails, but of a session of which a store that went back in time has lost what was shown.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from specdec.completion import Chunk, Completion
from specdec.errors import DataLossError, NotFoundError, SpecdecError
from specdec.types import SamplingParams, SpeculationParams, TokenOrigin

LOST = (DataLossError, NotFoundError)
Round = tuple[tuple[int, ...], tuple[TokenOrigin, ...]]


@dataclass(frozen=True, slots=True)
class Text:
    """A request, and what it gives without faults; None: that may differ each time."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationParams
    undisturbed: Completion | None = None

    @property
    def has_fixed_text(self) -> bool:
        """Whether the same request gives the same text each time."""
        return self.sampling.temperature == 0 or self.speculation.num_draft_tokens is not None


@dataclass(slots=True)
class View:
    """What one client got of a session."""

    session: "Session"
    begin_s: float
    tokens: list[int] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    end_s: float | None = None

    def longest_wait_s(self, begin_s: float, end_s: float) -> float | None:
        """Return the longest time without news that has a part in an interval; None: nobody waited then."""
        last_s = self.arrivals_s[-1] if self.arrivals_s else self.begin_s
        times_s = [self.begin_s, *self.arrivals_s, self.end_s or last_s]
        waits = pairwise(times_s)
        return max((later - former for former, later in waits if later > begin_s and former < end_s), default=None)


@dataclass(slots=True)
class Session:
    """One session and all views of it."""

    name: str
    text: Text
    views: list[View] = field(default_factory=list)
    session_id: str = ""
    was_rolled_back: bool = False  # the store went back in time while it ran, or before it was compared
    is_lost: bool = False  # the service said so
    is_cancelled: bool = False


@dataclass(slots=True)
class Ledger:
    """Checks every observation; `violations` says what was wrong."""

    sessions: list[Session] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)  # tokens lost, doubled, changed
    num_tokens: int = 0
    num_compared: int = 0  # of these, with a run without faults
    num_retries: int = 0
    num_refused: int = 0  # of these, for want of room: the service says when to come back, and clients wait so long
    news: asyncio.Event = field(default_factory=asyncio.Event)  # set by each chunk

    def violated(self, session: Session, kind: str, what: str) -> None:
        """Record that an invariant is broken."""
        self.wrong[kind] += 1
        self.violations.append(f"{session.name} ({session.session_id[:8]}): {what}")

    def began(self, session: Session, now_s: float) -> View:
        """Return the view of a client that begins."""
        view = View(session, now_s)
        session.views.append(view)
        return view

    def observed(self, view: View, chunk: Chunk, now_s: float) -> None:
        """Check a chunk at the moment when a client gets it."""
        session, length = view.session, len(view.tokens)
        session.session_id = session.session_id or chunk.session_id
        if chunk.session_id != session.session_id:
            self.violated(session, "changed", f"a client was moved to session {chunk.session_id[:8]}")
        if chunk.offset != length:
            kind = "doubled" if chunk.offset < length else "lost"
            self.violated(session, kind, f"a chunk begins at {chunk.offset} where the client has {length} tokens")
        for other in session.views:
            common = other.tokens[length : length + len(chunk.tokens)]
            if other is not view and list(chunk.tokens[: len(common)]) != common:
                self.violated(session, "changed", f"two clients got other tokens from {length} on")
        view.tokens += chunk.tokens
        view.origins += chunk.origins
        view.arrivals_s.append(now_s)
        self.num_tokens += len(chunk.tokens)
        self.news.set()

    def failed(self, session: Session, error: SpecdecError) -> None:
        """Judge the error that ended a client's stream."""
        self.endings[error.reason] += 1
        if session.was_rolled_back and isinstance(error, LOST):
            session.is_lost = True
        else:
            self.violated(session, "failed", f"a client failed with {error.reason}: {error.message}")

    def went_back(self) -> None:
        """Note that the store went back in time: any session that exists may have lost something."""
        for session in self.sessions:
            session.was_rolled_back = True

    def finish(self, session: Session, log: Sequence[int] | None) -> None:
        """Compare what was shown with the log as it finally is; None: the service says that it is lost."""
        if log is None and not session.was_rolled_back:
            self.violated(session, "lost", "its log is gone")
        session.is_lost = session.is_lost or log is None
        for view in session.views:
            if log is not None and view.tokens[: len(log)] != list(log[: len(view.tokens)]):
                self.violated(session, "changed", "a client got other tokens than the log has")
            if log is not None and len(log) < len(view.tokens) and not session.was_rolled_back:
                self.violated(session, "lost", f"a client got {len(view.tokens)} tokens, and the log has {len(log)}")
            self._compare(view)

    def _compare(self, view: View) -> None:
        """Compare with the text that the request gives without faults."""
        session, undisturbed = view.session, view.session.text.undisturbed
        if undisturbed is None:
            return
        agreed = num_comparable(view, undisturbed)
        self.num_compared += agreed
        if tuple(view.tokens[:agreed]) != undisturbed.tokens[: len(view.tokens)][:agreed]:
            pairs = zip(view.tokens, undisturbed.tokens, strict=False)
            first = next((place for place, (mine, expected) in enumerate(pairs) if mine != expected), "its end")
            self.violated(
                session, "changed", f"from {first} on it is not that of a run without faults: {describe(view)}"
            )
        is_short = len(view.tokens) < len(undisturbed.tokens)
        if is_short and view.end_s is not None and not (session.is_cancelled or session.is_lost):
            self.violated(session, "lost", f"it ended after {len(view.tokens)} of {len(undisturbed.tokens)} tokens")


def num_comparable(view: View, undisturbed: Completion) -> int:
    """Return how many tokens must be those of a run without faults: up to the first round that lost its draft."""
    text = view.session.text
    length, wanted = len(view.tokens), text.speculation.num_draft_tokens
    if text.sampling.temperature == 0 or not wanted:
        return length
    done = 0
    mine, expected = rounds(view.tokens, view.origins), rounds(undisturbed.tokens, undisturbed.origins)
    for pair in zip(mine, expected, strict=False):
        if pair[0] != pair[1] and any(_lacks_drafts(played, wanted) for played in pair):
            return done
        done += len(pair[0][0])
    return length


def _lacks_drafts(played: Round, wanted: int) -> bool:
    """Whether all drafts of a round were accepted, and were fewer than wanted: it was short of some.

    A machine that is busy enough loses drafts without any fault.
    """
    _, origins = played
    return origins[-1] is TokenOrigin.BONUS and len(origins) <= wanted


def describe(view: View) -> str:
    """Say what was asked for, and in which rounds the text came."""
    text = view.session.text
    lengths = [len(tokens) for tokens, _ in rounds(view.tokens, view.origins)]
    wanted = text.speculation.num_draft_tokens
    return f"temperature {text.sampling.temperature:g}, {wanted} draft tokens, rounds of {lengths}"


def rounds(tokens: Sequence[int], origins: Sequence[TokenOrigin]) -> Iterator[Round]:
    """Give the tokens of each round: accepted ones, and the one that closes it."""
    begin = 0
    for end, origin in enumerate(origins, 1):
        if origin is not TokenOrigin.ACCEPTED or end == len(origins):
            yield tuple(tokens[begin:end]), tuple(origins[begin:end])
            begin = end
