"""The address of a session store: one Redis, Sentinels that know the master, or the nodes of a cluster.

    redis://USER:PASSWORD@HOST:PORT/DB                          one Redis; unix:///PATH by a socket
    redis+sentinel://USER:PASSWORD@HOST:PORT,HOST/SERVICE/DB    Sentinels, and the name that they know the master by
    redis+cluster://USER:PASSWORD@HOST:PORT,HOST                some of the nodes; the others are learned from them

rediss://, rediss+sentinel:// and rediss+cluster:// are with TLS on every connection. Sentinels have a login of their
own: ?sentinel_username=USER&sentinel_password=PASSWORD. Other options of the query are redis-py's.
"""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode

from specdec.channel import is_loopback

Kind = Literal["single", "sentinel", "cluster"]
Place = tuple[str, int]

OWN_STORES = ("embedded", "memory")  # run by the coordinator, not at an address
FORMS = "embedded, redis://HOST:PORT/0, rediss://... (TLS), redis+sentinel://..., redis+cluster://... or unix:///PATH"
SENTINEL_PORT, REDIS_PORT = 26379, 6379
QUOTING = "in a user's name or password write / as %2F, @ as %40, : as %3A, % as %25"
_SCHEME = re.compile(r"(rediss?)(?:\+(sentinel|cluster))?|unix", re.IGNORECASE)
_PLACE = re.compile(r"(\[[^\]]+\]|[^:\[\]]*)(?::(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A store's address in parts; user, path and query as they were written."""

    kind: Kind
    scheme: str  # redis, rediss or unix
    user: str  # with password; empty: none
    places: tuple[Place, ...]  # host and port of each node; none of a socket
    path: str
    query: str

    @classmethod
    def parse(cls, url: str) -> "StoreUrl":
        """Return the parts of an address. Raises ValueError, without any part of a password."""
        scheme, separator, rest = url.partition("://")
        found = _SCHEME.fullmatch(scheme)
        if not separator or not found:
            shown = f"{scheme}://..." if separator and "@" in url else url  # what precedes an @ may be a password
            raise ValueError(f"--store is {shown!r}; give {FORMS}")
        kind: Kind = "sentinel" if found[2] == "sentinel" else "cluster" if found[2] == "cluster" else "single"
        rest, _, query = rest.partition("?")
        authority, slash, path = rest.partition("/")
        user, _, hosts = authority.rpartition("@")
        if "@" in path or ("@" in query and "@" not in authority):  # of a user's name or password
            raise ValueError(f"--store is no address of a Redis; {QUOTING}")
        plain = (found[1] or "unix").lower()
        port = SENTINEL_PORT if kind == "sentinel" else REDIS_PORT
        places = () if plain == "unix" else tuple(_place(place, port) for place in hosts.split(","))
        address = cls(kind, plain, user, places, slash + path, query)
        address._check()
        return address

    @property
    def service(self) -> str:
        """Return the name by which Sentinels know the master."""
        return unquote(self.path.split("/")[1]) if self.path else ""

    @property
    def database(self) -> str:
        """Return the number of the database, as a path."""
        return "/".join(self.path.split("/")[2:]) if self.kind == "sentinel" else self.path.lstrip("/")

    @property
    def has_password(self) -> bool:
        """Return whether the address holds a password."""
        return ":" in self.user

    @property
    def username(self) -> str:
        """Return the user's name; empty: the default user."""
        return unquote(self.user.partition(":")[0])

    @property
    def is_exposed(self) -> bool:
        """Return whether what is said to it can be read and changed by others: plain text to another machine."""
        return self.scheme == "redis" and not all(is_loopback(host) for host, _ in self.places)

    @property
    def shown(self) -> str:
        """Return where it is, for people."""
        return ", ".join(f"{host}:{port}" for host, port in self.places) or self.path

    def node(self, place: Place | None = None, *, login: bool = True) -> str:
        """Return redis-py's address of a node that keeps sessions, with or without its user."""
        user = f"{self.user}@" if login and self.user else ""
        options = [(name, value) for name, value in self._options() if not name.startswith("sentinel_")]
        return self._with(user, place, f"/{self.database}", options)

    def sentinel(self, place: Place) -> str:
        """Return redis-py's address of a Sentinel: options of TLS are the same as of the nodes."""
        options = dict(self._options())
        name, password = options.get("sentinel_username", ""), options.get("sentinel_password", "")
        user = f"{quote(name, safe='')}:{quote(password, safe='')}@" if password else ""
        return self._with(user, place, "", [item for item in options.items() if item[0].startswith("ssl_")])

    def _with(self, user: str, place: Place | None, path: str, options: list[tuple[str, str]]) -> str:
        query = f"?{urlencode(options)}" if options else ""
        if self.scheme == "unix":
            return f"unix://{user}{self.path}{query}"
        host, port = place or self.places[0]
        return f"{self.scheme}://{user}{f'[{host}]' if ':' in host else host}:{port}{path}{query}"

    def _options(self) -> list[tuple[str, str]]:
        return parse_qsl(self.query, keep_blank_values=True)

    def _check(self) -> None:
        if self.kind == "single" and len(self.places) > 1:
            raise ValueError("--store names several hosts; give redis+sentinel://... or redis+cluster://...")
        if self.kind == "sentinel" and not self.service:
            raise ValueError("--store names no service; give redis+sentinel://HOST:26379/SERVICE/0, such as mymaster")
        if self.scheme != "unix" and not re.fullmatch(r"\d*", self.database):
            raise ValueError(f"--store names a database that is no number; {QUOTING}")
        if self.kind == "cluster" and self.database not in ("", "0"):
            raise ValueError("--store names a database, and a Redis Cluster has only 0; leave it out")


def _place(text: str, default_port: int) -> Place:
    found = _PLACE.fullmatch(text)
    port = int(found[2] or default_port) if found else 0
    if not found or not 0 < port < 65536:
        raise ValueError(f"--store has a wrong host or port; give HOST:PORT, and {QUOTING}")
    return found[1].strip("[]") or "localhost", port
