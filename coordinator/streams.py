"""The coordinator's ends of the worker streams: one bidirectional stream a session and worker.

A stream remembers how many of the session's tokens its worker holds, sends only what is new, and repeats from further
back when the worker says that it holds less. A broken stream is forgotten; the next call opens another, to whichever
worker the pool picks, and sends everything.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc

from coordinator import metrics
from coordinator.checks import Checks, checking
from coordinator.pool.breaker import WorkerState
from coordinator.pool.pool import Fits, WorkerPool
from coordinator.pool.worker import DescriptionT, Worker
from coordinator.round_times import RoundTimes
from specdec.errors import (
    ContextTooShortError,
    FencedError,
    InternalError,
    InvalidArgumentError,
    ModelMismatchError,
    NonFiniteLogitsError,
    OverloadedError,
    SpecdecError,
    UnavailableError,
    from_rpc_error,
)
from specdec.outside import REAL, Outside
from specdec.serving import session_stream
from specdec.serving.tracing import spans
from specdec.types import SamplingParams

DESCRIBE_TIMEOUT_S = 2.0
FIND_S = 0.25  # for a worker that lost its connection to answer on another one
STATUS_TIMEOUT_S = 1.0  # for the status of a failed stream
# for a worker to free what it holds of a session that is over; a connection that is lost is noticed before
CLOSE_TIMEOUT_S = 5.0
# this session, while it may serve others
CANNOT_SERVE = (ModelMismatchError, ContextTooShortError, OverloadedError)
PING_TIMEOUT = "ping timeout"  # grpc's words for a connection whose ping was not answered
LOST_STREAM = "a worker ended the session's stream"
# what a worker may say of a session; anything else, such as DATA_LOSS, is about another service or a lie
SAID_BY_WORKERS = (
    *CANNOT_SERVE,
    FencedError,
    InternalError,
    InvalidArgumentError,
    NonFiniteLogitsError,
    UnavailableError,
)


@dataclass(frozen=True, slots=True)
class SessionOpening:
    """The session facts that a worker receives when a stream opens."""

    session_id: str
    epoch: int
    sampling: SamplingParams
    num_prompt_tokens: int
    prefix_digest: Callable[[int], bytes]  # the hash chain after so many committed tokens
    model_fingerprint: str = ""  # of the target that the text belongs to; empty: any
    incarnation: str = ""  # which session of that id; empty: not recorded
    is_matched: bool = False  # all its draft tokens are matched with what the target draws

    def opening(self) -> Any:
        """Return the message."""
        return session_stream.open_session(
            self.session_id, self.epoch, self.sampling, self.num_prompt_tokens, self.incarnation, self.is_matched
        )


class Reply(Protocol):
    """What the answers of both workers have."""

    cached_len: int
    round: int


ReplyT = TypeVar("ReplyT", bound=Reply)

Message = Callable[[int, Sequence[int], bytes, int], Any]
"""Makes a round's message of `start`, the committed tokens from there on, the digest of those before, and a number."""


@dataclass(frozen=True, slots=True)
class WorkerGroup(Generic[DescriptionT]):
    """The workers of one kind, and what all sessions of a coordinator know of them."""

    kind: str
    pool: WorkerPool[DescriptionT]
    times: RoundTimes
    checks: Checks | None = None
    outside: Outside = REAL


