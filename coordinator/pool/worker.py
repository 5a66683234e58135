"""One worker as a coordinator sees it: its channel, what it says about itself, and whether it is asked."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from coordinator.pool.breaker import Breaker, WorkerState
from specdec.errors import DeadlineExceededError, SpecdecError, UnavailableError
from specdec.outside import REAL, Outside
from specdec.serving.telemetry import get_logger

DescriptionT = TypeVar("DescriptionT")
Describe = Callable[[Any], Awaitable[DescriptionT]]
"""Asks the worker on a channel to describe itself, within a second or two. Raises SpecdecError."""


class Worker(Generic[DescriptionT]):
    """A worker at one address. `changed` is called when its state or its description has changed."""

    def __init__(
        self,
        address: str,
        channel: Any,
        describe: Describe[DescriptionT],
        changed: Callable[["Worker[DescriptionT]"], None] = lambda worker: None,
        outside: Outside = REAL,
    ) -> None:
        self.address, self.channel = address, channel
        self.description: DescriptionT | None = None  # the last one
        self.failure: SpecdecError | None = None  # of the last probe
        self.is_listed = True  # its name still leads to it
        self.was_asked = False
        self.suspected = asyncio.Event()  # its state should be looked at now
        self.num_streams = 0
        self._breaker = Breaker()
        self._describe, self._changed, self._outside = describe, changed, outside
        self._probing: asyncio.Future[bool] | None = None

    @property
    def state(self) -> WorkerState:
        """Whether it is asked."""
        return self._breaker.state

    @property
    def is_in_service(self) -> bool:
        """Whether new sessions come here."""
        return self.is_listed and self.state is WorkerState.IN_SERVICE

    @property
    def is_on_trial(self) -> bool:
        """Whether it answers, but has failed rounds since the last one that succeeded."""
        return self.is_listed and self.state is WorkerState.ON_TRIAL

    @property
    def is_due(self) -> bool:
        """Whether it is on trial and may be given a session now."""
        return self.is_listed and self._breaker.is_due(self._outside.now_s())

    @property
    def is_silent(self) -> bool:
        """Whether it did not answer the last probe at all, as against saying that it cannot serve."""
        return self.state is WorkerState.OUT and isinstance(self.failure, DeadlineExceededError)

    async def probe(self) -> bool:
        """Ask the worker to describe itself; return whether it did. Those who ask at once share one question."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.ensure_future(self._probe())
        return await asyncio.shield(self._probing)

    async def _probe(self) -> bool:
        try:
            description = await self._describe(self.channel)
        except Exception as error:  # whatever a worker sends, it may not end this coordinator
            self._note(_failure_of(error), self._breaker.lost)
            return False
        is_other, self.description = description != self.description, description
        self._note(None, self._breaker.probe_answered, is_other)
        return True

    def _note(self, failure: SpecdecError | None, happened: Callable[[], None], is_other: bool = False) -> None:
        before, self.failure = (self.state, self.was_asked), failure
        happened()
        self.was_asked = True
        if is_other or (self.state, self.was_asked) != before:
            self._changed(self)

    def try_now(self) -> None:
        """Note that a session comes here."""
        self._breaker.try_now(self._outside.now_s())

    def round_succeeded(self) -> None:
        """Note that it answered a round."""
        self._note(None, self._breaker.round_succeeded)

    def round_failed(self, failure: SpecdecError) -> None:
        """Note that a round failed inside it, or hung: sessions avoid it until another one succeeds."""
        self._note(failure, lambda: self._breaker.round_failed(self._outside.now_s()))
        self.suspected.set()

    def lost(self, failure: SpecdecError) -> None:
        """Note that a stream broke: sessions avoid it until the next probe, which comes at once."""
        self._note(failure, self._breaker.lost)
        self.suspected.set()


def _failure_of(error: Exception) -> SpecdecError:
    if isinstance(error, SpecdecError):
        return error
    get_logger().error("malformed_description", error=type(error).__name__)
    return UnavailableError("a worker described itself against the contract")
