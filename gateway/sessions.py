"""The sessions of one request, one for each choice, and their chunks as they arrive."""

import asyncio
from typing import Self, TypedDict

from gateway.asked import Asked, Messages, Prompt, TokenIds
from gateway.coordinators import Coordinators
from specdec.completion import Chunk
from specdec.stream import AsyncStream
from specdec.types import DetachedPolicy, SamplingParams, SpeculationParams

CHUNKS_AHEAD = 4  # of each choice, that wait for the client to read on; then its session pauses

Arrived = tuple[int, Chunk]  # the choice's index


class Options(TypedDict):
    """What all choices have in common, as the client's keywords."""

    speculation: SpeculationParams | None
    when_detached: DetachedPolicy
    request_id: str


class Sessions:
    """The running sessions of a request, as an asynchronous iterator of their chunks. It is entered, and left.

    Leaving it before their end ends them. If the client may come back for the same sessions they are only detached:
    their coordinators end them unless it does.
    """

    def __init__(self, coordinators: Coordinators, asked: Asked, request_id: str, *, client_may_return: bool) -> None:
        self._coordinators = coordinators
        self._client_may_return = client_may_return
        self._streams = [
            _begun(coordinators, asked, *asked.choice(index), f"{request_id}-{index}")
            for index in range(asked.total_choices)
        ]
        self._arrived: asyncio.Queue[Arrived | Exception] = asyncio.Queue(CHUNKS_AHEAD * len(self._streams))
        self._readers: list[asyncio.Task[None]] = []
        self._running = set(range(len(self._streams)))

    async def __aenter__(self) -> Self:
        self._readers = [asyncio.create_task(self._read(index, stream)) for index, stream in enumerate(self._streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await asyncio.gather(*(stream.close() for stream in self._streams))
        if not self._client_may_return:
            for index in self._running:
                if session_id := self._streams[index].session_id:
                    self._coordinators.end(session_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Arrived:
        if not self._running:
            raise StopAsyncIteration
        arrived = await self._arrived.get()
        if isinstance(arrived, Exception):
            raise arrived
        index, chunk = arrived
        if chunk.finish is not None:
            self._running.discard(index)
        return arrived

    async def _read(self, index: int, stream: AsyncStream) -> None:
        try:
            async for chunk in stream:
                await self._arrived.put((index, chunk))
        except Exception as error:
            await self._arrived.put(error)


def _begun(
    coordinators: Coordinators, asked: Asked, prompt: Prompt, sampling: SamplingParams, request_id: str
) -> AsyncStream:
    """Return the stream of one choice. Raises InvalidArgumentError."""
    client = coordinators.client
    options = Options(speculation=asked.speculation, when_detached=DetachedPolicy.CANCEL, request_id=request_id)
    if isinstance(prompt, Messages):
        return client.stream_chat(prompt, sampling=sampling, **options)
    if isinstance(prompt, TokenIds):
        return client.generate(prompt_token_ids=prompt, sampling=sampling, **options)
    return client.generate(prompt, sampling=sampling, **options)
