"""The client for code without an event loop: `AsyncClient`, run on its own thread. No logic is repeated here.

with Client("127.0.0.1:50051") as client:
    with client.generate("Once upon a time", temperature=0.7, max_new_tokens=64) as stream:
        for chunk in stream:
            print(chunk.text, end="")
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError
from typing import Any, Self, TypeVar, Unpack

import grpc

from specdec.client import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, AsyncClient
from specdec.completion import Chunk, Completion, ServedModel, Session, SessionStatus
from specdec.connection import Metadata
from specdec.process_status import ProcessStatus
from specdec.request import Messages
from specdec.retry import Retry
from specdec.stream import AsyncStream
from specdec.tls import TlsFiles
from specdec.types import DetachedPolicy, SamplingKeywords, SamplingParams, SpeculationParams

T = TypeVar("T")


class _LoopThread:
    """An event loop on a daemon thread, and the client that runs on it."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # no work may be submitted after `stop`: it would never run
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="specdec client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine. An interrupt of the caller cancels it. Raises RuntimeError once stopped."""
        with self._lock:
            if self._is_stopping:
                work.close()
                raise RuntimeError("the client is closed; make a new one")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("the client was closed during the call") from None
        finally:
            future.cancel()  # after an interrupt; a future that is done stays as it is

    def stop(self) -> None:
        """Close the client, cancel what still runs, and end the thread."""
        with self._lock:
            is_first, self._is_stopping = not self._is_stopping, True
            if is_first:
                asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        # the garbage collector may run a finalizer on any thread
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def _close(self) -> None:
        try:
            await self._client.close()
        finally:
            self._loop.stop()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_the_rest())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def _cancel_the_rest() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Stream:
    """The chunks of one session as they are committed; the last one has `finish`.

    The call begins with the first iteration. Leaving the `with` block ends the call at once; the session stays in the
    store and can be resumed. Without `with`, garbage collection ends the call: with CPython soon after a `break`, but
    not at a defined time. `cancel` and `close` may be called from another thread. Errors: as of `AsyncStream`.
    """

    def __init__(self, stream: AsyncStream, thread: _LoopThread, client: "Client") -> None:
        self._stream = stream
        self._thread = thread
        self._client = client  # a client without other references lives as long as its streams

    @property
    def session_id(self) -> str | None:
        """Return the session's id; None before the first chunk of a new session."""
        return self._stream.session_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        chunk = self._thread.run(_next(self._stream))
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def result(self) -> Completion:
        """Read the rest and return the whole: all chunks of this stream, also those that were iterated over before.

        Raises what iterating raises; ValueError if the stream was closed before the session finished.
        """
        return self._thread.run(self._stream.result())

    def cancel(self) -> None:
        """End the session: what was committed stays readable, and the stream ends with FinishReason.CANCELLED.

        Before the first chunk, while the session's id is unknown, this is `close`.
        """
        self._thread.run(self._stream.cancel())

    def close(self) -> None:
        """End the call; the session stays in the store and can be resumed."""
        self._thread.run(self._stream.close())


async def _next(stream: AsyncStream) -> Chunk | None:
    return await anext(stream, None)


class Client:
    """A client of one specdec service, for any number of threads.

    Used with `with`, or without and ended with `close`. Arguments and errors: as of `AsyncClient`, but `channel` is
    always a function, called on the event loop of the client. `on_retry` is called on the client's own thread.
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
        channel: Callable[[], grpc.aio.Channel] | None = None,
        spreads_calls: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int | None = None,
        connect_timeout_s: float = 20.0,
        on_retry: Callable[[Retry], None] | None = None,
    ) -> None:
        self.address = address
        self._client = AsyncClient(
            address,
            tls=tls,
            credentials=credentials,
            token=token,
            insecure=insecure,
            metadata=metadata,
            channel=channel,
            spreads_calls=spreads_calls,
            timeout_s=timeout_s,
            max_retries=max_retries,
            connect_timeout_s=connect_timeout_s,
            on_retry=on_retry,
        )
        self._thread = _LoopThread(self._client)
        self._finalizer = weakref.finalize(self, self._thread.stop)  # also at the interpreter's end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread; running calls end with RuntimeError."""
        self._finalizer()

    def connect(self) -> None:
        """Connect now instead of with the first call. Raises UnavailableError at once if no server answers."""
        self._thread.run(self._client.connect())

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
    ) -> Stream:
        """Return the stream of a new session that continues a prompt. Arguments: as of `AsyncClient.generate`."""
        stream = self._client.generate(
            prompt,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            speculation=speculation,
            when_detached=when_detached,
            request_id=request_id,
            timeout_s=timeout_s,
            **parameters,
        )
        return Stream(stream, self._thread, self)

    def complete(
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
        with self.generate(
            prompt,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            speculation=speculation,
            when_detached=when_detached,
            request_id=request_id,
            timeout_s=timeout_s,
            **parameters,
        ) as stream:
            return stream.result()

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
    ) -> Stream:
        """Return the stream of the assistant's answer to chat messages. Arguments: as of `AsyncClient.stream_chat`."""
        stream = self._client.stream_chat(
            messages,
            sampling=sampling,
            speculation=speculation,
            when_detached=when_detached,
            request_id=request_id,
            timeout_s=timeout_s,
            **parameters,
        )
        return Stream(stream, self._thread, self)

    def chat(
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
        with self.stream_chat(
            messages,
            sampling=sampling,
            speculation=speculation,
            when_detached=when_detached,
            request_id=request_id,
            timeout_s=timeout_s,
            **parameters,
        ) as stream:
            return stream.result()

    def resume(
        self, session_id: str, *, offset: int = 0, digest: bytes = b"", timeout_s: float | None = None
    ) -> Stream:
        """Return the stream of a session from token `offset` on. Arguments: as of `AsyncClient.resume`."""
        stream = self._client.resume(session_id, offset=offset, digest=digest, timeout_s=timeout_s)
        return Stream(stream, self._thread, self)

    def get_session(self, session_id: str, *, timeout_s: float | None = None) -> Session:
        """Return what the store holds of a session. Raises NotFoundError."""
        return self._thread.run(self._client.get_session(session_id, timeout_s=timeout_s))

    def cancel(self, session_id: str, *, timeout_s: float | None = None) -> SessionStatus:
        """End a session; what was committed stays readable.

        Return CANCELLED, or FINISHED if it had ended before. Raises NotFoundError.
        """
        return self._thread.run(self._client.cancel(session_id, timeout_s=timeout_s))

    def get_model(self, *, timeout_s: float | None = None) -> ServedModel:
        """Return the models that the service runs."""
        return self._thread.run(self._client.get_model(timeout_s=timeout_s))

    def get_status(self, *, timeout_s: float | None = None) -> tuple[ProcessStatus, ...]:
        """Return the metrics of the process that answers, and of its workers. Raises PermissionDeniedError."""
        return self._thread.run(self._client.get_status(timeout_s=timeout_s))
