"""One Redis server: its connections, and commands that are answered on one of them."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

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


class Node:
    """One Redis server. At most MAX_CALLS calls are under way; more wait for their turn."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        # the pool does not wait: it raises where a connection is missing
        self.turns = asyncio.Semaphore(min(MAX_CALLS, pool.max_connections))

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together on one connection; return the replies, error replies among them.

        Raises RedisError where the connection fails, and closes it: a later reply must not answer another command.
        """
        connection: Any = await self.pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command(connection.pack_commands(commands))
            return [await _reply(connection) for _ in commands]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        finally:
            await asyncio.shield(self.pool.release(connection))

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
