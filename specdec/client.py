"""The asynchronous client: every committed token arrives exactly once, also over connections that break.

    async with AsyncClient("127.0.0.1:50051") as client:
        async with client.generate("Once upon a time", temperature=0.7, max_new_tokens=64) as stream:
            async for chunk in stream:
                print(chunk.text, end="")

`specdec.Client` is the same for code without an event loop. docs/client.md explains both.
"""

import uuid
from collections.abc import Callable, Iterable
from typing import Self, Unpack

import grpc

from specdec.channel import Pings, open_channel
from specdec.completion import (
    Completion,
    ServedModel,
    Session,
    SessionStatus,
    Transcript,
    served_model_from_proto,
    session_from_proto,
    status_from_proto,
)
from specdec.connection import Connection, Metadata, OpenChannel
from specdec.errors import InvalidArgumentError
from specdec.parameters import MAX_UINT32, WholeNumber
from specdec.process_status import ProcessStatus, statuses_from_proto
from specdec.reloading_channel import ReloadingChannel
from specdec.request import (
    Messages,
    chat_request,
    checked_address,
    checked_session_id,
    checked_timeout_s,
    generate_request,
    merge_sampling,
    prompt_request,
    refuse_plain_text,
    resume_request,
)
from specdec.retry import Retry, RetryPolicy
from specdec.stream import AsyncStream
from specdec.tls import TlsFiles, watched
from specdec.types import DetachedPolicy, SamplingKeywords, SamplingParams, SpeculationParams
from specdec.v1 import generation_pb2, status_pb2, status_pb2_grpc
from specdec.watched import WatchedError

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0


