"""What every way of drafting has in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.exact.values import Proposal, Timing
from specdec.serving.session_stream import Session
from specdec.types import ModelInfo

NO_TIME = Timing()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One round to draft for: truncate to `start`, append `tokens`, then draft at most `num_draft_tokens`."""

    start: int
    tokens: Sequence[int]
    num_draft_tokens: int

    @property
    def committed_length(self) -> int:
        """Tokens committed when the round began."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Drafted:
    """A drafter's answer."""

    proposal: Proposal
    cached_len: int  # less than `start`: nothing was drafted, repeat from here
    timing: Timing = NO_TIME


class Drafter(Protocol):
    """A way of drafting. Any draft distribution is valid if the shipped one is the one sampled from."""

    name: str
    model: ModelInfo  # without a vocabulary or a context length: any token and any length will do

    async def propose(self, session: Session, ask: DraftRequest, match: bool) -> Drafted:
        """Draft; repeating a call gives the same answer. `match` keeps what is held behind `start` and is the same."""
        ...

    def go_ahead(self, session: Session, ask: DraftRequest, proposal: Proposal) -> None:
        """Use the time until the next round; `proposal` has just been answered. Returns at once."""
        ...

    def leave(self, session: Session) -> None:
        """Stop what `go_ahead` began with this very `session`: its stream has ended."""
        ...

    def forget(self, session: Session) -> None:
        """Free what is held of the session."""
        ...
