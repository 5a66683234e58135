"""The simulated Redis: the real Lua, behind connections that lose and delay what crosses them.

A command is executed when its request arrives, also if its sender has given up or died by then, as a real server does
with what is in its socket.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from coordinator.session_ids import SECRET_BYTES
from coordinator.stores.client import WAIT_TIMEOUT_MS
from coordinator.stores.node import MAX_CALLS, SOCKET_TIMEOUT_S, Command, Node
from coordinator.stores.routes import FixedRoute
from tests.simulation.loop import CURRENT, outside_of_processes, virtual_loop
from tests.simulation.lua_redis import Contents, LuaRedis

LATE_SHARE = 0.003
SECRET = bytes(SECRET_BYTES)  # of all stores: worlds are the same again
WALL_CLOCK_S = 1_700_000_000.0  # when worlds begin


def wall_clock_s() -> float:
    """Return what a clock says that is right."""
    return WALL_CLOCK_S + virtual_loop().time()


@dataclass(slots=True)
class SimulatedRedis:
    """One Redis server."""

    random: random.Random
    name: str = "store"
    delay_s: float = 0.0005
    is_up: bool = True
    paused_until_s: float = 0.0
    lost_requests: float = 0.0  # shares, while a fault lasts
    lost_replies: float = 0.0
    on_change: Callable[["SimulatedRedis", list[str]], None] = lambda store, session_ids: None
    now_s: Callable[[], float] = wall_clock_s
    generation: int = 0  # how often it was restarted; older connections are broken
    replica: "Replica | None" = None
    num_executed: int = 0
    redis: LuaRedis = field(init=False)
    _snapshots: list[Contents] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.redis = LuaRedis(self.now_s)

    def session_ids(self) -> list[str]:
        """Return the sessions that it holds."""
        return [_session_id(key) for key in self.redis.values if key.endswith(b":meta")]

    def meta(self, session_id: str) -> dict[bytes, bytes]:
        """Return a session's fields."""
        fields = self.redis.values[f"specdec:{{{session_id}}}:meta".encode()]
        assert isinstance(fields, dict)
        return fields

    def tokens(self, session_id: str) -> bytes:
        """Return a session's packed tokens, prompt included."""
        packed = self.redis.values.get(f"specdec:{{{session_id}}}:tokens".encode(), b"")
        assert isinstance(packed, bytes)
        return packed

    def delay(self) -> float:
        """Draw how long a message takes: seldom so long that its sender has given up by then."""
        if self.random.random() < LATE_SHARE:
            return self.random.uniform(0, 2 * SOCKET_TIMEOUT_S)
        return self.random.expovariate(1.0 / self.delay_s)

    def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Execute commands of one request; return the replies, and tell of the sessions that they changed."""
        replies = [None if command[0] == "WAIT" else self.redis.execute(command) for command in commands]
        self.num_executed += 1
        if self.replica:
            self.replica.follow(self)
        if changed := self.redis.changed:
            held = dict.fromkeys(_session_id(key) for key in changed if key.startswith(b"specdec:{"))
            changed.clear()
            self.on_change(self, [name for name in held if f"specdec:{{{name}}}:meta".encode() in self.redis.values])
        return replies

    def keep_snapshot(self) -> None:
        """Remember the contents, as Redis does on its disk from time to time."""
        self._snapshots.append(self.redis.copy())

    def roll_back(self) -> None:
        """Restart with the contents of the last snapshot."""
        self.restart()
        self.redis.replace(self._snapshots[-1] if self._snapshots else {})

    def fail_over(self) -> None:
        """Let the replica take the master's place: with what it has."""
        assert self.replica
        self.restart()
        self.redis.replace(self.replica.contents)

    def lose_everything(self) -> None:
        """Restart empty."""
        self.restart()
        self.redis.replace({})

    def restart(self) -> None:
        """Break all connections, and forget the scripts; the contents stay."""
        self.generation += 1
        self.redis.forget_scripts()

    def route(self) -> FixedRoute:
        """Return the way to it."""
        pool: Any = SimulatedPool(self)
        return FixedRoute(Node(pool))


@dataclass(slots=True)
class Replica:
    """A copy of a store that lags behind it, and what WAIT says of it."""

    contents: Contents = field(default_factory=dict)
    num_executed: int = 0
    is_cut_off: bool = False

    def follow(self, store: SimulatedRedis) -> None:
        """Get what the store has now, a little later; nothing that is under way survives a failover."""
        contents, number, generation = store.redis.copy(), store.num_executed, store.generation

        def arrive() -> None:
            if not self.is_cut_off and generation == store.generation and number > self.num_executed:
                self.contents, self.num_executed = contents, number

        virtual_loop().call_later(store.delay(), arrive, context=outside_of_processes())

    async def wait(self, number: int, timeout_s: float) -> int:
        """Return how many replicas have executed so many commands: 1, or after the time-out 0."""
        for _ in range(100):
            if self.num_executed >= number:
                return 1
            await asyncio.sleep(timeout_s / 100)
        return 0


