"""The interface of what runs a head: takes rounds of sessions, each step a forward of all of them."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from specdec.drafting.request import DraftRequest
from specdec.exact.values import ObservationRequest
from specdec.heads.drafting.rounds import HeadRound
from specdec.heads.drafting.sessions import HeldSessions
from specdec.serving.session_stream import WorkerSession

RoundT = TypeVar("RoundT", bound=HeadRound)


class Runner(Protocol[RoundT]):
    """A kind of head. Everything but `new_round` runs on one thread."""

    observations: ObservationRequest
    hidden_size: int  # of the target's states
    num_ahead: int  # tokens after a position that what is held of it depends on
    sessions: HeldSessions

    def new_round(self, session: WorkerSession, request: DraftRequest, states: torch.Tensor | None) -> RoundT:
        """Return a round; `states` [N, layers, hidden_size] are those that arrived."""
        ...

    def begin(self, begun: RoundT) -> None:
        """Take in what was observed; `begun.held` has the round's tokens."""
        ...

    def step(self, rounds: Sequence[RoundT]) -> None:
        """Run one forward for all rounds; end those that need no other."""
        ...
