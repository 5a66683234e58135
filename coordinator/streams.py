"""The coordinator's ends of the worker streams: one bidirectional stream a session and worker.

A stream remembers how many of the session's tokens its worker holds, sends only what is new, and repeats from further
back when the worker says that it holds less. A broken stream is forgotten; the next call opens another, to whichever
worker the balancer picks, and sends everything.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc

from specdec.errors import SpecdecError, UnavailableError, from_rpc_error
from specdec.serving import session_stream
from specdec.serving.channels import SESSION_METADATA_KEY
from specdec.types import SamplingParams

DESCRIBE_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 1.0  # for the status of a failed stream
LOST_STREAM = "a worker ended the session's stream"


@dataclass(frozen=True, slots=True)
class SessionOpening:
    """The session facts that a worker receives when a stream opens."""

    session_id: str
    epoch: int
    sampling: SamplingParams
    num_prompt_tokens: int
    model_fingerprint: str = ""  # of the target that the text belongs to; empty: any

    def opening(self) -> Any:
        """Return the message."""
        return session_stream.open_session(self.session_id, self.epoch, self.sampling, self.num_prompt_tokens)


class Reply(Protocol):
    """What the answers of both workers have."""

    cached_len: int


ReplyT = TypeVar("ReplyT", bound=Reply)


class WorkerStream(Generic[ReplyT]):
    """One session's stream to one kind of worker."""

    def __init__(
        self,
        call: Callable[..., Any],
        session_id: str,
        opening: Any,
        closing: Any,
        timeout_s: float,
        in_progress: Callable[[ReplyT], bool] = lambda reply: False,
    ) -> None:
        """`in_progress` says of a message whether it is no answer yet, only a sign that the worker is at it."""
        self._in_progress = in_progress
        self._call = call
        self._session_id, self._route = session_id, 0
        self._opening, self._closing = opening, closing
        self._timeout_s = timeout_s
        self._stream: Any = None
        self._has_opened = False  # at any worker, since the last close
        self._held = 0  # of the committed tokens, how many this stream's worker has
        self.num_fed = 0  # committed tokens that the worker was sent with the last question

    async def ask(self, committed: Sequence[int], message: Callable[[int, Sequence[int]], Any]) -> ReplyT:
        """Bring the worker up to date and return its answer to `message(start, tokens)`.

        Raises the worker's SpecdecError; UnavailableError if it did not answer in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._ask(committed, message, limit)
        except TimeoutError:
            self.abandon()
            raise UnavailableError(f"a worker did not answer within {self._timeout_s:g} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            ending = await self._ending()
            self.abandon()
            raise ending from error
        except BaseException:
            self.abandon()
            raise

    async def _ask(
        self, committed: Sequence[int], message: Callable[[int, Sequence[int]], Any], limit: asyncio.Timeout
    ) -> ReplyT:
        await self._open()
        num_misses = 0
        while True:
            # the last committed token is always sent: a distribution needs a token to follow
            start = min(self._held, len(committed) - 1)
            self.num_fed = len(committed) - start
            await self._stream.write(message(start, committed[start:]))
            reply = await self._answer(limit)
            if reply.cached_len >= start:
                self._held = min(reply.cached_len, len(committed))
                return reply
            self._held = 0 if num_misses else reply.cached_len  # after a second miss, send everything
            num_misses += 1

    async def _answer(self, limit: asyncio.Timeout) -> ReplyT:
        """Return the next message that is an answer; the others start the time-out again."""
        while True:
            reply = await self._stream.read()
            if reply is grpc.aio.EOF:
                raise asyncio.InvalidStateError("the worker ended the stream")
            if reply is None:
                raise UnavailableError("a worker's answer is not a valid message")
            if not self._in_progress(reply):
                return reply  # type: ignore[no-any-return]
            limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)

    async def _open(self) -> None:
        if self._stream is None:
            self._stream = self._call(metadata=routing_metadata(self._session_id, self._route))
            self._has_opened = True
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
        return from_rpc_error(grpc.aio.AioRpcError(code, *trailers, details))

    def reroute(self) -> None:
        """Open the next stream at another worker, if there is one: this one serves another model."""
        self.abandon()
        self._route += 1

    def abandon(self) -> None:
        """Forget the stream; the worker keeps its cache for the next stream."""
        if self._stream is not None:
            self._stream.cancel()
        self._stream, self._held = None, 0

    async def close(self) -> None:
        """End the session at the worker, so that it frees the cache.

        A stream that was cut in a round, which stops that round, is opened again to say so.
        """
        if not self._has_opened:
            return
        try:
            async with asyncio.timeout(1.0):
                await self._open()
                await self._stream.write(self._closing)
                await self._stream.done_writing()
                await self._stream.read()
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
            pass  # the worker and its cache are gone
        self.abandon()
        self._has_opened = False


def routing_metadata(name: str, route: int) -> tuple[tuple[str, str], ...]:
    """Return the metadata by which the balancer picks a worker; other routes reach other workers."""
    return ((SESSION_METADATA_KEY, f"{name}#{route}" if route else name),)


async def answered(call: Awaitable[Any]) -> Any:
    """Return the answer of a call that has one. Raises the worker's SpecdecError."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
