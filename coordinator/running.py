"""One generation whose rounds run in this coordinator: it owns the session, as long as nobody has claimed it since."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator import metrics
from coordinator.choosing.chooser import PlanChooser
from coordinator.draft import SessionDrafter
from coordinator.followed import FollowedGeneration
from coordinator.generation import Generation, Round
from coordinator.grammars import ForcedDrafter
from coordinator.healing import heal, told
from coordinator.joint_drafter import JointDrafter
from coordinator.rounds import RoundDrafter, RoundParts, run_rounds
from coordinator.session_record import SessionRecord
from coordinator.session_replies import SessionCancelled
from coordinator.sessions import Beat, SessionStore
from coordinator.target import SessionScorer
from specdec.errors import DataLossError, FencedError, UnavailableError
from specdec.exact.acceptance import AcceptanceRule
from specdec.exact.lookup import TextLookup
from specdec.outside import REAL, Outside
from specdec.serving.tracing import spans
from specdec.types import DetachedPolicy, FinishReason, Statistics


@dataclass(frozen=True, slots=True)
class WorkerHandles:
    """A session's streams to its workers, and the parts of its rounds."""

    scorer: SessionScorer
    drafters: Mapping[str, SessionDrafter]  # by name
    rule: AcceptanceRule
    chooser: PlanChooser
    joint: Mapping[str, JointDrafter] = field(default_factory=dict)  # of several of them, by name
    lookup: TextLookup | None = None  # where the coordinator drafts as well

    @property
    def parts(self) -> RoundParts:
        """What the rounds need of them."""
        drafters: Mapping[str, RoundDrafter] = {**self.drafters, **self.joint}
        return RoundParts(drafters, self.scorer, self.rule, self.chooser, lookup=self.lookup)

    async def close(self) -> None:
        """End the session at the workers, so that they free its cache."""
        await asyncio.gather(self.scorer.close(), *(drafter.close() for drafter in self.drafters.values()))

    def abandon(self) -> None:
        """Leave the workers their caches, for the coordinator that resumes the session."""
        self.scorer.abandon()
        for drafter in self.drafters.values():
            drafter.abandon()


class RunningGeneration(FollowedGeneration):
    """One generation whose rounds run here, under this coordinator's lease."""

    def __init__(
        self,
        session: SessionRecord,
        generation: Generation,
        store: SessionStore,
        when_detached: DetachedPolicy,
        outside: Outside = REAL,
    ) -> None:
        super().__init__(session, generation)
        self.when_detached = when_detached
        self._store = store
        self._outside = outside
        self._base_s = generation.statistics.total_s
        self._began_at = self._published_at = self._outside.now_s()

    @property
    def running_s(self) -> float:
        """Seconds since this coordinator had the session from the store."""
        return self._outside.now_s() - self._began_at

    @property
    def silent_s(self) -> float:
        """Seconds since the last commit while rounds are running, else 0."""
        return self._outside.now_s() - self._published_at if self.is_running else 0.0

    @property
    def beat(self) -> Beat:
        """What its owner says when it renews the lease."""
        length = len(self._session.prompt) + self._num_published
        return self.session_id, self.epoch, length, self.generation.digest_at(self._num_published)

    def start(self, workers: WorkerHandles, forced: ForcedDrafter | None = None) -> None:
        """Begin to run rounds; `forced` drafts what the session's grammar forces."""
        parts = replace(workers.parts, outside=self._outside, forced=forced)
        self._task = asyncio.create_task(self._run(workers, parts), name=f"generation {self.session_id}")

    async def check(self) -> None:
        """Ask the store whether this coordinator still owns the session; end the rounds if not, or if it is cancelled.

        Raises UnavailableError.
        """
        try:
            await self._store.heartbeat(*self.beat)
        except (SessionCancelled, FencedError, DataLossError) as refusal:
            await self.refused(refusal)

    async def refused(self, refusal: Exception) -> None:
        """End the rounds for what the store says against them. Raises UnavailableError."""
        if isinstance(refusal, SessionCancelled):
            self.interrupt(refusal)
        else:
            self.interrupt(told(await heal(self._store, self.shown)))

    async def _until_read(self) -> None:
        """Wait while all followers are far behind: what nobody reads is not generated.

        Meanwhile nobody has the lease, so that a faster follower at another coordinator need not wait for them.
        """
        if not self._is_far_ahead:
            return
        with metrics.paused():
            is_leased = True
            while self._is_far_ahead:
                if is_leased and self._num_published == len(self.generation.emitted):  # else a commit renews it
                    is_leased = False
                    await self._store.release(self.session_id, self.epoch)
                else:
                    await self._moved.wait()

    async def _run(self, workers: WorkerHandles, parts: RoundParts) -> None:
        try:
            self._begin()
            await run_rounds(self.generation, parts, self._publish, self._until_read)
        except asyncio.CancelledError:
            self._end(self._interruption or UnavailableError("this coordinator stopped the session; resume it"))
        except Exception as error:
            self._end(error)
        self._has_ended = True
        try:
            if self._is_complete:
                await workers.close()
        finally:
            workers.abandon()
        if not self._is_complete:
            await self._store.release(self.session_id, self.epoch)

    async def _publish(self, played: Round) -> None:
        begin = self._outside.now_s()
        statistics = _timed(played.statistics, self._published.commit_s, self._base_s + begin - self._began_at)
        try:
            with spans.span("commit"):
                await self._store.commit(self.session_id, self.epoch, played, statistics)
        except (FencedError, DataLossError) as refusal:
            raise told(await heal(self._store, self.shown)) from refusal
        end = self._published_at = self._outside.now_s()
        metrics.observe_round(self._published, played, end - begin)
        self._published = _timed(statistics, statistics.commit_s + end - begin, self._base_s + end - self._began_at)
        self._num_published += len(played.emitted)
        self._published_by = spans.current()
        self._tell()
        self._note_moved()

    def _end(self, reason: Exception) -> None:
        """End after the committed tokens, or pass the error to the followers."""
        if self._is_complete:
            return
        if isinstance(reason, SessionCancelled):
            self.generation.cut(self._num_published, FinishReason.CANCELLED)
        else:
            self._error = reason
        if isinstance(reason, FencedError):
            metrics.NUM_TAKEN_OVER.inc()
        self._tell()


def _timed(counted: Statistics, commit_s: float, total_s: float) -> Statistics:
    """Return statistics with these times of the committer; `dataclasses.replace` takes three times as long."""
    return Statistics(
        num_rounds=counted.num_rounds,
        num_draft_tokens=counted.num_draft_tokens,
        num_accepted_tokens=counted.num_accepted_tokens,
        num_tokens=counted.num_tokens,
        draft_s=counted.draft_s,
        score_s=counted.score_s,
        commit_s=commit_s,
        total_s=total_s,
        num_drafts_per_depth=counted.num_drafts_per_depth,
        num_accepted_tokens_per_depth=counted.num_accepted_tokens_per_depth,
    )
