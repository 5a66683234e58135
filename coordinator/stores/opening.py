"""A store's client from its address."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from redis.asyncio import ConnectionPool
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError

from coordinator.stores.client import PATIENCE_S, RedisClient
from coordinator.stores.cluster import ClusterRoute
from coordinator.stores.node import Node, options
from coordinator.stores.routes import FixedRoute, Route
from coordinator.stores.sentinel import SentinelRoute
from specdec.serving.store_url import QUOTING, StoreUrl

NO_LOGIN: Mapping[str, Any] = MappingProxyType({})


class PasswordFile(CredentialProvider):
    """A user's password in a file, read for each connection: it may be replaced."""

    def __init__(self, username: str, path: Path) -> None:
        self._username, self._path = username, path
        self._password()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the password, with the user's name if there is one."""
        return (self._username, self._password()) if self._username else (self._password(),)

    def _password(self) -> str:
        try:
            return self._path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise ValueError(f"--store-password-file {self._path} cannot be read ({reason})") from None


def open_redis(
    url: str, password_file: Path | None = None, *, num_replicas: int = 0, patience_s: float = PATIENCE_S
) -> RedisClient:
    """Return a client of the Redis at an address, or of one in this process ("memory").

    Raises ValueError for an address that is wrong.
    """
    route = FixedRoute(Node(memory_pool())) if url == "memory" else _route(StoreUrl.parse(url), password_file)
    return RedisClient(route, num_replicas=num_replicas, patience_s=patience_s)


def memory_pool() -> ConnectionPool:
    """Return connections to a Redis in this process. Raises ValueError where its package is not installed."""
    try:
        import fakeredis
    except ModuleNotFoundError:
        remedy = "install redis-server, pip install 'specdec[embedded]', or give --store redis://..."
        raise ValueError(f"a store in this process needs the package fakeredis; {remedy}") from None
    pool: ConnectionPool = fakeredis.FakeAsyncRedis().connection_pool
    return pool


def _route(url: StoreUrl, password_file: Path | None) -> Route:
    login = _login(url, password_file)

    def node_at(place: tuple[str, int] | None) -> Node:
        return Node(server_pool(url.node(place, login=not login), login))

    if url.kind == "sentinel":
        node_at(url.places[0])  # options that are wrong are found now
        sentinels = [Node(server_pool(url.sentinel(place))) for place in url.places]
        return SentinelRoute(url.service, sentinels, node_at)
    if url.kind == "cluster":
        node_at(url.places[0])
        return ClusterRoute(url.places, node_at)
    return FixedRoute(node_at(None))


def _login(url: StoreUrl, password_file: Path | None) -> Mapping[str, Any]:
    """Return how connections log in, unless the address says it. Raises ValueError for two passwords."""
    if password_file is None:
        return NO_LOGIN
    if url.has_password:
        raise ValueError("--store has a password, and --store-password-file too; give one of them")
    return {"credential_provider": PasswordFile(url.username, password_file)}


def server_pool(url: str, login: Mapping[str, Any] = NO_LOGIN) -> ConnectionPool:
    """Return connections to one server. Raises ValueError for options that redis-py would refuse only at the first."""
    try:
        pool = ConnectionPool.from_url(url, **options(), **login)
    except ValueError as error:
        # redis-py's own sentence may quote a part of a password
        raise ValueError(f"--store is no address of a Redis: {QUOTING if '@' in url else error}") from None
    try:
        pool.make_connection()  # type: ignore[no-untyped-call]
    except TypeError as error:
        option = str(error).rpartition(" ")[2]  # "...__init__() got an unexpected keyword argument 'wrong'"
        raise ValueError(f"--store has an option that Redis clients do not know: {option}; leave it out") from None
    except RedisError as error:
        raise ValueError(f"--store has a wrong option: {error}") from None
    return pool
