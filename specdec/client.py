"""The client library: text that comes whole, also through connections that break.

    async with Client("127.0.0.1:50051") as client:
        async for chunk in client.generate("Once upon a time", sampling=SamplingParams(temperature=0.7)):
            print(chunk.text, end="")

A gRPC retry cannot save a stream once it has begun, so the client does: it goes on by offset (`Resume`), or, before the
first chunk, repeats the request under the same request_id. Either way the server finds the session that it has.
"""

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import NamedTuple, Self, TypeVar, cast

import grpc

from specdec.channel import MAX_MESSAGE_BYTES, open_channel
from specdec.completion import (
    Chunk,
    Completion,
    Finish,
    ServedModel,
    Session,
    SessionStatus,
    Transcript,
    Usage,
    chunk_from_proto,
    served_model_from_proto,
    session_from_proto,
)
from specdec.errors import (
    FencedError,
    InvalidArgumentError,
    ModelMismatchError,
    OverloadedError,
    SpecdecError,
    UnavailableError,
    from_rpc_error,
)
from specdec.messages import sampling_to_proto
from specdec.types import FinishReason, SamplingParams, SpeculationParams, Statistics, TokenLogprobs, TokenOrigin
from specdec.v1 import generation_pb2, generation_pb2_grpc, types_pb2

__all__ = [
    "Chunk",
    "Client",
    "Completion",
    "Finish",
    "FinishReason",
    "Message",
    "SamplingParams",
    "ServedModel",
    "Session",
    "SessionStatus",
    "SpecdecError",
    "SpeculationParams",
    "Statistics",
    "TokenLogprobs",
    "TokenOrigin",
    "Usage",
]

FIRST_PAUSE_S = 0.1  # doubled after each attempt that brought nothing
LONGEST_PAUSE_S = 5.0
STATUS_DETAILS_KEY = "grpc-status-details-bin"  # only our servers send it; a status without it is the connection's

