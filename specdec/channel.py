"""Channels to a specdec service: message limits, keepalive, reconnection."""

import re
from ipaddress import ip_address

import grpc

MAX_MESSAGE_BYTES = 16 << 20  # between services, and of an answer
MAX_PROMPT_BYTES = 8 << 20
MAX_REQUEST_BYTES = MAX_PROMPT_BYTES + (64 << 10)  # the largest sampling parameters take 32 kB

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

# the option is also the time limit of one attempt to connect: a busy server needs more than 100 ms to answer
CLIENT_OPTIONS = tuple((dict(CHANNEL_OPTIONS) | {"grpc.min_reconnect_backoff_ms": 5_000}).items())

# names that gRPC resolves by itself; their forms are grpc's
_RESOLVED = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):")
_PLACES = re.compile(r"(?:dns|ipv4|ipv6):(?://[^/]*/)?(?P<rest>.*)")
_HOST_AND_PORT = re.compile(r"(\[[^\[\]]+\]|[^:/\[\]\s]+):(\d{1,5})")


def address_problem(address: str) -> str | None:
    """Return what is wrong with the address of a server and what would be right, or None."""
    if not isinstance(address, str):
        return f"is {address!r}; give host:port, as 127.0.0.1:50051"
    if _HOST_AND_PORT.fullmatch(address) or (_RESOLVED.match(address)):
        return None
    scheme, found, rest = address.partition("://")
    if found:
        return f"is {address!r}; give host:port without {scheme}://, as {_example(rest)}"
    return f"is {address!r}; give host:port, as {_example(address)}"


def _example(host: str) -> str:
    """Return an address with what can be used of a wrong one."""
    if _HOST_AND_PORT.fullmatch(place := host.split("/")[0]):
        return place
    return f"{place}:50051" if re.fullmatch(r"[\w.-]+", place) else "127.0.0.1:50051"


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """Return a channel to one server: with TLS if credentials are given, else in plain text."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=CLIENT_OPTIONS)


def is_loopback(address: str) -> bool:
    """Return whether an address stays on this machine: a host, with or without port, or what grpc resolves."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    found = _PLACES.fullmatch(address)
    places = found["rest"].split(",") if found else [address]
    return all(_is_loopback_host(_host(place)) for place in places)


def _host(place: str) -> str:
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.rpartition(":")[0] if place.count(":") == 1 else place


def _is_loopback_host(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
