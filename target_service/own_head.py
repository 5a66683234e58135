"""A head that the target worker runs itself, between its forwards, to draft what it offers.

It reads the hidden states where they are computed: none cross the wire, and a round with its draft has no way to a
draft worker. A draft depends on the text, and on which of its states were observed, alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from specdec.drafting.request import DraftRequest
from specdec.exact.values import Observations, Proposal
from specdec.heads.drafting.rounds import NOTHING
from specdec.heads.drafting.runner import Runner
from specdec.serving.session_stream import WorkerSession
from specdec.serving.telemetry import get_logger

MAX_WAITING = 256  # positions whose states wait for the next draft of a session


@dataclass(frozen=True, slots=True)
class States:
    """The target's hidden states at positions in a row."""

    start: int
    rows: torch.Tensor  # [N, layers, hidden_size]

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + len(self.rows)

    def followed_by(self, later: "States") -> "States":
        """Return both, or the later ones alone where positions between them are missing; the last MAX_WAITING."""
        if not self.start <= later.start <= self.end:
            return later
        rows = torch.cat((self.rows[: later.start - self.start], later.rows))
        return States(self.start + max(0, len(rows) - MAX_WAITING), rows[-MAX_WAITING:])


class OwnHead:
    """Drafts for all sessions of a worker, one at a time, on whichever thread asks."""

    def __init__(self, runner: Runner[Any]) -> None:
        self.layers = runner.observations.hidden_layers
        self._runner = runner
        self._lock = Lock()

    def draft(self, session: WorkerSession, text: Sequence[int], states: States, count: int) -> Proposal:
        """Return a tree of at most `count` tokens after a text; nothing where states are missing, or the head fails.

        `states` are those that this was not given before.
        """
        with self._lock, torch.inference_mode():
            try:
                return self._drafted(session, text, states, count)
            except Exception as error:  # a draft is never worth a round
                self._runner.sessions.forget(session.key)
                get_logger().error("own_head_failed", error=f"{type(error).__name__}: {error}")
                return NOTHING

    def _drafted(self, session: WorkerSession, text: Sequence[int], states: States, count: int) -> Proposal:
        sessions = self._runner.sessions
        request = DraftRequest(0, text, count, Observations(states.start))
        asked = self._runner.new_round(session, request, states.rows)
        asked.held = held = sessions.open(session.key)
        held.update(request, self._runner.num_ahead)
        self._runner.begin(asked)
        while not asked.done:
            self._runner.step([asked])
        sessions.evict({session.key})
        return asked.proposal or NOTHING

    def forget(self, session: WorkerSession) -> None:
        """Free what is held of a session."""
        with self._lock:
            self._runner.sessions.forget(session.key)