@dataclass(slots=True)
class _Request:
    """Commands under way, and where their replies go."""

    store: SimulatedRedis
    generation: int  # of the server that the connection was made with
    commands: Sequence[Command]
    replies: "asyncio.Future[list[Any]]"
    is_answered: bool

    def arrive(self) -> None:
        """Execute it, once the server is not paused."""
        store, loop = self.store, virtual_loop()
        if store.paused_until_s > loop.time():
            loop.call_at(store.paused_until_s, self.arrive, context=outside_of_processes())
        elif not store.is_up or store.generation != self.generation:
            loop.call_later(store.delay(), self._fail, context=outside_of_processes())
        else:
            replies = store.execute(self.commands)
            if self.is_answered:
                loop.call_later(store.delay(), self._answer, replies, context=outside_of_processes())

    def _answer(self, replies: list[Any]) -> None:
        if not self.replies.done():
            self.replies.set_result(replies)

    def _fail(self) -> None:
        if not self.replies.done():
            self.replies.set_exception(RedisConnectionError("Connection reset by peer."))

    def expire(self) -> None:
        """Give up waiting."""
        if not self.replies.done():
            self.replies.set_exception(RedisTimeoutError("Timeout reading from socket"))


class SimulatedConnection:
    """A connection to a simulated Redis, with as much of redis-py's interface as `Node` uses."""

    def __init__(self, store: SimulatedRedis) -> None:
        self._store = store
        self._generation: int | None = None  # of the server at its other end; None: not connected
        self._request: _Request | None = None
        self._replies: list[Any] | None = None  # those that have arrived and were not read
        self._on_connect: list[Callable[[Any], Any]] = []

    def register_connect_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call a coroutine function whenever it is connected again."""
        if callback not in self._on_connect:
            self._on_connect.append(callback)

    async def connect(self) -> None:
        """Connect, unless it is. Raises as redis-py where nobody listens."""
        if self._generation is not None:
            return
        await asyncio.sleep(self._store.delay())
        if not self._store.is_up or not _is_alive():
            raise RedisConnectionError("Connection refused.")
        self._generation = self._store.generation
        for callback in self._on_connect:
            await callback(self)

    async def disconnect(self, nowait: bool = False) -> None:
        """Close it: what is still to come on it answers nobody."""
        self._generation = self._request = self._replies = None

    def pack_commands(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Return them as they are."""
        return commands

    async def send_packed_command(self, commands: Sequence[Command]) -> None:
        """Send a request; it is executed when it arrives."""
        await self.connect()
        if not _is_alive():
            raise RedisConnectionError("Connection closed.")
        store, loop = self._store, virtual_loop()
        is_answered = store.random.random() >= store.lost_replies
        assert self._generation is not None
        self._request = _Request(store, self._generation, commands, loop.create_future(), is_answered)
        if store.random.random() >= store.lost_requests:
            loop.call_later(store.delay(), self._request.arrive, context=outside_of_processes())

    async def read_response(self) -> Any:
        """Return the next reply, or raise as redis-py does where none comes in time."""
        assert self._request
        if self._replies is None:
            waiting = virtual_loop().call_later(SOCKET_TIMEOUT_S, self._request.expire)
            try:
                self._replies = list(await self._request.replies)
            finally:
                waiting.cancel()
        place = len(self._request.commands) - len(self._replies)
        reply = self._replies.pop(0)
        if self._request.commands[place][0] == "WAIT":
            reply = await self._wait()
        if not self._replies:
            self._replies = None
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _wait(self) -> int:
        """Answer WAIT for all that was executed before it."""
        assert self._store.replica
        number = self._store.num_executed
        num_replicas = await self._store.replica.wait(number, WAIT_TIMEOUT_MS / 1000)
        if self._generation != self._store.generation:
            raise RedisConnectionError("Connection reset by peer.")
        return num_replicas


class SimulatedPool:
    """Connections to a simulated Redis, as redis-py's pool keeps them: the one that was returned last is the next."""

    max_connections = MAX_CALLS

    def __init__(self, store: SimulatedRedis) -> None:
        self._store = store
        self._idle: list[SimulatedConnection] = []

    async def get_connection(self) -> SimulatedConnection:
        """Return a connection that is connected."""
        connection = self._idle.pop() if self._idle else SimulatedConnection(self._store)
        try:
            await connection.connect()
        except BaseException:
            self._idle.append(connection)
            raise
        return connection

    async def release(self, connection: SimulatedConnection) -> None:
        """Take a connection back."""
        self._idle.append(connection)

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the connections that are not in use; the simulation closes no others."""
        for connection in self._idle:
            await connection.disconnect()


def _session_id(key: bytes) -> str:
    return key.decode().partition("{")[2].partition("}")[0]


def _is_alive() -> bool:
    process = CURRENT.get()
    return process is None or process.is_alive
