"""A name server on loopback that knows the names it is given, and remembers what it was asked."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

TYPES = {1: "A", 28: "AAAA"}
NO_ERROR, NO_SUCH_NAME = 0, 3
TIME_TO_LIVE_S = 1
POLL_S = 0.05


@dataclass
class DnsServer:
    """Where it listens; `lookup` gives a name's IPv4 addresses, or None for a name that does not exist."""

    address: str
    port: int
    lookup: Callable[[str], Sequence[str] | None]
    questions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, name: str) -> str:
        """Return the address by which gRPC asks this server for a name and its port."""
        return f"dns://{self.address}:{self.port}/{name}"

    def answer(self, query: bytes) -> bytes:
        """Return the reply to one query: addresses to A, an empty answer to every other type."""
        name, end = _name_at(query, 12)
        kind = struct.unpack_from("!H", query, end)[0]
        self.questions.append((name, TYPES.get(kind, str(kind))))
        addresses = self.lookup(name.lower())
        found = [_record(each) for each in addresses or []] if TYPES.get(kind) == "A" else []
        flags = 0x8580 | (NO_SUCH_NAME if addresses is None else NO_ERROR)  # an authoritative answer
        header = query[:2] + struct.pack("!HHHHH", flags, 1, len(found), 0, 0)
        return header + query[12 : end + 4] + b"".join(found)


@contextmanager
def dns_server(lookup: Callable[[str], Sequence[str] | None], address: str = "127.0.0.1") -> Iterator[DnsServer]:
    """Serve names over UDP."""
    stopping = threading.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind((address, 0))
        listener.settimeout(POLL_S)
        server = DnsServer(address, listener.getsockname()[1], lookup)
        thread = threading.Thread(target=_serve, args=(listener, server, stopping))
        thread.start()
        try:
            yield server
        finally:
            stopping.set()
            thread.join()


def _serve(listener: socket.socket, server: DnsServer, stopping: threading.Event) -> None:
    while not stopping.is_set():
        with suppress(TimeoutError, ConnectionError):  # nothing came, or the last asker has gone
            query, asker = listener.recvfrom(4096)
            listener.sendto(server.answer(query), asker)


def _name_at(message: bytes, start: int) -> tuple[str, int]:
    """Return the name at `start`, without a closing dot, and where it ends."""
    labels = []
    while size := message[start]:
        labels.append(message[start + 1 : start + 1 + size].decode())
        start += 1 + size
    return ".".join(labels), start + 1


def _record(address: str) -> bytes:
    """Return an A record of the name in the question."""
    return struct.pack("!HHHIH", 0xC00C, 1, 1, TIME_TO_LIVE_S, 4) + socket.inet_aton(address)
