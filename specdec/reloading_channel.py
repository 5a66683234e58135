"""A channel whose certificates may be replaced while it is used.

grpc gives a channel its credentials once. So another channel is opened when the files have changed: new calls go there,
and the old one closes after its last call.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from specdec.tls import TlsContents, channel_credentials
from specdec.watched import Watched

OpenChannel = Callable[[grpc.ChannelCredentials], grpc.aio.Channel]


@dataclass(slots=True)
class _Opened:
    """One channel, and the calls that run on it."""

    contents: TlsContents
    channel: grpc.aio.Channel
    num_calls: int = 0
    is_replaced: bool = False


class ReloadingChannel(grpc.aio.Channel):
    """A channel that is opened again when its certificates have changed; running calls end on the old one."""

    def __init__(self, files: Watched[TlsContents], open_channel: OpenChannel) -> None:
        self._files, self._open_channel = files, open_channel
        self._current = self._opened(files.value)
        self._replaced: list[_Opened] = []
        self._closing: set[asyncio.Task[None]] = set()

    def _opened(self, contents: TlsContents) -> _Opened:
        return _Opened(contents, self._open_channel(channel_credentials(contents)))

    def _now(self) -> _Opened:
        """Return the channel with the certificates of now."""
        contents = self._files.value
        if contents != self._current.contents:
            old, self._current = self._current, self._opened(contents)
            old.is_replaced = True
            self._replaced.append(old)
            self._close_if_unused(old)
        return self._current

    def _close_if_unused(self, opened: _Opened) -> None:
        if opened.is_replaced and not opened.num_calls and opened in self._replaced:
            self._replaced.remove(opened)
            task = asyncio.ensure_future(opened.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _callable(self, kind: str, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        made: list[tuple[_Opened, Any]] = []  # at most one

        def call(*args: Any, **kwargs: Any) -> Any:
            opened = self._now()
            if not made or made[0][0] is not opened:
                made[:] = [(opened, getattr(opened.channel, kind)(method, *arguments, **keywords))]
            running = made[0][1](*args, **kwargs)
            opened.num_calls += 1
            running.add_done_callback(lambda _: self._ended(opened))
            return running

        return call

    def _ended(self, opened: _Opened) -> None:
        opened.num_calls -= 1
        self._close_if_unused(opened)

    def unary_unary(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Return a callable that calls on the channel of the moment; so do the others."""
        return self._callable("unary_unary", method, arguments, keywords)

    def unary_stream(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """As `unary_unary`."""
        return self._callable("unary_stream", method, arguments, keywords)

    def stream_unary(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """As `unary_unary`."""
        return self._callable("stream_unary", method, arguments, keywords)

    def stream_stream(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """As `unary_unary`."""
        return self._callable("stream_stream", method, arguments, keywords)

    async def close(self, grace: float | None = None) -> None:
        """Close all channels."""
        opened, self._replaced = [self._current, *self._replaced], []
        await asyncio.gather(*(each.channel.close(grace) for each in opened), *self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the channel of the moment."""
        return self._now().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait on the channel of the moment."""
        await self._current.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the channel of the moment is connected."""
        await self._now().channel.channel_ready()

    async def __aenter__(self) -> "ReloadingChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
