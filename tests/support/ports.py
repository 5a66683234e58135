"""Free ports for the servers that tests start."""

import random
import socket
from contextlib import ExitStack

# Below the ports that a system gives to outgoing connections (from 32,768 on Linux): none of those can take a
# port between the moment it is found free and the moment its server binds it.
FIRST, LAST = 10_000, 20_000
CLUSTER_BUS = 10_000  # a node of a Redis Cluster also listens this much higher


def free_port() -> int:
    """Return a free port of loopback, whose port for a cluster's bus is free too."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Return the first of so many free ports in a row."""
    while True:
        first = random.SystemRandom().randrange(FIRST, LAST - count)
        if _are_free([port + offset for port in range(first, first + count) for offset in (0, CLUSTER_BUS)]):
            return first


def _are_free(ports: list[int]) -> bool:
    with ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
