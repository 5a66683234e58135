"""One Redis server: its connections, and commands that are answered on one of them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

MAX_CALLS = 64  # at once, each on its own connection; Redis executes them one by one
SOCKET_TIMEOUT_S = 2.0
Command = tuple[Any, ...]


def options() -> dict[str, Any]:
    """Return what each connection has: our own time-outs, and no retries below ours."""
    return {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
    }


@contextmanager
def no_lost_cancellation() -> Iterator[None]:
    """Raise the CancelledError of a cancellation that came meanwhile and went unheard.

    redis-py sends by `asyncio.wait_for`, which on Python 3.11 forgets one that comes in the moment when it is done.
    """
    task = asyncio.current_task()
    num_before = task.cancelling() if task else 0
    yield
    if task and task.cancelling() > num_before:
        raise asyncio.CancelledError


class Node:
    """One Redis server. At most MAX_CALLS calls are under way; more wait for their turn."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        # the pool does not wait: it raises where a connection is missing
        self.turns = asyncio.Semaphore(min(MAX_CALLS, pool.max_connections))
        self.on_break: Callable[[], None] = lambda: None  # called when a connection is found broken
        self._num_breaks = 0
        self._made = WeakKeyDictionary[Any, int]()  # of each connection: how many breaks were known when it was made

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together on one connection; return the replies, error replies among them.

        Raises RedisError where the connection fails, and closes it: a later reply must not answer another command.
        """
        with no_lost_cancellation():
            return await self._executed(commands)

    async def _executed(self, commands: Sequence[Command]) -> list[Any]:
        connection: Any = await self._connection()
        try:
            await connection.send_packed_command(connection.pack_commands(commands))
            return [await _reply(connection) for _ in commands]
        except BaseException as error:
            if isinstance(error, RedisError | OSError):
                self._note_break(connection)
            await connection.disconnect(nowait=True)
            raise
        finally:
            await asyncio.shield(self.pool.release(connection))

    async def _connection(self) -> Any:
        try:
            connection: Any = await self.pool.get_connection()  # type: ignore[no-untyped-call]
        except (RedisError, OSError):
            self._count_break()
            raise
        # the pool connects again by itself where it finds that an idle connection was closed
        connection.register_connect_callback(self._connected_again)
        self._made.setdefault(connection, self._num_breaks)
        return connection

    async def _connected_again(self, connection: Any) -> None:
        self._note_break(connection)
        self._made[connection] = self._num_breaks

    def _note_break(self, connection: Any) -> None:
        """Count a break, unless the connection is older than the last one: then that is why."""
        if self._made.get(connection) == self._num_breaks:
            self._count_break()

    def _count_break(self) -> None:
        self._num_breaks += 1
        self.on_break()

    async def drop(self) -> None:
        """Close the connections that are not in use: the server may not be what it was when they were made."""
        with suppress(RedisError, OSError):
            await self.pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """Close all connections."""
        await self.pool.disconnect()


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
