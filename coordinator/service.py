"""What the coordinator does, in one place: create a session, follow it, read it, cancel it."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

from coordinator import requests
from coordinator.admission import Admission, Ticket
from coordinator.generation import CommittedChunk, Generation
from coordinator.prompts import Prompts
from coordinator.registry import RunningGenerations
from coordinator.requests import RequestLimits
from coordinator.running import Ending, RunningGeneration, WorkerHandles
from coordinator.session_ids import SessionName
from coordinator.session_workers import SessionWorkers, Workers
from coordinator.sessions import SessionCancelled, SessionRecord, SessionStore, Status
from coordinator.streams import SessionOpening
from coordinator.text import StreamDetokenizer
from specdec.errors import FencedError, SpecdecError, UnavailableError
from specdec.outside import REAL, Outside
from specdec.serving.security.caller import NO_TENANT
from specdec.serving.telemetry import get_logger
from specdec.types import ModelInfo, SamplingParams, SpeculationParams
from specdec.v1 import generation_pb2

HEARTBEAT_S = 1.0  # how late a cancellation or takeover at another coordinator is seen
INLINE_TOKENS = 256  # of a completion that is replayed at once, in some milliseconds


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as the store has it, with its text."""

    session: SessionRecord
    sampling: SamplingParams
    text: str
    ending: Ending | None


