"""What the coordinator does, in one place: plan a request, claim its session, run it, read it, cancel it."""

from collections import defaultdict
from dataclasses import dataclass

from coordinator import metrics, requests
from coordinator.capabilities import WorkerCapabilities
from coordinator.draft import DraftLimits, DraftWorkers, NoDrafter, SessionDrafter
from coordinator.draft_length import Costs, DraftLength
from coordinator.generation import Generation, chain
from coordinator.requests import Plan, Prompts
from coordinator.running import RunningGeneration, RunningGenerations, WorkerHandles
from coordinator.sessions import Session, SessionStore, Status
from coordinator.streams import WorkerSession
from coordinator.target import TargetWorkers
from coordinator.text import StreamDetokenizer
from specdec.errors import SpecdecError
from specdec.serving.telemetry import get_logger
from specdec.types import ModelInfo, SamplingParams, SpeculationParams
from specdec.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The parts, and what they do together."""

    models: WorkerCapabilities
    target_workers: TargetWorkers
    draft_workers: DraftWorkers | None
    prompts: Prompts
    store: SessionStore
    running: RunningGenerations
    costs: defaultdict[str, Costs]  # by drafter
    max_new_tokens: int
    max_draft_tokens: int

    async def begin(self, request: generation_pb2.GenerateRequest) -> Plan:
        """Check a request and create its session, unless it exists.

        Raises InvalidArgumentError, AlreadyExistsError, ModelMismatchError.
        """
        plan = requests.plan(request, self.prompts, self.models.target, self.max_new_tokens)
        if plan.speculation.num_draft_tokens != 0 and self.draft_workers:
            self.models.drafter(plan.speculation.drafter)
        digest = chain(b"", plan.prompt)
        await self.store.create(plan.session_id, plan.fingerprint, plan.stored(), plan.prompt, digest)
        return plan

    async def revive(self, session_id: str) -> RunningGeneration:
        """Claim a session and go on with it. Raises NotFoundError."""
        session = await self.store.claim(session_id)
        sampling, speculation = requests.restored(session.request)
        live = RunningGeneration(session, self.generation(session, sampling), self.store)
        if session.status is Status.ACTIVE:
            live.start(self._worker_handles(session, sampling, speculation))
        return live

    def generation(self, session: Session, sampling: SamplingParams) -> Generation:
        """Return a session's state, its text replayed from its tokens."""
        return Generation(
            prompt=session.prompt,
            sampling=sampling,
            limits=requests.limits(sampling, self.models.target),
            detokenizer=StreamDetokenizer(self.prompts.tokenizer, session.prompt),
            emitted=list(session.emitted),
            finish=session.finish,
            statistics=session.statistics,
        )

    def _worker_handles(
        self, session: Session, sampling: SamplingParams, speculation: SpeculationParams
    ) -> WorkerHandles:
        worker_session = WorkerSession(session.session_id, session.epoch, sampling, len(session.prompt))
        scorer = self.target_workers.open(worker_session, self.models.target.vocab_size)
        if self.draft_workers is None or speculation.num_draft_tokens == 0:
            return WorkerHandles(scorer, NoDrafter(), DraftLength(self.costs[""], self.max_draft_tokens, fixed=0))
        name, model = self.models.drafter(speculation.drafter)
        drafter = self._drafter(self.draft_workers, worker_session, name, model)
        costs = self.costs[name if model else ""]  # a name that no worker has confirmed is anybody's invention
        return WorkerHandles(scorer, drafter, DraftLength(costs, self.max_draft_tokens, speculation.num_draft_tokens))

    def _drafter(
        self, workers: DraftWorkers, session: WorkerSession, name: str, model: ModelInfo | None
    ) -> SessionDrafter:
        limits = DraftLimits(self.models.target.vocab_size, model.context_length if model else 0)

        def note(error: SpecdecError) -> None:
            metrics.NUM_DRAFT_FAILURES.labels(error.reason).inc()
            get_logger().warning("draft_unavailable", session_id=session.session_id, reason=error.reason)

        return workers.open(session, name, limits, note)
