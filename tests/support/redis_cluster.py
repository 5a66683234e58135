"""A Redis Cluster of three masters, each with a replica where asked for: real processes on loopback."""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import redis

from tests.support.redis_sentinel import wait_until
from tests.support.redis_server import RedisServer, executable

NUM_MASTERS = 3
NODE_TIMEOUT_MS = 1000


class RunningCluster:
    """The servers of a cluster."""

    def __init__(self, servers: list[RedisServer]) -> None:
        self.servers = servers

    @property
    def url(self) -> str:
        """Return the store's address; two nodes of it, the others are to be found."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{server.port}' for server in self.servers[:2])}"

    def holder(self, key: str) -> RedisServer:
        """Return the master of a key's slot, as most nodes have it."""
        ports = [port for port in (self._port_of(server, key) for server in self.servers) if port]
        port = max(set(ports), key=ports.count)
        return next(server for server in self.servers if server.port == port)

    def num_keys(self) -> list[int]:
        """Return the number of keys at each server."""
        counts = []
        for server in self.servers:
            with server.client() as client:
                counts.append(client.dbsize())
        return counts

    def begin_moving(self, key: str, to: RedisServer) -> Callable[[], None]:
        """Begin to move a key's slot, with its keys, to another master; return what ends it."""
        origin = self.holder(key)
        with origin.client() as source, to.client() as target:
            slot = source.execute_command("CLUSTER KEYSLOT", key)
            target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source.execute_command("CLUSTER MYID"))
            source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target.execute_command("CLUSTER MYID"))
            if keys := source.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                source.execute_command("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys)

        def end() -> None:
            with to.client() as target:
                slot = target.execute_command("CLUSTER KEYSLOT", key)
                owner = target.execute_command("CLUSTER MYID")
                for server in (to, origin):
                    with server.client() as client:
                        client.execute_command("CLUSTER SETSLOT", slot, "NODE", owner)

        return end

    @staticmethod
    def _port_of(server: RedisServer, key: str) -> int:
        with suppress(redis.RedisError), server.client() as client:
            slot = client.execute_command("CLUSTER KEYSLOT", key)
            for first, last, master, *_ in client.execute_command("CLUSTER SLOTS"):
                if first <= slot <= last:
                    return int(master[1])
        return 0


@contextmanager
def running_cluster(num_replicas: int = 0) -> Iterator[RunningCluster]:
    """Run a cluster; yield once all of its slots are served."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-cluster-")))
        servers = [_server(root / str(n), stack) for n in range(NUM_MASTERS * (1 + num_replicas))]
        command = [executable().replace("redis-server", "redis-cli"), "--cluster", "create"]
        command += [f"127.0.0.1:{server.port}" for server in servers]
        command += ["--cluster-replicas", str(num_replicas), "--cluster-yes"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        cluster = RunningCluster(servers)
        wait_until(lambda: all(_is_ok(server) for server in servers))
        yield cluster


def _is_ok(server: RedisServer) -> bool:
    with suppress(redis.RedisError), server.client() as client:
        facts = client.execute_command("CLUSTER INFO")
        nodes = client.execute_command("CLUSTER NODES")
        text = str(facts)
        return "ok" in text and "fail" not in str(nodes) and "cluster_state" in text
    return False


def _server(folder: Path, stack: ExitStack) -> RedisServer:
    folder.mkdir()
    for _ in range(20):
        server = RedisServer(
            folder, append_only=False, cluster_enabled="yes", cluster_node_timeout=NODE_TIMEOUT_MS,
            repl_diskless_sync_delay=0, cluster_require_full_coverage="no",
        )  # fmt: skip
        if server.port < 55_536:  # the bus is 10,000 ports above
            break
        time.sleep(0)
    server.start()
    stack.callback(server.kill)
    return server