class Coordinator:
    """Runs sessions: the store has them, the workers draft and score them."""

    def __init__(
        self,
        workers: Workers,
        prompts: Prompts,
        store: SessionStore,
        running: RunningGenerations,
        limits: RequestLimits,
        outside: Outside = REAL,
    ) -> None:
        self.admission = Admission(lambda: workers.target.loads.load, outside)
        self.limits = limits
        self.capabilities = workers.capabilities
        self._has_draft_workers = workers.draft is not None
        self._prompts = prompts
        self._store = store
        self._running = running
        self._outside = outside
        self._session_workers = SessionWorkers(workers, limits.max_draft_tokens)

    async def begin(
        self,
        request: generation_pb2.GenerateRequest,
        session: SessionName,
        tenant: str = NO_TENANT,
        left_s: float | None = None,
    ) -> Ticket:
        """Check a request whose caller waits for `left_s` seconds, and create its session unless it exists.

        Nothing is written of a request that is refused. The caller gives the ticket back to `admission.leave`.
        Raises InvalidArgumentError, AlreadyExistsError, ModelMismatchError, OverloadedError.
        """
        is_known = session.stored in self._running
        if not is_known:
            self._running.check_room_for_new()
            self.admission.check(tenant, 0, 0, left_s)  # before the prompt is encoded
        target = self.capabilities.target
        plan = await requests.plan(request, session, self._prompts, target, self.limits, self._outside)
        if plan.speculation.num_draft_tokens != 0 and self._has_draft_workers:
            self.capabilities.session_drafters(plan.speculation.drafter)
        num_tokens = plan.sampling.max_new_tokens or 0
        if not is_known:
            self._running.check_room_for_new()
            self.admission.check(tenant, len(plan.prompt.tokens), num_tokens, left_s)
        ticket = self.admission.enter(tenant, num_tokens, left_s)
        try:
            await self._store.create(plan.session_id, plan.fingerprint, plan.stored(), plan.prompt, target)
        except BaseException:
            self.admission.leave(ticket, is_complete=False)
            raise
        return ticket

    async def follow(
        self, session_id: str, offset: int, digest: bytes
    ) -> AsyncGenerator[tuple[CommittedChunk, Ending | None]]:
        """Yield the completion from token `offset` on, running the session here; the last chunk comes with the ending.

        Raises NotFoundError, OverloadedError, DataLossError if the store lacks what the client has, and the error of
        the rounds.
        """
        while True:
            async with self._running.attach(session_id, partial(self.start, session_id)) as running:
                if running.holds(offset, digest) or await self._owns(running, offset, digest):
                    async for chunk, ending in running.follow(offset):
                        yield chunk, ending
                    return
                running.interrupt(FencedError("another coordinator has taken this session over; resume it"))

    async def read(self, session_id: str) -> StoredSession:
        """Return a session. Raises NotFoundError."""
        session = await self._store.read(session_id)
        sampling, _ = requests.restored(session.request)
        generation = await self._replayed(session, sampling)
        ending = None
        if session.finish:
            ending = Ending(session.finish, len(session.prompt), len(session.emitted), session.statistics)
        return StoredSession(session, sampling, generation.text, ending)

    async def cancel(self, session_id: str) -> Status:
        """End a session; return its state after that. Raises NotFoundError."""
        status = await self._store.cancel(session_id)
        running = self._running.get(session_id)
        if running and status is Status.CANCELLED:
            running.interrupt(SessionCancelled())
        return status

    async def watch(self, period_s: float = HEARTBEAT_S) -> None:
        """Check sessions with a long round in the store, forever: they may be cancelled or owned elsewhere."""
        while True:
            await asyncio.sleep(period_s)
            await asyncio.gather(*map(self._check, self._running.silent(period_s)))

    async def _check(self, running: RunningGeneration) -> None:
        try:
            await self._store.heartbeat(running.session_id, running.epoch)
        except UnavailableError:
            pass  # the commit will fail
        except (SpecdecError, SessionCancelled) as reason:
            running.interrupt(reason)
        except Exception as error:  # of one session; the heartbeats of the others go on
            get_logger().error("heartbeat_failed", session_id=running.session_id, error=type(error).__name__)

    async def _owns(self, running: RunningGeneration, offset: int, digest: bytes) -> bool:
        """Ask the store whether this coordinator still owns a session of which a client has more, or other, tokens.

        Raises DataLossError if the store lacks what the client has: memory may lag behind the store.
        """
        session = await self._store.read(running.session_id)
        session.check_position(offset, digest)
        return session.epoch == running.epoch

    async def start(self, session_id: str) -> RunningGeneration:
        """Claim a session and continue it, with the model that its text belongs to.

        Raises NotFoundError, ModelMismatchError.
        """
        session = await self._store.claim(session_id, self.capabilities.target)
        sampling, speculation = requests.restored(session.request)
        running = RunningGeneration(session, await self._replayed(session, sampling), self._store, self._outside)
        if session.status is Status.ACTIVE:
            running.start(self._open(session, sampling, speculation))
        return running

    async def _replayed(self, session: SessionRecord, sampling: SamplingParams) -> Generation:
        """Return a session's state; a long completion is replayed on a thread."""
        if len(session.emitted) <= INLINE_TOKENS:
            return self._generation(session, sampling)
        return await asyncio.to_thread(self._generation, session, sampling)

    def _generation(self, session: SessionRecord, sampling: SamplingParams) -> Generation:
        """Return a session's state, its text replayed. Raises ModelMismatchError for tokens of another tokenizer."""
        model = self._model(session)
        self.capabilities.check_tokenizer(model)
        return Generation(
            prompt=session.prompt,
            sampling=sampling,
            limits=requests.limits(sampling, model),
            detokenizer=StreamDetokenizer(self._prompts.tokenizer, session.prompt),
            emitted=list(session.emitted),
            finish=session.finish,
            statistics=session.statistics,
            prompt_digest=session.prompt_digest,
        )

    def _model(self, session: SessionRecord) -> ModelInfo:
        """Return the target that a session's text belongs to."""
        return session.model or self.capabilities.target

    def _open(self, session: SessionRecord, sampling: SamplingParams, speculation: SpeculationParams) -> WorkerHandles:
        """Return the session's handles to its workers."""
        model = self._model(session)
        opening = SessionOpening(session.session_id, session.epoch, sampling, len(session.prompt), model.fingerprint)
        return self._session_workers.open(opening, model, speculation)
