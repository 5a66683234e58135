"""The simulated Redis: the real Lua through fakeredis, behind a connection that loses and delays what crosses it.

A command is executed when its request arrives, also if its sender has given up or died by then, as a real server does
with what is in its socket.
"""

import asyncio
import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import fakeredis._helpers
import fakeredis._socket._base
import fakeredis.commands_mixins.server_mixin
from fakeredis import FakeServer
from fakeredis._clients._async import FakeAsyncRedisConnection, FakeReader, FakeWriter
from fakeredis._socket import AsyncFakeSocket
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from coordinator.session_ids import SECRET_BYTES
from coordinator.stores.client import WAIT_TIMEOUT_MS
from coordinator.stores.node import SOCKET_TIMEOUT_S, Node
from coordinator.stores.routes import FixedRoute
from tests.simulation.loop import CURRENT, outside_of_processes, virtual_loop

LATE_SHARE = 0.003
SECRET = bytes(SECRET_BYTES)  # of all stores: worlds are the same again
WALL_CLOCK_S = 1_700_000_000.0  # when worlds begin


@dataclass(slots=True)
class SimulatedRedis:
    """One Redis server."""

    random: random.Random
    name: str = "store"
    delay_s: float = 0.0005
    server: FakeServer = field(default_factory=lambda: FakeServer(version=(7,)))
    is_up: bool = True
    paused_until_s: float = 0.0
    lost_requests: float = 0.0  # shares, while a fault lasts
    lost_replies: float = 0.0
    on_change: Callable[["SimulatedRedis"], None] = lambda store: None
    generation: int = 0  # how often it was restarted; older connections are broken
    replica: "Replica | None" = None
    num_executed: int = 0
    disturbed_at_s: float = -math.inf  # when it last lost, or held up, what was sent to it
    _snapshots: list[dict[bytes, Any]] = field(default_factory=list)

    @property
    def contents(self) -> dict[bytes, Any]:
        """All keys with their items, for reading."""
        return self.server.dbs[0]._dict

    def session_ids(self) -> list[str]:
        """Return the sessions that it holds."""
        metas = [key.decode() for key in self.contents if key.endswith(b":meta")]
        return [key.partition("{")[2].partition("}")[0] for key in metas]

    def meta(self, session_id: str) -> dict[bytes, bytes]:
        """Return a session's fields."""
        fields: dict[bytes, bytes] = self.contents[f"specdec:{{{session_id}}}:meta".encode()].value._values
        return fields

    def tokens(self, session_id: str) -> bytes:
        """Return a session's packed tokens, prompt included."""
        item = self.contents.get(f"specdec:{{{session_id}}}:tokens".encode())
        return bytes(item.value) if item else b""

    def delay(self) -> float:
        """Draw how long a message takes: seldom so long that its sender has given up by then."""
        if self.random.random() < LATE_SHARE:
            return self.random.uniform(0, 2 * SOCKET_TIMEOUT_S)
        return self.random.expovariate(1.0 / self.delay_s)

    def keep_snapshot(self) -> None:
        """Remember the contents, as Redis does on its disk from time to time."""
        self._snapshots.append(copy.deepcopy(self.contents))

    def roll_back(self) -> None:
        """Restart with the contents of the last snapshot."""
        self.restart()
        self._replace(self._snapshots[-1] if self._snapshots else {})

    def fail_over(self) -> None:
        """Let the replica take the master's place: with what it has."""
        assert self.replica
        self.restart()
        self._replace(self.replica.contents)

    def lose_everything(self) -> None:
        """Restart empty."""
        self.restart()
        self._replace({})

    def note_disturbed(self) -> None:
        """Take note that calls to it may fail, or take long, at this moment."""
        self.disturbed_at_s = virtual_loop().time()

    @property
    def calm_s(self) -> float:
        """Seconds since it was disturbed last."""
        if not self.is_up or self.lost_replies or self.lost_requests:
            return 0.0
        return virtual_loop().time() - max(self.disturbed_at_s, self.paused_until_s)

    def restart(self) -> None:
        """Break all connections, and forget the scripts; the contents stay."""
        self.note_disturbed()
        self.generation += 1
        self.server.script_cache.clear()

    async def touch(self) -> None:
        """Let keys expire whose time has come."""
        database = self.server.dbs[0]
        database.time = vars(fakeredis._helpers)["time"].time()
        len(database)

    def _replace(self, contents: dict[bytes, Any]) -> None:
        self.contents.clear()
        for key, item in copy.deepcopy(contents).items():
            self.server.dbs[0][key] = item

    def route(self) -> FixedRoute:
        """Return the way to it, as production makes it."""
        pool = ConnectionPool(
            connection_class=SimulatedConnection,
            simulated=self,
            server=self.server,
            version=(7,),
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        return FixedRoute(Node(pool))


@dataclass(slots=True)
class Replica:
    """A copy of a store that lags behind it, and what WAIT says of it."""

    contents: dict[bytes, Any] = field(default_factory=dict)
    num_executed: int = 0
    is_cut_off: bool = False

    def follow(self, store: SimulatedRedis) -> None:
        """Get what the store has now, a little later; nothing that is under way survives a failover."""
        contents, number, generation = copy.deepcopy(store.contents), store.num_executed, store.generation

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


@dataclass(frozen=True, slots=True)
class _Request:
    """A request under way."""

    store: SimulatedRedis
    socket: Any  # of fakeredis, where the answer goes
    generation: int  # of the server that the connection was made with
    data: bytes
    is_answered: bool

    def arrive(self) -> None:
        """Execute it, once the server is not paused."""
        wait_s = self.store.paused_until_s - virtual_loop().time()
        if wait_s > 0:
            virtual_loop().call_later(wait_s, self.arrive, context=outside_of_processes())
        elif not self.store.is_up or self.store.generation != self.generation:
            self.socket.put_response(RedisConnectionError("Connection reset by peer."))
        else:
            self._execute()

    def _execute(self) -> None:
        answer = self.socket.put_response
        if not self.is_answered:
            self.socket.put_response = lambda message: None
        self.socket.sendall(self.data)
        self.socket.put_response = answer
        self.store.num_executed += 1
        if self.store.replica:
            self.store.replica.follow(self.store)
        self.store.on_change(self.store)


class CompilingSocket(AsyncFakeSocket):
    """fakeredis' end of a connection; scripts are compiled once, not at each call."""

    def _get_server_runtime(self, server: FakeServer) -> Any:
        runtime = super()._get_server_runtime(server)
        if not isinstance(runtime, CompilingRuntime):
            runtime = CompilingRuntime(runtime)
            vars(server)["_lua_runtime"] = runtime
        return runtime


class CompilingRuntime:
    """A Lua runtime that compiles what it executes once, and leaves the collection of garbage to Lua."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._compiled: dict[bytes | str, Callable[[], Any]] = {"collectgarbage()": lambda: None}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def execute(self, script: bytes | str) -> Any:
        """Run a script, and return its result."""
        if script not in self._compiled:
            self._compiled[script] = self._runtime.compile(script)
        return self._compiled[script]()


class SimulatedConnection(FakeAsyncRedisConnection):
    """A connection to a simulated Redis."""

    def __init__(self, *args: Any, simulated: SimulatedRedis, **options: Any) -> None:
        super().__init__(*args, **options)
        self._store = simulated
        self._generation = -1

    async def _connect(self) -> None:
        await asyncio.sleep(self._store.delay())
        if not self._store.is_up or not _is_alive():
            raise RedisConnectionError("Connection refused.")
        self._generation = self._store.generation
        self._sock = CompilingSocket(
            self._server,
            self.db,
            client_class=self._client_class,
            lua_modules=self._lua_modules,
            client_info=self._client_info,
        )
        self._reader, self._writer = FakeReader(self._sock), FakeWriter(self._sock)

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Skip the library's greeting, which the simulated server does not need."""

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send a request; it is executed when it arrives."""
        if not self.is_connected:
            await self.connect()  # type: ignore[no-untyped-call]
        if not _is_alive():
            raise RedisConnectionError("Connection closed.")
        store = self._store
        data = command if isinstance(command, bytes) else b"".join(command)
        is_answered = store.random.random() >= store.lost_replies
        request = _Request(store, self._sock, self._generation, data, is_answered)
        if store.random.random() >= store.lost_requests:
            virtual_loop().call_later(store.delay(), request.arrive, context=outside_of_processes())
        await asyncio.sleep(0)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Return the answer, or raise as redis-py does where none comes in time."""
        try:
            async with asyncio.timeout(SOCKET_TIMEOUT_S):
                await asyncio.sleep(self._store.delay())
                reply = await super().read_response(*args, **options)
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise RedisTimeoutError("Timeout reading from socket") from None
        except ResponseError as error:
            if "'wait'" in str(error):
                return await self._wait()
            raise
        if isinstance(reply, RedisConnectionError):
            await self.disconnect(nowait=True)
            raise reply
        return reply

    async def _wait(self) -> int:
        """Answer WAIT, which fakeredis does not know, for all that was executed before it."""
        assert self._store.replica
        generation, number = self._generation, self._store.num_executed
        num_replicas = await self._store.replica.wait(number, WAIT_TIMEOUT_MS / 1000)
        if generation != self._store.generation:
            await self.disconnect(nowait=True)
            raise RedisConnectionError("Connection reset by peer.")
        return num_replicas


def _is_alive() -> bool:
    process = CURRENT.get()
    return process is None or process.is_alive


@contextmanager
def virtual_wall_clock(now_s: Callable[[], float]) -> Iterator[None]:
    """Let keys expire, and leases lapse, by a simulated clock.

    fakeredis reads the clock of its module and has no other way to be given one: this is the one place where a library
    is patched.
    """
    clock = SimpleNamespace(time=lambda: WALL_CLOCK_S + now_s())
    modules: list[Any] = [fakeredis._helpers, fakeredis._socket._base, fakeredis.commands_mixins.server_mixin]
    real = [module.time for module in modules]
    try:
        for module in modules:
            module.time = clock
        yield
    finally:
        for module, time in zip(modules, real, strict=True):
            module.time = time