# What a broken connection looks like: killed servers and proxies give any of these
CONNECTION_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
    }
)


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[tuple[str, str]] | Sequence[Mapping[str, str]]
ChunkCall = (
    grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]
    | grpc.aio.UnaryStreamCall[generation_pb2.ResumeRequest, generation_pb2.ResumeResponse]
)
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class Client:
    """One connection to a specdec service.

    `timeout_s` is the deadline of each call, all its retries included. `max_retries` bounds attempts in a row that
    brought nothing; an attempt that brings a chunk starts the count anew. All methods raise `specdec.errors`.
    """

    def __init__(self, address: str = "127.0.0.1:50051", *, timeout_s: float = 600.0, max_retries: int = 8) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end."""
        if self._channel:
            await self._channel.close()
            self._channel = None

    async def connect(self) -> None:
        """Connect now instead of with the first call. Raises UnavailableError at once where nobody answers."""
        channel = self._open_channel
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise UnavailableError(f"no specdec answers on {self.address}")
            await channel.wait_for_state_change(state)
            state = channel.get_state()

    async def generate(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield what each round commits; the last chunk has `finish`.

        The prompt is text, token ids, or chat messages: (role, content) pairs. Leaving the loop cancels the call.
        Raises DataLossError where the server contradicts what it sent before.
        """
        request = _request(prompt, sampling, speculation, request_id or str(uuid.uuid4()))
        _check_size(request)
        async with aclosing(self._follow(request, Transcript(), timeout_s)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def resume(
        self, session_id: str, offset: int = 0, digest: bytes = b"", *, timeout_s: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yield a session's chunks from `offset` on, first the ones in the store, then new ones.

        `digest` is that of the last chunk seen; with it the server checks that it holds the same text.
        """
        seen = Transcript(session_id, offset, {offset: digest} if digest else {})
        async with aclosing(self._follow(None, seen, timeout_s)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def complete(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """Return the whole completion; as `generate`, for those who do not stream."""
        stream = self.generate(
            prompt, sampling=sampling, speculation=speculation, request_id=request_id, timeout_s=timeout_s
        )
        return Completion.of([chunk async for chunk in stream])

    async def get_session(self, session_id: str) -> Session:
        """Return what the store holds of a session. Raises NotFoundError."""
        request = generation_pb2.GetSessionRequest(session_id=session_id)
        return session_from_proto(await self._ask(self._stub.GetSession, request))

    async def cancel(self, session_id: str) -> SessionStatus:
        """End a session; what was committed stays readable. Return CANCELLED, or FINISHED where it had ended before."""
        request = generation_pb2.CancelSessionRequest(session_id=session_id)
        return SessionStatus((await self._ask(self._stub.CancelSession, request)).status)

    async def get_model(self) -> ServedModel:
        """Return the models behind the service."""
        return served_model_from_proto(await self._ask(self._stub.GetModel, generation_pb2.GetModelRequest()))

    # ---- how

    @property
    def _open_channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise RuntimeError("the client is not open; use it as `async with Client(...) as client:`")
        return self._channel

    @property
    def _stub(self) -> "generation_pb2_grpc.GenerationServiceAsyncStub":
        return generation_pb2_grpc.GenerationServiceStub(self._open_channel)

    async def _follow(
        self, request: generation_pb2.GenerateRequest | None, seen: Transcript, timeout_s: float | None
    ) -> AsyncGenerator[Chunk, None]:
        """Call, and call again from where the stream broke, until the session's end."""
        patience = self._patience(timeout_s)
        while True:
            call = self._call(request, seen, patience.left_s)
            try:
                async for message in call:
                    chunk = seen.admit(chunk_from_proto(_chunk_of(message)))
                    if chunk:
                        patience.renew()
                        yield chunk
                failure = None  # a server that ends a stream early and without an error is being replaced
            except grpc.aio.AioRpcError as error:
                failure = error
            finally:
                call.cancel()
            if seen.finished:
                return
            await patience.wait(failure, seen)

    def _call(self, request: generation_pb2.GenerateRequest | None, seen: Transcript, timeout_s: float) -> ChunkCall:
        """Repeat the request until the session is known, then resume it."""
        if request and not seen.session_id:
            return self._stub.Generate(request, timeout=timeout_s)
        with _naming("resume"):
            resume = generation_pb2.ResumeRequest(session_id=seen.session_id, offset=seen.end, digest=seen.digest)
        return self._stub.Resume(resume, timeout=timeout_s)

    async def _ask(self, method: Callable[..., Awaitable[ResponseT]], request: RequestT) -> ResponseT:
        """Make one of the calls that answer once; all of them can be repeated."""
        patience = self._patience(None)
        while True:
            try:
                return await method(request, timeout=patience.left_s)
            except grpc.aio.AioRpcError as error:
                await patience.wait(error, None)

    def _patience(self, timeout_s: float | None) -> "_RetryPolicy":
        return _RetryPolicy(self.address, self._max_retries, self._timeout_s if timeout_s is None else timeout_s)


class _RetryPolicy:
    """When to try again and when to give up: attempts in a row without news, under one deadline."""

    def __init__(self, address: str, max_retries: int, timeout_s: float) -> None:
        self._address = address
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._num_failures = 0

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    def renew(self) -> None:
        """Note that an attempt brought something."""
        self._num_failures = 0

    async def wait(self, error: grpc.aio.AioRpcError | None, seen: Transcript | None) -> None:
        """Sleep until the next attempt is due. Raises what the caller should see where there is none."""
        failure = self._failure(error, seen)
        pause_s = self._pause_s(error, failure)
        if not _is_retryable(error, failure) or self._num_failures >= self._max_retries or pause_s >= self.left_s:
            raise failure from error
        self._num_failures += 1
        await asyncio.sleep(pause_s)

    def _pause_s(self, error: grpc.aio.AioRpcError | None, failure: SpecdecError) -> float:
        """Return what the server asked for, then a pause of its own, so that clients do not come back all at once."""
        asked_s: float = (
            failure.retry_after_s
            if _from_server(error) and isinstance(failure, OverloadedError | UnavailableError)
            else 0.0
        )
        return asked_s + random.uniform(0.5, 1) * min(FIRST_PAUSE_S * 2.0**self._num_failures, LONGEST_PAUSE_S)

    def _failure(self, error: grpc.aio.AioRpcError | None, seen: Transcript | None) -> SpecdecError:
        """Return a server's own error as it is; say of a connection's where it ended and how to go on."""
        if error and _from_server(error):
            return from_rpc_error(error)
        if error and error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return ModelMismatchError(
                f"what answers on {self._address} is not a specdec coordinator; give the coordinator's port"
            )
        if error and error.code() not in (*CONNECTION_CODES, grpc.StatusCode.DEADLINE_EXCEEDED):
            return from_rpc_error(error)
        late = error and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        what = f"no end within {self._timeout_s:g} s" if late else f"no specdec answers on {self._address}"
        rest = f"; session {seen.session_id} can be resumed from token {seen.end}" if seen and seen.session_id else ""
        return UnavailableError(what + rest)


def _chunk_of(
    message: generation_pb2.GenerateResponse | generation_pb2.ResumeResponse,
) -> generation_pb2.GenerateResponse:
    return message.chunk if isinstance(message, generation_pb2.ResumeResponse) else message


def _from_server(error: grpc.aio.AioRpcError | None) -> bool:
    """Say whether a server of ours sent this status, not the connection."""
    return error is not None and any(key == STATUS_DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def _is_retryable(error: grpc.aio.AioRpcError | None, failure: SpecdecError) -> bool:
    """Say whether another attempt can help. A fenced session is another coordinator's now, which Resume will find."""
    if _from_server(error):
        return isinstance(failure, OverloadedError | UnavailableError | FencedError)
    return error is None or error.code() in CONNECTION_CODES


def _request(
    prompt: Prompt, sampling: SamplingParams | None, speculation: SpeculationParams | None, request_id: str
) -> generation_pb2.GenerateRequest:
    """Build the request. Raises InvalidArgumentError for what does not fit its field, the server judges the rest."""
    request = generation_pb2.GenerateRequest(request_id=request_id)
    with _naming("prompt"):
        _set_prompt(request, prompt)
    with _naming("sampling"):
        if sampling:
            request.sampling.CopyFrom(sampling_to_proto(sampling))
    with _naming("speculation"):
        if speculation:
            request.speculation.CopyFrom(
                types_pb2.SpeculationParams(num_draft_tokens=speculation.num_draft_tokens, drafter=speculation.drafter)
            )
    return request


def _set_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, bytes):
        raise TypeError("bytes are neither text nor token ids; decode them")
    elif prompt and all(isinstance(entry, tuple | list | Mapping) for entry in prompt):
        request.chat.SetInParent()
        for entry in prompt:
            role, content = (entry["role"], entry["content"]) if isinstance(entry, Mapping) else cast(Message, entry)
            request.chat.messages.add(role=role, content=content)
    else:
        request.tokens.SetInParent()
        request.tokens.ids.extend(cast(Sequence[int], prompt))


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Turn what protobuf says of a value that does not fit into an error that names the field."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError({field: f"does not fit the request: {error}"}) from error


def _check_size(request: generation_pb2.GenerateRequest) -> None:
    size = request.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        limit = f"the most is {MAX_MESSAGE_BYTES} bytes; shorten the prompt"
        raise InvalidArgumentError({"prompt": f"makes a request of {size} bytes; {limit}"})
