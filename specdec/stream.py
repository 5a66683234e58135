"""The stream of one session's chunks, as the asynchronous client returns it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Self

from specdec.completion import Chunk, Completion, Transcript


class AsyncStream:
    """The chunks of one session as they are committed; the last one has `finish`.

        async with client.generate("Once upon a time") as stream:
            async for chunk in stream:
                print(chunk.text, end="")

    The call begins with the first iteration. Leaving the `async with` block ends the call at once, however it is left;
    the session stays in the store and can be resumed. A stream that is used without `async with` ends its call when it
    is garbage collected: with CPython soon after a `break`, but not at a defined time.

    Iterating raises the service's errors (`SpecdecError`), DataLossError if the server contradicts what it sent before.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[Chunk, None],
        seen: Transcript,
        cancel_session: Callable[[str], Awaitable[object]],
    ) -> None:
        self._generator = chunks
        self._seen = seen
        self._cancel_session = cancel_session
        self._chunks: list[Chunk] = []
        self._reading: asyncio.Future[Chunk] | None = None
        self._is_closed = False

    @property
    def session_id(self) -> str | None:
        """Return the session's id; None before the first chunk of a new session."""
        return self._seen.session_id or None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._is_closed:
            raise StopAsyncIteration
        if self._reading is not None:
            raise RuntimeError("another task is iterating over this stream")
        # a task of its own, so that `close` can end it from another task
        self._reading = asyncio.ensure_future(anext(self._generator))
        try:
            chunk = await self._reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and not (task and task.cancelling()):
                raise StopAsyncIteration from None
            raise
        finally:
            self._reading = None
        self._chunks.append(chunk)
        return chunk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def result(self) -> Completion:
        """Read the rest and return the whole: all chunks of this stream, also those that were iterated over before.

        Raises what iterating raises; ValueError if the stream was closed before the session finished.
        """
        async for _ in self:
            pass
        return Completion.of(self._chunks)

    async def cancel(self) -> None:
        """End the session: what was committed stays readable, and the stream ends with FinishReason.CANCELLED.

        Before the first chunk, while the session's id is unknown, this is `close`.
        """
        if self.session_id is None:
            await self.close()
        else:
            await self._cancel_session(self.session_id)

    async def close(self) -> None:
        """End the call; the session stays in the store and can be resumed."""
        self._is_closed = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._generator.aclose()