class WorkerStream(Generic[ReplyT, DescriptionT]):
    """One session's stream to one kind of worker.

    `begin` makes the call on a worker's channel; `fits` judges what a worker says about itself. A worker that failed a
    round of this session is avoided until another one answered.
    """

    def __init__(
        self,
        group: WorkerGroup[DescriptionT],
        begin: Callable[[Any], Any],
        session: SessionOpening,
        opening: Any,
        closing: Any,
        fits: Fits[DescriptionT] = lambda description: True,
        in_progress: Callable[[ReplyT], bool] = lambda reply: False,
    ) -> None:
        """`in_progress` says of a message whether it is no answer yet, only a sign that the worker is at it."""
        self._in_progress = in_progress
        self._group, self._begin, self._fits = group, begin, fits
        self._session, self._opening, self._closing = session, opening, closing
        self._stream: Any = None
        self._worker: Worker[DescriptionT] | None = None  # the stream's
        self._avoided: set[str] = set()  # addresses
        self._losses: Counter[str] = Counter()  # streams that broke since the last round that succeeded, by address
        self._lost: Worker[DescriptionT] | None = None  # the worker of the last one
        self._holders: dict[str, Worker[DescriptionT]] = {}  # that may hold something of the session, by address
        self._held = 0  # of the committed tokens, how many this stream's worker has
        self._number = 0  # of the last message that asked for an answer
        self.num_fed = 0  # committed tokens that the worker was sent with the last question

    @property
    def has_worker(self) -> bool:
        """Whether a worker can be asked now: that of the open stream, or one for another stream."""
        if self._worker is not None:
            return self._worker.state is not WorkerState.OUT
        return self._group.pool.is_available

    @property
    def has_other_worker(self) -> bool:
        """Whether one is in service that did not fail this session just now."""
        return self._group.pool.has_other(self._avoided)

    async def ask(self, committed: Sequence[int], message: Message) -> ReplyT:
        """Bring the worker up to date and return its answer to `message`.

        Raises the worker's SpecdecError; UnavailableError if it did not answer in time, or if there is none.
        """
        self._leave_silent()
        begin_s, self.num_fed = self._group.outside.now_s(), len(committed) - self._held
        limit_s = self._group.times.limit_s(self.num_fed)
        try:
            async with asyncio.timeout(limit_s) as timer:
                with checking(self._group.checks, timer, self._has_stopped):
                    reply = await self._ask(committed, message, timer, limit_s)
        except TimeoutError:
            raise self._late(self._group.outside.now_s() - begin_s, limit_s) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            ending = await self._ending()
            self._leave(ending)
            raise ending from error
        except UnavailableError as failure:  # it answered nonsense, or there is none
            self.distrust(failure)
            raise
        except BaseException:
            self.abandon()
            raise
        self._succeeded(self._group.outside.now_s() - begin_s)
        return reply

    def note_held(self, length: int) -> None:
        """Take note of how many committed tokens the open stream's worker has, by what it has said meanwhile."""
        if self._stream is not None:
            self._held = max(self._held, length)

    async def _has_stopped(self, checks: Checks) -> bool:
        """Return whether the worker is silent; work is only given up where that is of use."""
        if self._worker is None:
            return False
        if checks.needs_other and not self._group.pool.has_other_answering(self._worker.address):
            return False
        try:
            async with asyncio.timeout(checks.timeout_s):
                return not await self._worker.probe() and self._worker.is_silent
        except TimeoutError:
            return True

    def _succeeded(self, elapsed_s: float) -> None:
        self._group.times.observe(elapsed_s, self.num_fed)
        if self._worker:
            self._worker.round_succeeded()
        self._avoided.clear()
        self._losses.clear()

    def _late(self, waited_s: float, limit_s: float) -> UnavailableError:
        if waited_s >= limit_s:  # else the worker has stopped, which says nothing of those that run
            self._group.times.observe(waited_s, self.num_fed)
        metrics.NUM_TIMED_OUT.labels(self._group.kind).inc()
        failure = UnavailableError(f"a worker did not answer within {waited_s:.3g} s")
        self.distrust(failure)
        return failure

    async def _ask(
        self,
        committed: Sequence[int],
        message: Message,
        timer: asyncio.Timeout,
        limit_s: float,
    ) -> ReplyT:
        await self._open()
        num_misses = 0
        while True:
            # the last committed token is always sent: a distribution needs a token to follow
            start = min(self._held, len(committed) - 1)
            self.num_fed = len(committed) - start
            spans.current().set(worker=self._address, num_fed=self.num_fed)
            self._number += 1
            digest = self._session.prefix_digest(start)
            await self._stream.write(message(start, committed[start:], digest, self._number))
            reply = await self._answer(timer, limit_s)
            if reply.cached_len >= start:
                self._held = min(reply.cached_len, len(committed))
                return reply
            self._held = 0 if num_misses else reply.cached_len  # after a second miss, send everything
            num_misses += 1
            limit_s = max(limit_s, self._group.times.limit_s(len(committed) - self._held))
            if not timer.expired():
                timer.reschedule(asyncio.get_running_loop().time() + limit_s)

    @property
    def _address(self) -> str:
        """The address of the open stream's worker; empty without one."""
        return self._worker.address if self._worker else ""

    async def _answer(self, timer: asyncio.Timeout, limit_s: float) -> ReplyT:
        """Return the next message that is an answer; the others start the time-out again."""
        while True:
            reply = await self._stream.read()
            if reply is grpc.aio.EOF:
                raise asyncio.InvalidStateError("the worker ended the stream")
            if reply is None:
                raise UnavailableError("a worker's answer is not a valid message")
            if reply.round != self._number:
                raise UnavailableError(f"a worker answered round {reply.round} where {self._number} was asked")
            if not self._in_progress(reply):
                return reply  # type: ignore[no-any-return]
            if not timer.expired():
                timer.reschedule(asyncio.get_running_loop().time() + limit_s)

    async def _open(self) -> None:
        if self._stream is None:
            worker = self._group.pool.pick(self._session.session_id, self._avoided, self._fits)
            if worker is None:
                raise UnavailableError(f"no {self._group.kind} worker is in service")
            self._worker, self._stream = worker, self._begin(worker.channel)
            worker.num_streams += 1
            self._holders[worker.address] = worker
            await self._stream.write(self._opening)

    async def _ending(self) -> SpecdecError:
        """Return why the stream ended; what a write or a read raises on a stream that ends is not the reason."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                code = await self._stream.code()
                trailers = await self._stream.initial_metadata(), await self._stream.trailing_metadata()
                details = await self._stream.details()
        except TimeoutError:
            return UnavailableError(LOST_STREAM)
        if code == grpc.StatusCode.OK:
            return UnavailableError(LOST_STREAM)
        error = from_rpc_error(grpc.aio.AioRpcError(code, *trailers, details))
        return error if isinstance(error, SAID_BY_WORKERS) else UnavailableError(f"{LOST_STREAM}: {code.name}, {error}")

    def _leave(self, ending: SpecdecError) -> None:
        """Forget a stream that ended by itself, and tell all sessions what that says about its worker."""
        if isinstance(ending, InternalError):
            self.distrust(ending)
        elif isinstance(ending, UnavailableError) and self._worker:
            cause = "ping" if PING_TIMEOUT in ending.message else "connection"
            metrics.NUM_LOST_STREAMS.labels(self._group.kind, cause).inc()
            self._lost = self._worker
            self._worker.lost(ending)
            self._losses[self._worker.address] += 1
            if self._losses[self._worker.address] > 1:  # it answers probes and loses streams
                self._avoided.add(self._worker.address)
        elif isinstance(ending, CANNOT_SERVE) and self._worker:
            self._avoided.add(self._worker.address)
        self.abandon()

    def _leave_silent(self) -> None:
        """Leave a worker that another session found to have stopped, if there is another one."""
        worker = self._worker
        if worker and worker.is_silent and self._group.pool.has_other_answering(worker.address):
            self.abandon()

    async def find_lost(self) -> None:
        """Wait a moment for the worker that was lost: it has the session's cache, and may just have been cut off."""
        lost, self._lost = self._lost, None
        if lost:
            await asyncio.wait([asyncio.ensure_future(lost.probe())], timeout=FIND_S)

    def distrust(self, failure: SpecdecError) -> None:
        """Leave a worker that failed a round; no session goes to it until it has proved itself."""
        if self._worker:
            metrics.NUM_FAILED_ROUNDS.labels(self._group.kind).inc()
            self._worker.round_failed(failure)
            self._avoided.add(self._worker.address)
        self.abandon()

    def abandon(self) -> None:
        """Forget the stream; the worker keeps its cache for the next stream."""
        if self._stream is not None:
            self._stream.cancel()
        if self._worker is not None:
            self._worker.num_streams -= 1
        self._stream, self._worker, self._held = None, None, 0

    async def close(self) -> None:
        """End the session at every worker that had a stream of it, so that they free its cache.

        A stream that was cut in a round, which stops that round, is opened again to say so; so is one to a worker that
        the session has left.
        """
        holders, self._holders = self._holders, {}
        known = self._group.pool.workers
        left = [worker for worker in holders.values() if known.get(worker.address) is worker]
        await asyncio.gather(*map(self._close_at, left))
        self.abandon()

    async def _close_at(self, worker: Worker[DescriptionT]) -> None:
        is_open = worker is self._worker
        try:
            stream = self._stream if is_open else self._begin(worker.channel)
        except grpc.aio.UsageError:
            return  # its channel is closed, as it is gone
        worker.num_streams += 1  # its channel stays open
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if not is_open:
                    await stream.write(self._opening)
                await stream.write(self._closing)
                await stream.done_writing()
                await stream.read()
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
            pass  # the worker and its cache are gone
        finally:
            stream.cancel()
            worker.num_streams -= 1


async def answered(call: Awaitable[Any]) -> Any:
    """Return the answer of a call that has one. Raises the worker's SpecdecError."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
