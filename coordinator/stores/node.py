"""One Redis server: its connections, and commands that are answered on one of them."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import hiredis
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MaxConnectionsError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

MAX_CALLS = 64  # at once; Redis executes them one by one
CALLS_SHARE = 0.64  # of a pool's connections; the others are for replies that nobody waits for,
NUM_SPARE = 4  # but for these: calls that need no turn
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
    """One Redis server. At most MAX_CALLS calls are under way; more wait for their turn.

    Connections are taken from the pool once and kept until they fail: redis-py's pool does much for each call. For the
    same reason the time-out of an exchange is ours: redis-py's makes a task of each message.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        # the pool does not wait: it raises where a connection is missing
        num_calls = min(MAX_CALLS, math.ceil(CALLS_SHARE * pool.max_connections))
        self.turns = asyncio.Semaphore(num_calls)
        self._max_given_up: int = pool.max_connections - num_calls - NUM_SPARE
        self.on_break: Callable[[], None] = lambda: None  # called when a connection is found broken
        self._timeout_s: float = pool.connection_kwargs.get("socket_timeout") or SOCKET_TIMEOUT_S
        self._idle: list[Any] = []  # connections of the pool that wait for their next call
        self._num_breaks = 0
        self._made = WeakKeyDictionary[Any, int]()  # of each connection: how many breaks were known when it was made
        self._num_under_way = 0  # exchanges of single calls
        self._joined: list[tuple[Command, asyncio.Future[Any]]] = []  # calls that the next message will have
        self._sending = set[asyncio.Task[None]]()  # such messages
        self._given_up = set[asyncio.Task[None]]()  # exchanges whose callers have left

    async def call(self, command: Command) -> Any:
        """Send a command, and return its reply, which may be an error reply; raises as `execute`.

        While others are under way, those that come in one turn of the event loop share a message.
        """
        if self._num_under_way:
            return await self._join(command)
        self._num_under_way += 1
        try:
            return (await self.execute([command]))[0]
        finally:
            self._num_under_way -= 1

    def _join(self, command: Command) -> "asyncio.Future[Any]":
        reply = asyncio.get_running_loop().create_future()
        self._joined.append((command, reply))
        if len(self._joined) == 1:
            sending = asyncio.create_task(self._execute_joined(), name="calls to the store")
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        return reply

    async def _execute_joined(self) -> None:
        joined, self._joined = self._joined, []
        self._num_under_way += 1
        try:
            replies: Sequence[Any] = await self.execute([command for command, _ in joined])
        except (RedisError, OSError) as error:
            for _, waiting in joined:
                if not waiting.done():
                    waiting.set_exception(error)
        except BaseException:
            for _, waiting in joined:
                waiting.cancel()
            raise
        else:
            for (_, waiting), reply in zip(joined, replies, strict=True):
                if not waiting.done():
                    waiting.set_result(reply)
        finally:
            self._num_under_way -= 1

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together on one connection; return the replies, error replies among them.

        Raises RedisError where the connection fails, and closes it: a later reply must not answer another command. A
        caller that is cancelled leaves at once; its replies are read without it, and the connection stays. Closed, it
        would look broken when it is next used, and clients that leave could make all others wait for a store that is
        well. That remains for what could not be sent yet, and where more leave at once than the pool has connections.
        """
        connection, replies = await self._connection(), list[Any]()
        try:
            await self._exchange(connection, commands, replies)
        except asyncio.CancelledError:
            num_left = len(commands) - len(replies)
            if connection.is_connected and len(self._given_up) + len(self._sending) < self._max_given_up:
                self._read_alone(connection, num_left)
            else:
                await self._fail(connection)
            raise
        except Exception as error:
            await self._fail(connection, is_broken=isinstance(error, RedisError | OSError))
            raise
        await self._keep(connection)
        return replies

    async def _exchange(self, connection: Any, commands: Sequence[Command], replies: list[Any]) -> None:
        """Send commands, and append their replies as they come."""
        message = b"".join(map(hiredis.pack_command, commands))
        try:
            async with asyncio.timeout(self._timeout_s) as timer:
                await connection.send_packed_command(message)
                for number in range(len(commands)):
                    if number:  # each reply has its time: the command before may have been a long one
                        timer.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
                    replies.append(await _reply(connection))
        except TimeoutError:
            raise RedisTimeoutError("the server did not answer in time") from None

    def _read_alone(self, connection: Any, num_replies: int) -> None:
        """Let a task read the replies that nobody waits for."""
        reading = asyncio.create_task(self._read_rest(connection, num_replies), name="replies that nobody waits for")
        self._given_up.add(reading)
        reading.add_done_callback(self._given_up.discard)

    async def _read_rest(self, connection: Any, num_replies: int) -> None:
        try:
            for _ in range(num_replies):
                async with asyncio.timeout(self._timeout_s):
                    await _reply(connection)
        except asyncio.CancelledError:  # by `close`
            await self._fail(connection)
            raise
        except Exception as error:
            await self._fail(connection, is_broken=isinstance(error, RedisError | OSError))
        else:
            await self._keep(connection)

    async def _keep(self, connection: Any) -> None:
        """Let the next call have a connection."""
        if connection.should_reconnect():
            await asyncio.shield(self._release(connection))
        else:
            self._idle.append(connection)

    async def _fail(self, connection: Any, *, is_broken: bool = False) -> None:
        """Close a connection."""
        if is_broken:
            self._note_break(connection)
        await connection.disconnect(nowait=True)
        await asyncio.shield(self._release(connection))

    async def _connection(self) -> Any:
        """Return a connection that is open and has nothing to read."""
        while self._idle:
            connection: Any = self._idle.pop()
            if connection.is_connected and not await connection.can_read():
                return connection
            await connection.disconnect(nowait=True)  # the pool makes it again
            await asyncio.shield(self._release(connection))
        connection = None
        try:
            with no_lost_cancellation():
                connection = await self._from_pool()
        except asyncio.CancelledError:
            if connection is not None:
                self._idle.append(connection)
            raise
        return connection

    async def _from_pool(self) -> Any:
        try:
            connection: Any = await self.pool.get_connection()  # type: ignore[no-untyped-call]
        except MaxConnectionsError:
            raise
        except (RedisError, OSError):
            self._count_break()
            raise
        # the pool connects again by itself where it finds that an idle connection was closed
        connection.register_connect_callback(self._connected_again)
        self._made.setdefault(connection, self._num_breaks)
        connection.socket_timeout = None
        return connection

    async def _release(self, connection: Any) -> None:
        """Give a connection back to the pool."""
        connection.socket_timeout = self._timeout_s
        await self.pool.release(connection)

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
            idle, self._idle = self._idle, []
            for connection in idle:
                await self._release(connection)
            await self.pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """Close all connections."""
        for reading in self._given_up:
            reading.cancel()
        await asyncio.gather(*self._given_up, return_exceptions=True)
        await self.pool.disconnect()


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response(disconnect_on_error=False)
    except ResponseError as error:
        return error
