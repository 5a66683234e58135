"""A channel to the service, and calls on it that survive broken connections.

A gRPC retry cannot save a stream once it has begun, so this does: before the first chunk it repeats the request under
the same request_id, after it it resumes the session by offset. Either way the server finds the session that it has.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc

from specdec.channel import MAX_QUICK_BYTES, PATIENT_PINGS, QUICK_PINGS, Pings
from specdec.completion import Chunk, Transcript, chunk_from_proto
from specdec.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ModelMismatchError,
    SpecdecError,
    UnavailableError,
    from_rpc_error,
    is_from_server,
)
from specdec.outside import REAL, Outside
from specdec.retry import Attempts, Retry, RetryPolicy
from specdec.tls import handshake_problem
from specdec.trace_context import current_trace
from specdec.v1 import generation_pb2, generation_pb2_grpc

Metadata = Mapping[str, str | bytes] | Sequence[tuple[str, str | bytes]]
Pairs = tuple[tuple[str, str | bytes], ...]  # of metadata, as a call sends them
OpenChannel = Callable[[Pings], grpc.aio.Channel]
Stub: TypeAlias = "generation_pb2_grpc.GenerationServiceAsyncStub"  # type only: the stub adapts to the channel
ChunkCall = (
    grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]
    | grpc.aio.UnaryStreamCall[generation_pb2.ResumeRequest, generation_pb2.ResumeResponse]
)
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


MAX_HANDED_BACK = 16_384  # tokens, 60 kB
TOO_LARGE = re.compile(
    r"message larger than max \((\d+) vs\. (\d+)\)"
)  # grpc's words, before any server of ours reads it


class Connection:
    """Channels that open with the first call, and stay with the event loop of that call.

    A large request has a channel of its own, on which pings have time to come through behind it.
    """

    def __init__(
        self,
        address: str,
        *,
        open_channel: OpenChannel,
        closes_channel: bool,
        metadata: Metadata,
        token: Callable[[], str | None] | None = None,
        policy: RetryPolicy,
        connect_timeout_s: float,
        on_retry: Callable[[Retry], None] | None = None,
        outside: Outside = REAL,
    ) -> None:
        self.address = address
        self._open, self._closes_channel = open_channel, closes_channel
        pairs = metadata.items() if isinstance(metadata, Mapping) else metadata
        self._static_metadata = tuple((key.lower(), value) for key, value in pairs)
        self._token = token
        self._channels: dict[Pings, grpc.aio.Channel] = {}
        self._policy = policy
        self._connect_timeout_s = connect_timeout_s
        self._on_retry = on_retry
        self._outside = outside
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_connected = False  # a specdec server has answered
        self._is_closed = False

    @property
    def _metadata(self) -> Pairs:
        """What is sent with a call; the token is asked for each time, as it may have been replaced."""
        traced = current_trace(key for key, _ in self._static_metadata)
        token = self._token() if self._token else None
        bearer = (("authorization", f"Bearer {token}"),) if token is not None else ()
        return (*self._static_metadata, *traced, *bearer)

    async def connect(self) -> None:
        """Connect now. Raises UnavailableError at once if no server answers."""
        channel = self._channel(QUICK_PINGS)
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await self._raise_why()
            await channel.wait_for_state_change(state)
            state = channel.get_state()

    async def _raise_why(self) -> None:
        """Make a call on a channel that has failed: its error has the reason, which the channel's state has not."""
        try:
            request, timeout_s = generation_pb2.GetModelRequest(), self._connect_timeout_s
            await self._stub().GetModel(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, self._connect_timeout_s, None) from error

    async def close(self) -> None:
        """End running calls and close the channels, unless they are the caller's."""
        self._is_closed = True
        channels, self._channels = self._channels, {}
        if self._closes_channel:
            await asyncio.gather(*(channel.close() for channel in channels.values()))

    async def follow(
        self, request: generation_pb2.GenerateRequest | None, seen: Transcript, timeout_s: float
    ) -> AsyncGenerator[Chunk, None]:
        """Yield chunks to the session's end, resuming from where a stream breaks. Raises SpecdecError."""
        attempts = self._attempts(timeout_s)
        while not seen.finished:
            failure = None  # a server that ends a stream early and without an error is being replaced
            admitted = None  # the metadata, once it was let in
            metadata = self._metadata
            call = self._call(request, seen, attempts.left_s, metadata)
            try:
                async for message in call:
                    self._is_connected, admitted = True, metadata
                    chunk = seen.admit(chunk_from_proto(_chunk_of(message)))
                    if chunk:
                        attempts.progress()
                        yield chunk
            except grpc.aio.AioRpcError as error:
                failure = error
            except asyncio.CancelledError:
                self._raise_if_closed()
                raise
            finally:
                call.cancel()
            if not seen.finished and not self._has_new_token(failure, admitted):
                await self._pause(attempts, failure, seen)

    async def ask(
        self,
        method: Callable[[Any], Callable[..., Awaitable[ResponseT]]],
        request: RequestT,
        timeout_s: float,
        service: Callable[[Any], Any] = generation_pb2_grpc.GenerationServiceStub,
    ) -> ResponseT:
        """Make a call of a service that answers once; all of them can be repeated. Raises SpecdecError."""
        attempts = self._attempts(timeout_s)
        while True:
            call = method(service(self._channel(QUICK_PINGS)))
            try:
                answer = await call(request, timeout=attempts.left_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                await self._pause(attempts, error, None)
            except asyncio.CancelledError:
                self._raise_if_closed()
                raise
            else:
                self._is_connected = True
                return answer

    def _has_new_token(self, error: grpc.aio.AioRpcError | None, admitted: Pairs | None) -> bool:
        """Return whether a stream that was let in ended as its token did, and there is another one by now."""
        is_token = error is not None and error.code() is grpc.StatusCode.UNAUTHENTICATED
        return is_token and admitted is not None and self._metadata != admitted

    def _call(
        self, request: generation_pb2.GenerateRequest | None, seen: Transcript, timeout_s: float, metadata: Pairs
    ) -> ChunkCall:
        """Repeat the request until the session is known, then resume it."""
        if request and not seen.session_id:
            stub = self._stub(PATIENT_PINGS if request.ByteSize() > MAX_QUICK_BYTES else QUICK_PINGS)
            return stub.Generate(request, timeout=timeout_s, metadata=metadata)
        return self._stub().Resume(_resumption(seen), timeout=timeout_s, metadata=metadata)

    async def _pause(self, attempts: Attempts, error: grpc.aio.AioRpcError | None, seen: Transcript | None) -> None:
        """Sleep until the next attempt is due. Raises what the caller should see if there is none."""
        self._is_connected = self._is_connected or error is None or is_from_server(error)
        failure = self._failure(error, attempts.timeout_s, seen)
        pause_s = attempts.pause_s(failure, is_connected=self._is_connected)
        if pause_s is None:
            raise failure from error
        if self._on_retry:
            session_id = (seen and seen.session_id) or None
            left_s = attempts.budget_left_s(is_connected=self._is_connected)
            self._on_retry(Retry(failure, session_id, pause_s, left_s))
        await asyncio.sleep(pause_s)

    def _attempts(self, timeout_s: float) -> Attempts:
        clock, uniform = self._outside.now_s, self._outside.uniform
        return Attempts(
            self._policy, timeout_s, connect_timeout_s=self._connect_timeout_s, clock=clock, uniform=uniform
        )

    def _failure(self, error: grpc.aio.AioRpcError | None, timeout_s: float, seen: Transcript | None) -> SpecdecError:
        """Return a server's own error as it is; name the address, or the deadline, in those of the connection."""
        resume = f"; session {seen.session_id} can be resumed from token {seen.end}" if seen and seen.session_id else ""
        if error is None:
            return UnavailableError(f"{self.address} ended the stream early{resume}", retry_after_s=None)
        failure = from_rpc_error(error)
        if is_from_server(error):
            return failure
        if isinstance(failure, DeadlineExceededError):
            return DeadlineExceededError(f"deadline of {timeout_s:g} s exceeded{resume}", retry_after_s=None)
        if isinstance(failure, UnavailableError):
            return UnavailableError(f"no specdec answers on {self.address}{_reason(error)}{resume}", retry_after_s=None)
        if sizes := TOO_LARGE.search(error.details() or ""):
            limit = f"the maximum is {sizes[2]} (--max-request-bytes of the coordinator)"
            return InvalidArgumentError({"request": f"has {sizes[1]} bytes; {limit}; send a shorter prompt"})
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            problem = f"the server on {self.address} is not a specdec coordinator"
            return ModelMismatchError(f"{problem}; give the coordinator's port")
        return failure

    def _stub(self, pings: Pings = QUICK_PINGS) -> Stub:
        return generation_pb2_grpc.GenerationServiceStub(self._channel(pings))

    def _channel(self, pings: Pings) -> grpc.aio.Channel:
        if self._is_closed:
            raise RuntimeError("the client is closed; make a new one")
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError("the client belongs to another event loop; make one client for each event loop")
        self._loop = loop
        if pings not in self._channels:
            self._channels[pings] = self._open(pings)
        return self._channels[pings]

    def _raise_if_closed(self) -> None:
        """Distinguish a closed channel from a cancelled call: grpc reports both as cancellation."""
        task = asyncio.current_task()
        if self._is_closed and not (task and task.cancelling()):
            raise RuntimeError("the client was closed during the call") from None


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Return the last cause in grpc's chain of them, as " (Connection refused)"; empty where it names none.

    A failed handshake has a remedy of its own behind it.
    """
    details = error.details() or ""
    if problem := handshake_problem(details):
        return f" ({problem.meaning}); {problem.remedy}"
    last = details.rpartition(": ")[2].rstrip("]. ")
    cause = details if last.isdigit() else last  # a number alone, as of an HTTP status, says too little
    return f" ({cause})" if cause else ""


def _resumption(seen: Transcript) -> generation_pb2.ResumeRequest:
    """Return the request for what follows; a store that went back in time takes what was seen from it."""
    resume = generation_pb2.ResumeRequest(session_id=seen.session_id, offset=seen.end, digest=seen.digest)
    if seen.proof:
        resume.proof = seen.proof
        resume.tokens.extend(seen.tokens[-MAX_HANDED_BACK:])
        origins = seen.origins[-MAX_HANDED_BACK:]
        resume.origins.extend(generation_pb2.TokenOrigin.ValueType(origin.value) for origin in origins)
    return resume


def _chunk_of(
    message: generation_pb2.GenerateResponse | generation_pb2.ResumeResponse,
) -> generation_pb2.GenerateResponse:
    return message.chunk if isinstance(message, generation_pb2.ResumeResponse) else message
