"""What the coordinator does, in one place: create a session, follow it, read it, cancel it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from coordinator import metrics, requests
from coordinator.admission import Admission, Ticket
from coordinator.detached import DetachedRule, DetachedSessions
from coordinator.fences import Fences
from coordinator.followed import Ending, FollowedGeneration, OwnerLeft
from coordinator.generation import CommittedChunk, OutputToken
from coordinator.grammars import SessionGrammars
from coordinator.healing import BEGINNING, Position, not_lost, take_back
from coordinator.prompts import Prompts
from coordinator.quotas import Quotas
from coordinator.registry import RunningGenerations
from coordinator.requests import RequestLimits
from coordinator.running import RunningGeneration
from coordinator.session_ids import SessionName
from coordinator.session_record import SessionRecord, Status
from coordinator.session_replies import SessionCancelled
from coordinator.session_workers import Workers
from coordinator.sessions import SessionStore
from coordinator.shown import ShownSessions
from coordinator.starting import SessionStarts
from coordinator.upkeep import PERIOD_S, Upkeep
from specdec.errors import FencedError, SpecdecError
from specdec.outside import REAL, Outside
from specdec.serving.security.caller import NO_TENANT
from specdec.serving.tracing import spans
from specdec.types import DetachedPolicy, SamplingParams
from specdec.v1 import generation_pb2


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
        detached: DetachedRule = DetachedRule(),  # noqa: B008  # frozen
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
        self._detached = DetachedSessions(detached.patience_s)
        self._finishing: dict[str, asyncio.Task[None]] = {}  # sessions that this coordinator itself follows
        self._grammars = SessionGrammars(prompts.tokenizer)
        self._starts = SessionStarts(
            workers, prompts, self._grammars, store, self._shown, limits.max_draft_tokens, detached.policy, outside
        )
        self._upkeep = Upkeep(store, running, self._shown, self._detached, outside)

    def close(self) -> None:
        """End what works beside the event loop."""
        self._grammars.close()

    @property
    def owner(self) -> str:
        """Its name in leases."""
        return self._starts.owner

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
        target = self.capabilities.target_of(session.stored)
        plan = await requests.plan(request, session, self._prompts, target, self.limits, self._outside)
        await self._grammars.check(plan.sampling, target)
        if plan.speculation.num_draft_tokens != 0 and self._has_draft_workers:
            self.capabilities.session_drafters(plan.speculation.drafter)
        num_tokens = plan.sampling.max_new_tokens or 0
        if not is_known:
            self._running.check_room_for_new()
            self.admission.check(tenant, len(plan.prompt.tokens), num_tokens, left_s)
        ticket = self.admission.enter(tenant, num_tokens, left_s, 0 if is_known else len(plan.prompt.tokens))
        try:
            with spans.span("create"):
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
        fences = Fences(self._outside)
        while True:
            async with self._attached(session_id, position) as followed:
                if not (followed.holds(position.offset, position.digest) or await self._is_current(followed, position)):
                    followed.interrupt(FencedError("another coordinator has taken this session over; resume it"))
                    continue
                try:
                    async for chunk, ending in followed.follow(position.offset):
                        position = position.after(chunk)
                        yield chunk, ending
                    return
                except (FencedError, OwnerLeft) as refusal:
                    fences.count(refusal, position.offset)  # it has, or needs, another owner: tail it, or claim it
            await fences.pause()

    @asynccontextmanager
    async def _attached(self, session_id: str, position: Position) -> AsyncIterator[FollowedGeneration]:
        """Yield the session's generation; when it is left by its last follower, keep what it has shown."""
        followed = None

        async def start() -> FollowedGeneration:
            nonlocal followed  # also where its follower leaves before it has begun
            followed = await self.start(session_id, position)
            return followed

        try:
            async with self._running.attach(session_id, start) as followed:
                yield followed
        finally:
            if followed and self._running.get(session_id) is not followed:
                self._left(followed)

    def _left(self, followed: FollowedGeneration) -> None:
        shown, now_s = followed.shown, self._outside.now_s()
        if followed.was_started:  # else it was shown as the store had it, and may expire soon
            self._shown.keep(shown, now_s)
        is_owned = isinstance(followed, RunningGeneration) and followed.when_detached is DetachedPolicy.CANCEL
        if is_owned and shown.status is Status.ACTIVE:
            self._detached.add(shown.session_id, shown.epoch, now_s)

    async def start(self, session_id: str, position: Position = BEGINNING) -> FollowedGeneration:
        """Claim a session and continue it, or tail it: see `SessionStarts.start`."""
        followed = await self._starts.start(session_id, position)
        if isinstance(followed, RunningGeneration) and followed.when_detached is DetachedPolicy.FINISH:
            self._finish(session_id)
        return followed

    def _finish(self, session_id: str) -> None:
        """Follow a session to its end, so that it ends whoever leaves it."""
        if session_id not in self._finishing:
            task = asyncio.create_task(self._follow_through(session_id), name=f"finish {session_id}")
            self._finishing[session_id] = task
            task.add_done_callback(lambda _: self._finishing.pop(session_id))

    async def _follow_through(self, session_id: str) -> None:
        with suppress(SpecdecError, OwnerLeft):  # its clients are told
            async with self._attached(session_id, BEGINNING) as followed:
                async for _ in followed.follow(0):
                    pass

    async def read(self, session_id: str) -> StoredSession:
        """Return a session. Raises NotFoundError."""
        session = await self._store.read(session_id)
        sampling = requests.restored(session.request).sampling
        generation = await self._starts.replayed(session, sampling)
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

    async def watch(self, period_s: float = PERIOD_S) -> None:
        """Renew the leases of sessions, and compare what was shown of them with the store, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._upkeep.run(period_s), name="upkeep of sessions")
            group.create_task(self._report_wait(period_s), name="predicted wait")

    async def _report_wait(self, period_s: float) -> None:
        while True:
            metrics.PREDICTED_WAIT_S.set(self.admission.wait_s(0))
            await asyncio.sleep(period_s)

    async def _is_current(self, followed: FollowedGeneration, position: Position) -> bool:
        """Ask the store whether a session, of which a client has more or other tokens, has the owner that is followed.

        Raises DataLossError if the store lacks what the client has, and cannot be given it: memory may lag behind it.
        """
        session = await self._store.read(followed.session_id)
        if position.handed is not None and not session.holds(position.offset, position.digest):
            await not_lost(take_back(self._store, followed.session_id, position))
            return False
        session.check_position(position.offset, position.digest)
        return session.epoch == followed.epoch
