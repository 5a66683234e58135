"""What the coordinator does, in one place: create a session, follow it, read it, cancel it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from coordinator import requests
from coordinator.admission import Admission, Ticket
from coordinator.generation import CommittedChunk, Generation, OutputToken
from coordinator.healing import BEGINNING, Healing, Position, heal, take_back, told
from coordinator.prompts import Prompts
from coordinator.quotas import Quotas
from coordinator.registry import RunningGenerations
from coordinator.requests import RequestLimits
from coordinator.running import Ending, RunningGeneration, WorkerHandles
from coordinator.session_ids import SessionName
from coordinator.session_record import SessionRecord, Status
from coordinator.session_workers import SessionWorkers, Workers
from coordinator.sessions import SessionCancelled, SessionStore
from coordinator.shown import ShownSessions
from coordinator.streams import SessionOpening
from coordinator.text import StreamDetokenizer
from specdec.errors import DataLossError, FencedError, NotFoundError, UnavailableError
from specdec.outside import REAL, Outside
from specdec.serving.security.caller import NO_TENANT
from specdec.serving.telemetry import get_logger
from specdec.types import ModelInfo, SamplingParams, SpeculationParams
from specdec.v1 import generation_pb2

HEARTBEAT_S = 1.0  # how late a cancellation or takeover at another coordinator is seen
SETTLED_S = 3.0  # after a call to the store has failed, until every coordinator has compared what it has shown
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
        quotas: Callable[[], Quotas] = Quotas,
    ) -> None:
        self.admission = Admission(lambda: workers.target.loads.load, outside, quotas)
        self.limits = limits
        self.capabilities = workers.capabilities
        self._has_draft_workers = workers.draft is not None
        self._prompts = prompts
        self._store = store
        self._running = running
        self._outside = outside
        self._shown = ShownSessions(store.ttl_s)
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
        if is_known:
            self.admission.check_quota(tenant, is_new=False)
        else:
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
        ticket = self.admission.enter(tenant, num_tokens, left_s, 0 if is_known else len(plan.prompt.tokens))
        try:
            await self._store.create(plan.session_id, plan.fingerprint, plan.stored(), plan.prompt, target)
        except BaseException:
            self.admission.leave(ticket, is_complete=False)
            raise
        return ticket

    def resume(self, tenant: str, left_s: float | None) -> Ticket:
        """Count a session that is resumed; otherwise as `begin`. Raises OverloadedError."""
        self.admission.check_quota(tenant, is_new=False)
        return self.admission.enter(tenant, 0, left_s)

    async def follow(
        self,
        session_id: str,
        offset: int,
        digest: bytes,
        handed: tuple[OutputToken, ...] | None = None,
        incarnation: str = "",
    ) -> AsyncGenerator[tuple[CommittedChunk, Ending | None]]:
        """Yield the completion from token `offset` on, running the session here; the last chunk comes with the ending.

        `digest`, `handed` and `incarnation` are as in `Position`. Raises NotFoundError, OverloadedError, DataLossError
        if the store lacks what the client has, and the error of the rounds.
        """
        position = Position(offset, digest, handed, incarnation)
        while True:
            async with self._attached(session_id, position) as running:
                if running.holds(offset, digest) or await self._owns(running, position):
                    async for chunk, ending in running.follow(offset):
                        yield chunk, ending
                    return
                running.interrupt(FencedError("another coordinator has taken this session over; resume it"))

    @asynccontextmanager
    async def _attached(self, session_id: str, position: Position) -> AsyncIterator[RunningGeneration]:
        """Yield the session's generation; when it is left by its last follower, keep what it has shown."""
        running = None
        try:
            async with self._running.attach(session_id, partial(self.start, session_id, position)) as running:
                yield running
        finally:
            if running and self._running.get(session_id) is not running:
                self._shown.keep(running.shown, self._outside.now_s())

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
        """Compare sessions with the store, forever: those with a long round, and those that were left.

        They may be cancelled, owned elsewhere, or the store may have gone back in time.
        """
        while True:
            await asyncio.sleep(period_s)
            await _tolerated("", self._store.answers())
            has_broken = self._store.unbroken_s < 2 * period_s
            running = self._running.silent(0.0 if has_broken else period_s)
            due = self._shown.due(self._outside.now_s())
            left = self._shown.all if has_broken else due
            checks = [(one.session_id, one.check()) for one in running]
            checks += [(one.session_id, self._check_left(one)) for one in left]
            await asyncio.gather(*(_tolerated(session_id, check) for session_id, check in checks))

    async def _check_left(self, shown: SessionRecord) -> None:
        """Compare a session that was left with the store's. Raises UnavailableError."""
        length = len(shown.prompt) + len(shown.emitted)
        try:
            await self._store.compare(shown.session_id, shown.epoch, length, shown.digest)
        except SessionCancelled:
            self._shown.take(shown.session_id)
        except (FencedError, DataLossError):
            await heal(self._store, shown)
            self._shown.take(shown.session_id)

    async def _owns(self, running: RunningGeneration, position: Position) -> bool:
        """Ask the store whether this coordinator still owns a session of which a client has more, or other, tokens.

        Raises DataLossError if the store lacks what the client has, and cannot be given it: memory may lag behind it.
        """
        session = await self._store.read(running.session_id)
        if position.handed is not None and not session.holds(position.offset, position.digest):
            await _not_lost(take_back(self._store, running.session_id, position))
            return False
        session.check_position(position.offset, position.digest)
        return session.epoch == running.epoch

    async def start(self, session_id: str, position: Position = BEGINNING) -> RunningGeneration:
        """Claim a session and continue it, with the model that its text belongs to.

        `position` is its first follower's: no text is added to less than it was shown. Raises NotFoundError,
        ModelMismatchError, DataLossError if the session is lost.
        """
        session = await self._claimed(session_id, position)
        sampling, speculation = requests.restored(session.request)
        generation = await self._replayed(session, sampling)
        running = RunningGeneration(session, generation, self._store, self._outside)
        if session.status is Status.ACTIVE:
            running.start(self._open(session, generation, speculation))
        return running

    async def _claimed(self, session_id: str, position: Position) -> SessionRecord:
        """Claim a session that has what this coordinator and its client were shown; raises as `start`."""
        shown = self._shown.get(session_id)
        if shown:
            await _not_lost(heal(self._store, shown))
        try:
            session = await self._store.claim(session_id, self.capabilities.target)
        except NotFoundError:
            if position.handed is None:
                raise
            raise self._store.expired() from None
        while self._store.unbroken_s < SETTLED_S:
            # it may have gone back in time: what others have shown they bring back first
            await asyncio.sleep(SETTLED_S - self._store.unbroken_s)
            session = await self._store.claim(session_id, self.capabilities.target)
        if position.handed is not None and not session.holds(position.offset, position.digest):
            await _not_lost(take_back(self._store, session_id, position))
            session = await self._store.claim(session_id, self.capabilities.target)
        self._shown.take(session_id)
        return session

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
            incarnation=session.incarnation,
        )

    def _model(self, session: SessionRecord) -> ModelInfo:
        """Return the target that a session's text belongs to."""
        return session.model or self.capabilities.target

    def _open(self, session: SessionRecord, generation: Generation, speculation: SpeculationParams) -> WorkerHandles:
        """Return the session's handles to its workers."""
        model = self._model(session)
        opening = SessionOpening(
            session_id=session.session_id,
            epoch=session.epoch,
            sampling=generation.sampling,
            num_prompt_tokens=len(session.prompt),
            prefix_digest=generation.prefix_digest,
            model_fingerprint=model.fingerprint,
            incarnation=session.incarnation,
        )
        return self._session_workers.open(opening, model, speculation)


async def _not_lost(healing: Awaitable[Healing]) -> None:
    """Raise DataLossError for a session that is lost."""
    if await healing is Healing.LOST:
        raise told(Healing.LOST)


async def _tolerated(session_id: str, check: Awaitable[None]) -> None:
    """Await a check of one session; those of the others go on if it fails."""
    try:
        await check
    except UnavailableError:
        pass  # the commit will fail, or the next check will succeed
    except Exception as error:
        get_logger().error("heartbeat_failed", session_id=session_id, error=type(error).__name__)
