"""A generation that clients follow, wherever its rounds run: what is committed of it, and who reads it how far."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from coordinator.generation import CommittedChunk, Generation
from coordinator.session_record import SessionRecord, Status
from specdec.errors import UnavailableError
from specdec.serving.tracing import spans
from specdec.types import FinishReason, Statistics

MAX_UNREAD_TOKENS = 256  # that a session is ahead of its followers; then it pauses until one of them reads on


class OwnerLeft(Exception):
    """The coordinator that ran a session runs it no more: whoever follows it may claim it."""


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


class FollowedGeneration:
    """One generation and its followers. A task of a subclass publishes what is committed, and ends it."""

    def __init__(self, session: SessionRecord, generation: Generation) -> None:
        self.session_id = session.session_id
        self._session = session
        self.generation = generation
        self._num_published = len(generation.emitted)
        self._published = generation.statistics
        self._published_by: spans.Span = spans.NOTHING  # the span of the last round that was committed
        self._changed = asyncio.Event()  # replaced at each change
        self._readers: set[_Reader] = set()
        self._moved = asyncio.Event()  # replaced whenever a follower has read, or a round was committed
        self._error: Exception | None = None
        self._interruption: Exception | None = None
        self._has_ended = False  # nothing more is published; what the task holds may still be open
        self._task: asyncio.Task[None] | None = None
        self._has_begun = self._is_cancelled = False  # the task

    @property
    def has_failed(self) -> bool:
        """Return whether an error ended it here."""
        return self._error is not None or self._interruption is not None

    @property
    def was_started(self) -> bool:
        """Return whether anything was to be published here, as against a session that had ended."""
        return self._task is not None

    @property
    def is_running(self) -> bool:
        """Return whether there is more to come."""
        return self._task is not None and not self._has_ended

    @property
    def epoch(self) -> int:
        """The number of the claim on the session under which its log is written."""
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

    def interrupt(self, reason: Exception) -> None:
        """End it now; SessionCancelled ends the session, anything else fails followers."""
        if self._interruption is None:
            self._interruption = reason
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the task, once: a second time would interrupt how it ends."""
        if self._task and not self._has_ended and not self._is_cancelled:
            self._is_cancelled = True
            if self._has_begun:  # else nothing of it would run, not even how it ends
                self._task.cancel()

    def _begin(self) -> None:
        """Do what a task does first. Raises CancelledError if it was cancelled before."""
        self._has_begun = True
        if self._is_cancelled:
            raise asyncio.CancelledError

    async def stop(self) -> "asyncio.Task[None] | None":
        """End it after a commit in flight. Return the task that still closes the worker streams, if any."""
        if self._task and not self._has_ended:
            self._cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        return self._task if self._task and not self._task.done() else None

    def holds(self, offset: int, digest: bytes) -> bool:
        """Return whether a client's `offset` tokens with this digest (empty: not compared) match the text here."""
        return offset <= self._num_published and (not digest or digest == self.generation.digest_at(offset))

    async def follow(self, offset: int) -> AsyncIterator[tuple[CommittedChunk, Ending | None]]:
        """Yield the completion from token `offset` on as it is committed; the last chunk comes with the ending.

        Raises what ended it here.
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
                self._note_moved()
        finally:
            self._readers.discard(reader)
            self._note_moved()

    def _note_moved(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    @property
    def _is_far_ahead(self) -> bool:
        """Whether nobody here has read what is published, by far."""
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

    def _tell(self) -> None:
        """Wake the followers."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
