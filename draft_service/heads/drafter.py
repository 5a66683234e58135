"""The drafter of a head: hands rounds to the thread that runs it."""

from typing import Any

from draft_service.drafter import DraftResult
from draft_service.heads.loop import HeadLoop
from draft_service.metrics import METRICS
from specdec.drafting.request import DraftRequest
from specdec.engine import EngineError
from specdec.errors import InternalError, UnavailableError
from specdec.exact.values import Proposal, Timing
from specdec.heads.drafting.observed import states_of
from specdec.heads.drafting.rounds import NOTHING, SessionLost
from specdec.heads.drafting.runner import Runner
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.session_stream import WorkerSession
from specdec.serving.telemetry import get_logger
from specdec.types import ModelInfo


class HeadDrafter:
    """Drafts with a head from the target's hidden states. Where they were lost it drafts nothing in that round."""

    def __init__(
        self,
        name: str,
        runner: Runner[Any],
        loop: HeadLoop[Any],
        model: ModelInfo,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.name, self.model, self.grammars = name, model, grammars
        self.observations = runner.observations
        self._runner, self._loop = runner, loop

    async def propose(self, session: WorkerSession, request: DraftRequest, match: bool) -> DraftResult:
        """Draft at most K tokens; hold the committed tokens. Raises InvalidArgumentError for states of a wrong size."""
        observations = request.observations
        num_layers, hidden_size = len(self.observations.hidden_layers), self._runner.hidden_size
        states = states_of(observations, num_layers, hidden_size) if observations else None
        asked = self._runner.new_round(session, request, states)
        try:
            proposal = await self._loop.run(asked)
        except SessionLost as lost:
            return DraftResult(NOTHING, lost.cached_len)
        except EngineError as error:
            raise self._failure(error) from error
        METRICS.observe_round(len(proposal), asked.times)
        times = asked.times
        return DraftResult(proposal, request.committed_length, Timing(times.queue_s, times.forward_s, times.total_s))

    def _failure(self, error: EngineError) -> Exception:
        if self._loop.is_stalled(float("inf")):
            return UnavailableError("the head's thread has ended; ask another worker")
        get_logger().error("head_round_failed", drafter=self.name, error=str(error))
        return InternalError()

    def draft_ahead(self, session: WorkerSession, request: DraftRequest, proposal: Proposal) -> None:
        """Do nothing: the next round needs the states that the target computes now."""

    def abandon(self, session: WorkerSession, is_latest: bool) -> None:
        """Do nothing: nothing runs in the background."""

    def forget(self, session: WorkerSession) -> None:
        """Free what is held of the session."""
        self._loop.forget(session.key)
