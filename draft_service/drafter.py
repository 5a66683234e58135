"""The interface of drafters, and their registration."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from specdec.drafting.request import DraftRequest
from specdec.exact.values import ObservationRequest, Proposal, Timing
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.server import Server
from specdec.serving.session_stream import WorkerSession
from specdec.types import ModelInfo

NO_TIME = Timing()
NO_OBSERVATIONS = ObservationRequest()


@dataclass(frozen=True, slots=True)
class DraftResult:
    """A drafter's answer."""

    proposal: Proposal
    cached_len: int  # less than `start`: nothing was drafted, repeat from here
    timing: Timing = NO_TIME


class Drafter(Protocol):
    """A way of drafting. Any draft distribution is valid if the shipped one is the one sampled from."""

    name: str
    model: ModelInfo  # without a vocabulary or a context length: any token and any length is accepted
    observations: ObservationRequest  # what the target shall observe for it
    grammars: GrammarCompiler | None  # None: it drafts whatever a session's grammar may be

    async def propose(self, session: WorkerSession, request: DraftRequest, match: bool) -> DraftResult:
        """Draft; a repeated call gives the same answer. `match` keeps what is held after `start` and is the same."""
        ...

    def draft_ahead(self, session: WorkerSession, request: DraftRequest, proposal: Proposal) -> None:
        """Use the time until the next round; `proposal` has just been answered. Returns at once."""
        ...

    def abandon(self, session: WorkerSession, is_latest: bool) -> None:
        """Stop what `draft_ahead` began with this very `session`: its stream has ended.

        `is_latest`: no newer stream of the session uses what is held of it.
        """
        ...

    def forget(self, session: WorkerSession) -> None:
        """Free what is held of the session."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A registered way of drafting. A module in `draft_service/drafters/` that has a `KIND` is found by itself."""

    name: str
    settings: type[BaseModel]  # its own settings; each field becomes a flag and a variable of the worker
    build: Callable[[Any, Server, AsyncExitStack], Awaitable[Drafter]]
    """Makes the drafter from the worker's settings, with what it must close on the stack. Raises ValueError."""
    check: Callable[[Any], None] = lambda settings: None
    """Raises ValueError for settings that contradict each other; called before anything is loaded."""
    is_equipped: Callable[[Any], bool] = lambda settings: True
    """Says whether the settings have what the drafter cannot do without; it is on offer by default where they do."""
