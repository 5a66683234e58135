"""Channels to a specdec service: message limits, pings, reconnection."""

import re
from dataclasses import dataclass
from ipaddress import ip_address

import grpc

MAX_MESSAGE_BYTES = 16 << 20  # between services, and of an answer
MAX_PROMPT_BYTES = 8 << 20
SLACK_BYTES = 64 << 10  # of a request beside its prompt: the largest sampling parameters take 32 kB
MAX_REQUEST_BYTES = MAX_PROMPT_BYTES + SLACK_BYTES  # that a coordinator can be told to take
# that it takes unless it is told: 128,000 tokens of English text. A server receives a message whole before it can
# refuse it, and has it three times while it is parsed: a crowd makes it hold that for each of its calls
REQUEST_BYTES = (512 << 10) + SLACK_BYTES

MIN_PING_PERIOD_S = 0.25  # a server closes a connection that brings more pings than that


@dataclass(frozen=True, slots=True)
class Pings:
    """How soon one end of a connection notices that the other has stopped, in seconds.

    While calls run, a connection on which nothing has come for `period_s` is pinged; without an answer within
    `timeout_s` it counts as lost. A ping waits behind what is being sent: a slow connection that sends for longer than
    `timeout_s` counts as lost too.
    """

    period_s: float = 0.75
    timeout_s: float = 1.25

    def options(self) -> tuple[tuple[str, int], ...]:
        """Return the options of a channel or a server."""
        timeout_ms = round(1000 * self.timeout_s)
        return (
            ("grpc.keepalive_time_ms", round(1000 * self.period_s)),
            ("grpc.keepalive_timeout_ms", timeout_ms),
            ("grpc.http2.ping_timeout_ms", timeout_ms),  # without it a lost answer is noticed after a minute
            ("grpc.http2.max_pings_without_data", 0),
        )


QUICK_PINGS = Pings()
PATIENT_PINGS = Pings(10.0, 20.0)  # for large messages over slow connections, and where nothing waits for the news
MAX_QUICK_BYTES = 64 << 10  # the largest request to send with quick pings: 51 kB a second carry it in time

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the time limit of one attempt: a busy server is slow to answer
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

IN_TURNS = (("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),)

MAX_PORT = 65_535
# names that gRPC resolves by itself; their forms are grpc's
_RESOLVED = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):")
_PLACES = re.compile(r"(?:dns|ipv4|ipv6):(?://[^/]*/)?(?P<rest>.*)")
_HOST_AND_PORT = re.compile(r"(\[[^\[\]]+\]|[^:/\[\]\s]+):(\d{1,5})")


def address_problem(address: str) -> str | None:
    """Return what is wrong with the address of a server and what would be right, or None."""
    if not isinstance(address, str):
        return f"is {address!r}; give host:port, as 127.0.0.1:50051"
    if place := _HOST_AND_PORT.fullmatch(address):
        return None if int(place[2]) <= MAX_PORT else f"is {address!r}; give a port from 1 to {MAX_PORT}"
    if _RESOLVED.match(address):
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


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    pings: Pings = QUICK_PINGS,
    *,
    spreads_calls: bool = False,
) -> grpc.aio.Channel:
    """Return a channel: with TLS if credentials are given, else in plain text.

    It leads to one of the servers that the address names, or with `spreads_calls` to all of them, in turns.
    """
    options = (*CHANNEL_OPTIONS, *pings.options(), *(IN_TURNS if spreads_calls else ()))
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


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
