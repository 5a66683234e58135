"""The connection to Redis: bounded, waiting, retried; failures become UnavailableError with one sentence."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import AbstractBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from specdec.errors import UnavailableError
from specdec.outside import REAL, Outside
from specdec.retry import RetryPolicy

SOCKET_TIMEOUT_S = 2.0
NUM_RETRIES = 5
RETRY = RetryPolicy(first_s=0.02, maximum_s=0.5)
MAX_CALLS = 64  # at once, each on its own connection; Redis executes them one by one
KEEPS_ALL = "noeviction"
MAX_WAIT_S = 15.0  # for one of them to end: longer than a call with all of its retries takes


Script = Callable[[list[str], list[Any]], Awaitable[Any]]
"""A Lua script, as a function of its keys and arguments. It raises UnavailableError, also for a malformed reply."""


def read_script(name: str) -> str:
    """Return the text of `coordinator/<name>.lua`."""
    return (files("coordinator") / f"{name}.lua").read_text()


class RedisClient:
    """One Redis, or the embedded one. At most MAX_CALLS calls are under way; more wait for their turn."""

    def __init__(
        self, redis: Redis, max_wait_s: float = MAX_WAIT_S, read_script: Callable[[str], str] = read_script
    ) -> None:
        self.redis = redis
        self._read_script = read_script
        # the pool does not wait: it raises where a connection is missing
        self._turns = asyncio.Semaphore(min(MAX_CALLS, redis.connection_pool.max_connections))
        self._max_wait_s = max_wait_s

    def script(self, name: str, is_reply: Callable[[Any], bool]) -> Script:
        """Return the script `coordinator/<name>.lua`; `is_reply` says whether it could have given a reply."""
        script = self.redis.register_script(self._read_script(name))

        async def run(keys: list[str], arguments: list[Any]) -> Any:
            reply = await self._call(lambda: script(keys=keys, args=arguments))
            if not is_reply(reply):
                raise UnavailableError(f"the session store gave a malformed reply to {name}; try again")
            return reply

        return run

    async def ping(self) -> None:
        """Return once Redis answered. Raises UnavailableError."""
        await self._call(self.redis.ping)

    async def refuse_eviction(self) -> None:
        """Raise ValueError for a Redis that gives up sessions when it is full. Raises UnavailableError."""
        try:
            facts = await self._call(lambda: self.redis.info("memory"))
        except UnavailableError as error:
            if not isinstance(error.__cause__, ResponseError):
                raise
            return  # the embedded one, or one whose rights do not include the question
        policy = str(facts.get("maxmemory_policy", KEEPS_ALL))
        if policy != KEEPS_ALL:
            problem = f"the Redis of --store gives up sessions when it is full (maxmemory-policy {policy})"
            raise ValueError(f"{problem}; set maxmemory-policy {KEEPS_ALL}")

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.aclose()

    async def _call(self, call: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(self._max_wait_s) as waiting, self._turns:
                waiting.reschedule(None)
                return await call()
        except TimeoutError as error:
            raise UnavailableError("the session store is slow, and too many calls wait for it; try again") from error
        except (AuthenticationError, ResponseError) as error:
            message = f"the session store refuses ({error}); see to its address, password and rights"
            raise UnavailableError(message) from error
        except RedisError as error:
            kind = type(error).__name__
            message = f"the session store does not answer ({kind}); what was committed is safe, try again"
            raise UnavailableError(message) from error


class PolicyBackoff(AbstractBackoff):
    """Our retry policy, as a redis-py backoff."""

    def __init__(self, outside: Outside = REAL) -> None:
        self._outside = outside

    def compute(self, failures: int) -> float:
        """Return the pause after so many failures, in seconds."""
        return RETRY.pause_s(failures, 0.0, self._outside.uniform()) or 0.0


class PasswordFile(CredentialProvider):
    """A user's password in a file, read for each connection: it may be replaced."""

    def __init__(self, username: str | None, path: Path) -> None:
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


def open_redis(url: str, password_file: Path | None = None) -> RedisClient:
    """Return a client of the Redis at a URL, or of the embedded one. Raises ValueError for a URL that is wrong."""
    if url == "embedded":
        return RedisClient(_embedded())
    options: dict[str, Any] = {"socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": SOCKET_TIMEOUT_S}
    if password_file is not None:
        url, username = _without_user(url)
        options["credential_provider"] = PasswordFile(username, password_file)
    retry = Retry(PolicyBackoff(), NUM_RETRIES)
    try:
        redis = Redis.from_url(url, retry=retry, **options)
    except ValueError as error:
        raise ValueError(url_problem(url, error)) from None
    _check_options(redis)
    return RedisClient(redis)


def url_problem(url: str, error: Exception) -> str:
    """Return a sentence about a URL that is wrong; a part of a password is not quoted."""
    if "@" not in url:
        return f"--store is no address of a Redis: {error}"
    return "--store is no address of a Redis; in a user's name or password write / as %2F, @ as %40, : as %3A, % as %25"


def _without_user(url: str) -> tuple[str, str | None]:
    """Return the URL without its user, and the user's name. Raises ValueError if it has a password too."""
    parts = urlsplit(url)
    if parts.password is not None:
        raise ValueError("--store has a password, and --store-password-file too; give one of them")
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])), unquote(parts.username or "") or None


def _embedded() -> Redis:
    """Return a Redis in this process. Raises ValueError where its package is not installed."""
    try:
        import fakeredis
    except ModuleNotFoundError:
        remedy = "pip install 'specdec[embedded]', or give --store redis://..."
        raise ValueError(f"--store embedded needs the package fakeredis; {remedy}") from None
    redis: Redis = fakeredis.FakeAsyncRedis()
    return redis


def _check_options(redis: Redis) -> None:
    """Raise ValueError for options of a URL that redis-py would refuse only when it connects."""
    try:
        redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except TypeError as error:
        option = str(error).rpartition(" ")[2]  # "...__init__() got an unexpected keyword argument 'wrong'"
        raise ValueError(f"--store has an option that Redis clients do not know: {option}; leave it out") from None
    except RedisError as error:
        raise ValueError(f"--store has a wrong option: {error}") from None
