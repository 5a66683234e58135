"""One generation that runs in this coordinator, and the clients that follow it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace

from coordinator import metrics
from coordinator.acceptance import AcceptanceRule
from coordinator.choosing.chooser import PlanChooser
from coordinator.draft import SessionDrafter
from coordinator.generation import CommittedChunk, Generation, Round
from coordinator.healing import heal, told
from coordinator.joint_drafter import JointDrafter
from coordinator.rounds import RoundParts, run_rounds
from coordinator.session_record import SessionRecord, Status
from coordinator.sessions import SessionCancelled, SessionStore
from coordinator.target import SessionScorer
from specdec.errors import DataLossError, FencedError, UnavailableError
from specdec.outside import REAL, Outside
from specdec.serving.tracing import spans
from specdec.types import FinishReason, Statistics

MAX_UNREAD_TOKENS = 256  # that a session is ahead of its followers; then it pauses until one of them reads on


@dataclass(frozen=True, slots=True)
class WorkerHandles:
    """A session's streams to its workers, and the parts of its rounds."""

    scorer: SessionScorer
    drafters: Mapping[str, SessionDrafter]  # by name
    rule: AcceptanceRule
    chooser: PlanChooser
    joint: Mapping[str, JointDrafter] = field(default_factory=dict)  # of several of them, by name

    @property
    def parts(self) -> RoundParts:
        """What the rounds need of them."""
        return RoundParts({**self.drafters, **self.joint}, self.scorer, self.rule, self.chooser)

    async def close(self) -> None:
        """End the session at the workers, so that they free its cache."""
        await asyncio.gather(self.scorer.close(), *(drafter.close() for drafter in self.drafters.values()))

    def abandon(self) -> None:
        """Leave the workers their caches, for the coordinator that resumes the session."""
        self.scorer.abandon()
        for drafter in self.drafters.values():
            drafter.abandon()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session ended."""

    reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    statistics: Statistics


def _status(finish: FinishReason | None) -> Status:
    if finish is None:
        return Status.ACTIVE
    return Status.CANCELLED if finish is FinishReason.CANCELLED else Status.FINISHED


@dataclass(slots=True, eq=False)
class _Reader:
    """A follower."""

    offset: int  # tokens that it has taken


class RunningGeneration:
    """One generation and its followers."""

    def __init__(
        self, session: SessionRecord, generation: Generation, store: SessionStore, outside: Outside = REAL
    ) -> None:
        self.session_id = session.session_id
        self._session = session
        self.generation = generation
        self._store = store
        self._outside = outside
        self._num_published = len(generation.emitted)
        self._published = generation.statistics
        self._base_s = generation.statistics.total_s
        self._began_at = self._published_at = self._outside.now_s()
        self._published_by: spans.Span = spans.NOTHING  # the span of the last round that was committed
        self._changed = asyncio.Event()  # replaced at each change
        self._readers: set[_Reader] = set()
        self._read = asyncio.Event()  # replaced whenever a follower has read
        self._error: Exception | None = None
        self._interruption: Exception | None = None
        self._has_ended = False  # the rounds have; the worker streams may still be open
        self._task: asyncio.Task[None] | None = None

    @property
    def has_failed(self) -> bool:
        """Return whether an error ended the rounds."""
        return self._error is not None or self._interruption is not None

    @property
    def is_running(self) -> bool:
        """Return whether there are rounds to come."""
        return self._task is not None and not self._has_ended

    @property
    def silent_s(self) -> float:
        """Seconds since the last commit while rounds are running, else 0."""
        return self._outside.now_s() - self._published_at if self.is_running else 0.0

    @property
    def epoch(self) -> int:
        """The number of this claim on the session."""
        return self._session.epoch

    @property
    def shown(self) -> SessionRecord:
        """The session as it was committed, so that clients may have been shown it."""
        ending = self._ending()
        return replace(
            self._session,
            status=_status(ending.reason if ending else None),
            emitted=tuple(self.generation.emitted[: self._num_published]),
            digest=self.generation.digest_at(self._num_published),
            finish=ending.reason if ending else None,
            statistics=self._published,
        )

    def start(self, workers: WorkerHandles) -> None:
        """Begin to run rounds."""
        self._task = asyncio.create_task(self._run(workers), name=f"generation {self.session_id}")

    def interrupt(self, reason: Exception) -> None:
        """End the round in flight and all others; SessionCancelled ends the session, anything else fails followers."""
        if self._interruption is None:
            self._interruption = reason
            if self._task and not self._has_ended:
                self._task.cancel()

    async def stop(self) -> "asyncio.Task[None] | None":
        """End the rounds after a commit in flight. Return the task that still closes the worker streams, if any."""
        if self._task and not self._has_ended:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        return self._task if self._task and not self._task.done() else None

    async def check(self) -> None:
        """Ask the store whether this coordinator still owns the session; end the rounds if not, or if it is cancelled.

        Raises UnavailableError.
        """
        shown = self.shown
        length = len(shown.prompt) + len(shown.emitted)
        try:
            await self._store.heartbeat(self.session_id, self.epoch, length, shown.digest)
        except SessionCancelled as cancelled:
            self.interrupt(cancelled)
        except (FencedError, DataLossError):
            self.interrupt(told(await heal(self._store, self.shown)))

    def holds(self, offset: int, digest: bytes) -> bool:
        """Return whether a client's `offset` tokens with this digest (empty: not compared) match the text here."""
        return offset <= self._num_published and (not digest or digest == self.generation.digest_at(offset))

    async def follow(self, offset: int) -> AsyncIterator[tuple[CommittedChunk, Ending | None]]:
        """Yield the completion from token `offset` on as it is committed; the last chunk comes with the ending.

        Raises what ended the rounds.
        """
        reader, ending = _Reader(offset), None
        self._readers.add(reader)
        try:
            while ending is None:
                await self._wait_past(offset)
                end, ending = self._num_published, self._ending()
                emitting = self._published_by.begin("emit", num_tokens=end - offset)
                try:
                    yield self.generation.chunk(offset, end), ending
                finally:
                    emitting.end()
                offset = reader.offset = end
                self._note_read()
        finally:
            self._readers.discard(reader)
            self._note_read()

    def _note_read(self) -> None:
        read, self._read = self._read, asyncio.Event()
        read.set()

    async def _until_read(self) -> None:
        """Wait while all followers are far behind: what nobody reads is not generated."""
        if not self._is_far_ahead:
            return
        with metrics.paused():
            while self._is_far_ahead:
                await self._read.wait()

    @property
    def _is_far_ahead(self) -> bool:
        if not self._readers:
            return False
        return self._num_published - max(reader.offset for reader in self._readers) > MAX_UNREAD_TOKENS

    @property
    def _is_complete(self) -> bool:
        return self.generation.done and self._num_published == len(self.generation.emitted)

    def _ending(self) -> Ending | None:
        generation = self.generation
        if not self._is_complete or generation.finish is None:
            return None
        return Ending(generation.finish, len(generation.prompt), len(generation.emitted), self._published)

    async def _wait_past(self, offset: int) -> None:
        while self._num_published <= offset and not self._is_complete and self._error is None:
            await self._changed.wait()
        if self._num_published <= offset and not self._is_complete and self._error:
            raise self._error
        if self._num_published < offset:
            raise UnavailableError("the session ended before the token that the client asks for; resume it again")

    async def _run(self, workers: WorkerHandles) -> None:
        try:
            parts = replace(workers.parts, outside=self._outside)
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

    async def _publish(self, played: Round) -> None:
        begin = self._outside.now_s()
        statistics = replace(
            played.statistics, commit_s=self._published.commit_s, total_s=self._base_s + begin - self._began_at
        )
        try:
            with spans.span("commit"):
                await self._store.commit(self.session_id, self.epoch, played, statistics)
        except (FencedError, DataLossError) as refusal:
            raise told(await heal(self._store, self.shown)) from refusal
        end = self._published_at = self._outside.now_s()
        metrics.observe_round(self._published, played, end - begin)
        self._published = replace(
            statistics,
            commit_s=statistics.commit_s + end - begin,
            total_s=self._base_s + end - self._began_at,
        )
        self._num_published += len(played.emitted)
        self._published_by = spans.current()
        self._tell()

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

    def _tell(self) -> None:
        """Wake the followers."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
