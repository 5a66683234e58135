"""From the name of the workers to the address of each."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence

Resolve = Callable[[], Awaitable[Sequence[str]]]
"""Returns the addresses of the moment, each for a channel of its own. Raises OSError for a name that is not found."""

_LISTED = re.compile(r"(ipv4|ipv6):(?!//)(.+)")
_NAMED = re.compile(r"(?:dns:(?:///)?)?(?P<host>\[[^\[\]]+\]|[^:/\[\]\s]+)(?::(?P<port>\d{1,5}))?")
DEFAULT_PORT = "443"  # grpc's


def resolver(name: str) -> Resolve:
    """Return how to find the workers at host:port, dns:///host:port, ipv4:... or ipv6:...

    Any other name is left to grpc, as one address.
    """
    if listed := _LISTED.fullmatch(name):
        scheme, addresses = listed.groups()
        return _always([f"{scheme}:{address}" for address in addresses.split(",")])
    if named := _NAMED.fullmatch(name):
        return _looked_up(named["host"].strip("[]"), named["port"] or DEFAULT_PORT)
    return _always([name])


def _always(addresses: list[str]) -> Resolve:
    async def resolve() -> Sequence[str]:
        return addresses

    return resolve


def _looked_up(host: str, port: str) -> Resolve:
    async def resolve() -> Sequence[str]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return sorted({_address(family, *place[:2]) for family, _, _, _, place in found})

    return resolve


def _address(family: int, host: object, port: object) -> str:
    return f"ipv6:[{host}]:{port}" if family == socket.AF_INET6 else f"ipv4:{host}:{port}"


def host_of(name: str) -> str | None:
    """Return the host that certificates of workers at this name should be for; None where the name has none."""
    named = _NAMED.fullmatch(name)
    return named["host"].strip("[]").rstrip(".") if named else None
