"""A head that the target worker runs itself, between its forwards, to draft what it offers.

It reads the hidden states where they are computed: none cross the wire, and a round with its draft has no way to a
draft worker. A draft depends on the text, and on which of its states were observed, alone; in a matched session also on
the races that the target runs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from specdec.drafting.candidate_tree import Guesses
from specdec.drafting.request import DraftRequest
from specdec.exact.prefix import num_equal
from specdec.exact.values import Observations, Proposal
from specdec.heads.drafting.rounds import NOTHING, HeadRound
from specdec.heads.drafting.runner import Runner
from specdec.serving.session_stream import WorkerSession
from specdec.serving.telemetry import get_logger

MAX_WAITING = 256  # positions whose states wait for the next draft of a session
MAX_PIECES = 32  # that wait for being joined
MAX_SHARE = 0.5  # of a forward's time, for a draft: what costs nothing finds more than half of what a head finds
NUM_FIRST = 8  # drafts, the first of which are slow, before their time is judged by
MAX_JUDGED = 32  # states that a draft reads, so that its time tells of others: a session's first one reads its prompt
PROBED_EVERY = 64  # of so many drafts that are not worth it some are measured again
NUM_PROBED = 2  # of them, in a row: the first one reads the states that have come since
FADE = 0.8  # of the mean, for a draft measured again that read too much to be judged: no head stays off for that
WEIGHT = 0.2  # of the latest draft in the mean
MAX_OUTLIER = 2.0  # a draft that took more times the mean counts as this many times


@dataclass(frozen=True, slots=True)
class States:
    """The target's hidden states at positions in a row."""

    start: int
    rows: torch.Tensor  # [N, layers, hidden_size]

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + len(self.rows)

    def until(self, end: int) -> "States | None":
        """Return those before a position; None if there are none."""
        return None if end <= self.start else States(self.start, self.rows[: end - self.start])

    def followed_by(self, later: "States") -> "States":
        """Return both, or the later ones alone where positions between them are missing; the last MAX_WAITING."""
        if not self.start <= later.start <= self.end:
            return later
        rows = torch.cat((self.rows[: later.start - self.start], later.rows))
        return States(self.start + max(0, len(rows) - MAX_WAITING), rows[-MAX_WAITING:])


class WaitingStates:
    """The states of a session's text that the head was not given yet: those of each round, joined when taken."""

    def __init__(self) -> None:
        self._pieces: list[States] = []  # each begins where the one before it ends

    @property
    def end(self) -> int:
        """The position after the last one; -1 without any."""
        return self._pieces[-1].end if self._pieces else -1

    def truncate(self, length: int) -> None:
        """Forget those of a text that was left, from `length` on."""
        while self.end > length:
            if rest := self._pieces.pop().until(length):
                self._pieces.append(rest)

    def add(self, states: States) -> None:
        """Keep the states of a round."""
        if (self._pieces and states.start != self.end) or len(self._pieces) >= MAX_PIECES:
            self._pieces = [self.take().followed_by(states)]
        else:
            self._pieces.append(states)

    def take(self) -> States:
        """Return them, the last MAX_WAITING, and keep none; there must be some."""
        pieces, self._pieces = self._pieces, []
        rows = torch.cat([piece.rows for piece in pieces])[-MAX_WAITING:]
        return States(pieces[-1].end - len(rows), rows)


@dataclass(frozen=True, slots=True)
class HeadDraft:
    """What a head is asked for: a tree of at most `count` tokens after a text."""

    session: WorkerSession
    text: Sequence[int]
    states: States  # those that the head was not given before
    count: int
    stop_below: float = 0.0  # the chance to be accepted below which a token is not worth its place
    guesses: Guesses = Guesses()  # noqa: RUF009  # immutable; what followed the text's end before


class OwnHead:
    """Drafts for all sessions of a worker, on whichever thread asks."""

    def __init__(self, runner: Runner[Any]) -> None:
        self.layers = runner.observations.hidden_layers
        self._runner = runner
        self._lock = Lock()
        self._num_drafts, self._num_skipped, self._draft_s = 0, 0, 0.0  # the mean time of the latest drafts
        self.was_worth = True  # when it was last asked

    def is_worth(self, forward_s: float) -> bool:
        """Return whether a draft takes so little beside a forward that it pays."""
        self.was_worth = self._num_drafts < NUM_FIRST or self._draft_s <= MAX_SHARE * forward_s
        if self.was_worth:
            return True
        place = self._num_skipped % PROBED_EVERY
        self._num_skipped += 1
        return place >= PROBED_EVERY - NUM_PROBED

    def draft(self, asked: Sequence[HeadDraft]) -> list[Proposal]:
        """Return a tree for each of some different sessions; an empty one where states are missing, or the head fails.

        They are drafted together: a step of the head reads its weights once for all of them.
        """
        assert len({each.session.key for each in asked}) == len(asked), "a session has one draft at a time"
        with self._lock, torch.inference_mode():
            begin = time.perf_counter()
            try:
                return self._drafted([self._begun(each) for each in asked])
            except Exception as error:  # a draft is never worth a round
                for each in asked:
                    self._runner.sessions.forget(each.session.key)  # its keys may be incomplete
                get_logger().error("own_head_failed", error=f"{type(error).__name__}: {error}")
                return [NOTHING] * len(asked)
            finally:
                self._judge(time.perf_counter() - begin, max((len(each.states.rows) for each in asked), default=0))

    def _judge(self, elapsed_s: float, num_read: int) -> None:
        """Add the time of a draft to the mean, unless it read too many states."""
        if num_read > MAX_JUDGED:
            self._draft_s *= 1.0 if self.was_worth else FADE
            return
        if self._num_drafts >= NUM_FIRST:
            elapsed_s = min(elapsed_s, MAX_OUTLIER * self._draft_s)
            elapsed_s = (1 - WEIGHT) * self._draft_s + WEIGHT * elapsed_s
        self._draft_s = elapsed_s
        self._num_drafts += 1

    def _begun(self, asked: HeadDraft) -> HeadRound:
        held = self._runner.sessions.open(asked.session.key)
        num_known = num_equal(held.tokens, asked.text)
        observed = Observations(asked.states.start)
        new_tokens = asked.text[num_known:]
        request = DraftRequest(num_known, new_tokens, asked.count, observed, asked.stop_below, guesses=asked.guesses)
        begun: HeadRound = self._runner.new_round(asked.session, request, asked.states.rows)
        begun.held = held
        begun.held.update(request, self._runner.num_ahead)
        self._runner.begin(begun)
        return begun

    def _drafted(self, rounds: list[HeadRound]) -> list[Proposal]:
        while waiting := [each for each in rounds if not each.done]:
            self._runner.step(waiting)
        self._runner.sessions.evict({each.session.key for each in rounds})
        return [each.proposal or NOTHING for each in rounds]

    def forget(self, session: WorkerSession) -> None:
        """Free what is held of a session."""
        with self._lock:
            self._runner.sessions.forget(session.key)
