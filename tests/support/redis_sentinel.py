"""A Redis with replicas, and Sentinels that watch over it: real processes on loopback."""

import math
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import redis

from tests.support.ports import free_port
from tests.support.redis_server import RedisServer, executable

SERVICE = "mymaster"
NUM_REPLICAS, NUM_SENTINELS = 2, 3
DOWN_AFTER_MS = 600
ASK_AGAIN_S = 10.0
STATE_TIMEOUT_S = 120.0  # a busy machine makes Sentinels give a failover up, and begin again


class Failover:
    """The servers, the master among them, and the Sentinels' ports."""

    def __init__(self, servers: list[RedisServer], sentinel_ports: list[int]) -> None:
        self.servers = servers
        self.sentinel_ports = sentinel_ports

    @property
    def url(self) -> str:
        """Return the store's address."""
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.sentinel_ports)}/{SERVICE}/0"

    @property
    def master(self) -> RedisServer:
        """Return the server that most Sentinels call the master."""
        named = [self._named_by(port) for port in self.sentinel_ports]
        return max(self.servers, key=lambda server: named.count(server.port))

    @property
    def replicas(self) -> list[RedisServer]:
        """Return the other servers."""
        master = self.master
        return [server for server in self.servers if server is not master]

    def fail_over(self) -> None:
        """Ask a Sentinel for a failover, and wait for it: the former master is demoted, not killed."""
        former, asked_s = self.master, -math.inf

        def has_moved() -> bool:
            nonlocal asked_s
            if time.monotonic() > asked_s + ASK_AGAIN_S and _accepts(sentinel):  # it gives up on a busy machine
                asked_s = time.monotonic()
            return self.master is not former

        with redis.Redis(port=self.sentinel_ports[0]) as sentinel:
            wait_until(has_moved)

    def await_master_other_than(self, former: RedisServer) -> None:
        """Wait until the Sentinels have promoted another server."""
        wait_until(lambda: self.master is not former)

    def await_replicas(self, count: int = NUM_REPLICAS) -> None:
        """Wait until the master has so many replicas that are in step, and the Sentinels know of all."""
        wait_until(lambda: self._num_in_step() >= count)
        wait_until(lambda: all(self._num_known(port) == NUM_REPLICAS for port in self.sentinel_ports))

    def described(self) -> str:
        """Return who replicates whom, and whom each Sentinel calls the master: for a test that waits in vain."""
        lines = [f"{server.port}: {_role(server)}" for server in self.servers]
        return "\n".join([*lines, *(f"Sentinel {port}: {self._named_by(port)}" for port in self.sentinel_ports)])

    def _num_in_step(self) -> int:
        with suppress(redis.RedisError), self.master.client() as client:
            facts = client.info("replication")
            if facts["role"] == "master":
                return sum(facts[f"slave{n}"]["state"] == "online" for n in range(facts["connected_slaves"]))
        return 0

    def _named_by(self, sentinel_port: int) -> int:
        with redis.Redis(port=sentinel_port) as sentinel:
            return int(sentinel.sentinel_get_master_addr_by_name(SERVICE)[1])

    def _num_known(self, sentinel_port: int) -> int:
        with suppress(redis.RedisError), redis.Redis(port=sentinel_port) as sentinel:
            master = sentinel.sentinel_master(SERVICE)
            num_others = master["num-other-sentinels"]
            return int(master["num-slaves"]) if num_others == NUM_SENTINELS - 1 else 0
        return 0


def _role(server: RedisServer) -> str:
    if not server.is_running:
        return "does not run"
    try:
        with server.client() as client:
            return f"{client.info('replication')}, {client.acl_getuser('default')['commands']}"
    except redis.RedisError as error:
        return str(error)


def _accepts(sentinel: "redis.Redis") -> bool:
    with suppress(redis.ResponseError):
        return bool(sentinel.sentinel_failover(SERVICE))
    return False


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for a state."""
    deadline = time.monotonic() + STATE_TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, "the state did not come"
        time.sleep(0.02)


@contextmanager
def running_failover(**settings: object) -> Iterator[Failover]:
    """Run a master, its replicas and the Sentinels; yield once all know each other. `settings` are the servers'.

    All have append-only files: else a killed master comes back empty, and a replica still set to it copies that.
    """
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-sentinel-")))
        master = _server(root / "0", stack, settings)
        replicating = {"replicaof": f"127.0.0.1 {master.port}"} | settings
        replicas = [_server(root / str(number + 1), stack, replicating) for number in range(NUM_REPLICAS)]
        ports = [_sentinel(root / f"sentinel{number}", master.port, stack) for number in range(NUM_SENTINELS)]
        failover = Failover([master, *replicas], ports)
        failover.await_replicas()
        yield failover


def _server(folder: Path, stack: ExitStack, settings: dict[str, object]) -> RedisServer:
    folder.mkdir()
    usual = {"repl_diskless_sync": "yes", "repl_diskless_sync_delay": 0, "enable_debug_command": "yes"}
    server = RedisServer(folder, append_only=True, **usual, **settings)
    server.start()
    stack.callback(server.kill)
    return server


def _sentinel(folder: Path, master_port: int, stack: ExitStack) -> int:
    folder.mkdir()
    port = free_port()
    lines = [
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nloglevel warning",
        f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} 2",
        f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
        f"sentinel failover-timeout {SERVICE} 4000",
    ]
    file = folder / "sentinel.conf"
    file.write_text("\n".join(lines) + "\n")
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen([executable(), str(file), "--sentinel"], stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.send_signal, signal.SIGKILL)
    return port