class AsyncClient:
    """A client of one specdec service, for one event loop.

    Used with `async with`, or without and ended with `close`. The connection opens with the first call.

    `address`: host:port, or a name that gRPC resolves, as dns:///host:port or unix:path. `tls`: the files to trust and
    to show; files that are replaced count for the next call. `credentials`: instead of `tls`, those of grpc. Without
    either it is plain text, which is refused off loopback unless `insecure` is True. `token`: a bearer token, or a
    function that returns it, called for each attempt; None: no token. `metadata`: sent with each call. `channel`: used
    instead of one to `address`, and left open by `close`; or a function that opens one, which `close` closes.
    `spreads_calls`: take all servers that `address` names in turns, for many calls at once; else one of them is taken.
    `timeout_s`: deadline of each call, its retries included, unless the call has its own. `max_retries`: consecutive
    failed attempts; None: as many as fit before the deadline. `connect_timeout_s`: how long an address is tried if no
    specdec server has answered yet. `on_retry`: called before each pause after which a call is tried again; what it
    raises ends the call.

    A wrong argument raises InvalidArgumentError, an unknown keyword TypeError, at once and without a call to the
    service. Calls raise the subclasses of SpecdecError; RuntimeError once the client is closed.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        tls: TlsFiles | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | Callable[[], str | None] | None = None,
        insecure: bool = False,
        metadata: Metadata = (),
        channel: grpc.aio.Channel | Callable[[], grpc.aio.Channel] | None = None,
        spreads_calls: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int | None = None,
        connect_timeout_s: float = 20.0,
        on_retry: Callable[[Retry], None] | None = None,
    ) -> None:
        if max_retries is not None and (problem := WholeNumber(0, MAX_UINT32).problem(max_retries)):
            raise InvalidArgumentError({"max_retries": problem})
        self.address = address if channel is not None else checked_address(address)
        if channel is None and tls is None and credentials is None and not insecure:
            refuse_plain_text(address)
        self._timeout_s = checked_timeout_s(timeout_s)
        self._connection = Connection(
            address,
            open_channel=_opener(address, credentials, channel, tls, spreads_calls),
            closes_channel=not isinstance(channel, grpc.aio.Channel),
            metadata=metadata,
            token=(lambda: token) if isinstance(token, str) else token,
            policy=RetryPolicy(max_failures=None if max_retries is None else max_retries + 1),
            connect_timeout_s=checked_timeout_s(connect_timeout_s, "connect_timeout_s"),
            on_retry=on_retry,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end with RuntimeError."""
        await self._connection.close()

    async def connect(self) -> None:
        """Connect now instead of with the first call. Raises UnavailableError at once if no server answers."""
        await self._connection.connect()

    def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        when_detached: DetachedPolicy | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **parameters: Unpack[SamplingKeywords],
    ) -> AsyncStream:
        """Return the stream of a new session that continues a prompt.

        The prompt is text, which the service encodes, or `prompt_token_ids` of the target's vocabulary. The sampling
        parameters are `sampling`, its fields as keywords (`temperature=0.7`), or both: keywords win.
        `request_id` is an idempotency key: the same key and parameters attach to the same session. `when_detached` is
        what becomes of the session when nobody follows it any more; None: as the service's operator says.
        """
        request = prompt_request(prompt, prompt_token_ids)
        merged = merge_sampling(sampling, parameters)
        return self._generate(request, merged, speculation, when_detached, request_id, timeout_s)

    async def complete(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        when_detached: DetachedPolicy | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **parameters: Unpack[SamplingKeywords],
    ) -> Completion:
        """Return the whole completion; otherwise as `generate`."""
        request = prompt_request(prompt, prompt_token_ids)
        merged = merge_sampling(sampling, parameters)
        async with self._generate(request, merged, speculation, when_detached, request_id, timeout_s) as stream:
            return await stream.result()

    def stream_chat(
        self,
        messages: Messages,
        *,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        when_detached: DetachedPolicy | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **parameters: Unpack[SamplingKeywords],
    ) -> AsyncStream:
        """Return the stream of the assistant's answer to chat messages, rendered by the model's chat template.

        A message is (role, content), a ChatMessage, or a mapping with these two keys. Otherwise as `generate`.
        """
        request = chat_request(messages)
        merged = merge_sampling(sampling, parameters)
        return self._generate(request, merged, speculation, when_detached, request_id, timeout_s)

    async def chat(
        self,
        messages: Messages,
        *,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        when_detached: DetachedPolicy | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **parameters: Unpack[SamplingKeywords],
    ) -> Completion:
        """Return the assistant's whole answer; otherwise as `stream_chat`."""
        request = chat_request(messages)
        merged = merge_sampling(sampling, parameters)
        async with self._generate(request, merged, speculation, when_detached, request_id, timeout_s) as stream:
            return await stream.result()

    def resume(
        self, session_id: str, *, offset: int = 0, digest: bytes = b"", timeout_s: float | None = None
    ) -> AsyncStream:
        """Return the stream of a session from token `offset` on: first what the store holds, then new chunks.

        `digest` is that of the last chunk seen, 16 bytes; with it the service checks that it holds the same text.
        """
        request = resume_request(session_id, offset, digest)
        seen = Transcript(request.session_id, request.offset, {request.offset: digest} if digest else {})
        return self._stream(None, seen, timeout_s)

    async def get_session(self, session_id: str, *, timeout_s: float | None = None) -> Session:
        """Return what the store holds of a session. Raises NotFoundError."""
        request = generation_pb2.GetSessionRequest(session_id=checked_session_id(session_id))
        answer = await self._connection.ask(lambda stub: stub.GetSession, request, self._deadline_s(timeout_s))
        return session_from_proto(answer)

    async def cancel(self, session_id: str, *, timeout_s: float | None = None) -> SessionStatus:
        """End a session; what was committed stays readable.

        Return CANCELLED, or FINISHED if it had ended before. Raises NotFoundError.
        """
        request = generation_pb2.CancelSessionRequest(session_id=checked_session_id(session_id))
        answer = await self._connection.ask(lambda stub: stub.CancelSession, request, self._deadline_s(timeout_s))
        return status_from_proto(answer)

    async def get_model(self, *, timeout_s: float | None = None) -> ServedModel:
        """Return the models that the service runs."""
        request = generation_pb2.GetModelRequest()
        answer = await self._connection.ask(lambda stub: stub.GetModel, request, self._deadline_s(timeout_s))
        return served_model_from_proto(answer)

    async def get_status(self, *, timeout_s: float | None = None) -> tuple[ProcessStatus, ...]:
        """Return the metrics of the process that answers, and of the workers that it uses.

        Raises PermissionDeniedError where clients have tokens, and this one's tenant is no operator.
        """
        request, deadline_s = status_pb2.GetStatusRequest(), self._deadline_s(timeout_s)
        stub = status_pb2_grpc.StatusServiceStub
        return statuses_from_proto(await self._connection.ask(lambda own: own.GetStatus, request, deadline_s, stub))

    def _generate(
        self,
        prompt: generation_pb2.GenerateRequest,
        sampling: SamplingParams | None,
        speculation: SpeculationParams | None,
        when_detached: DetachedPolicy | None,
        request_id: str | None,
        timeout_s: float | None,
    ) -> AsyncStream:
        identifier = str(uuid.uuid4()) if request_id is None else request_id
        request = generate_request(prompt, sampling, speculation, identifier, when_detached)
        return self._stream(request, Transcript(), timeout_s)

    def _stream(
        self, request: generation_pb2.GenerateRequest | None, seen: Transcript, timeout_s: float | None
    ) -> AsyncStream:
        chunks = self._connection.follow(request, seen, self._deadline_s(timeout_s))
        return AsyncStream(chunks, seen, self.cancel)

    def _deadline_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else checked_timeout_s(timeout_s)


def _opener(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    channel: grpc.aio.Channel | Callable[[], grpc.aio.Channel] | None,
    tls: TlsFiles | None,
    spreads_calls: bool,
) -> OpenChannel:
    if tls is not None and (credentials is not None or channel is not None):
        raise InvalidArgumentError({"tls": "is given beside credentials or a channel; give one of them"})
    if isinstance(channel, grpc.aio.Channel):
        return lambda _: channel
    if channel is not None:
        return lambda _: channel()
    if tls is None:
        return lambda pings: open_channel(address, credentials, pings, spreads_calls=spreads_calls)
    try:
        files = watched(tls)
    except WatchedError as error:
        raise InvalidArgumentError({"tls": f"is not usable: {error}"}) from None

    def reloading(pings: Pings) -> grpc.aio.Channel:
        return ReloadingChannel(
            files, lambda credentials: open_channel(address, credentials, pings, spreads_calls=spreads_calls)
        )

    return reloading
