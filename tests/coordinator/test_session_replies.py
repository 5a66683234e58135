"""What the session store makes of replies and URLs that are wrong."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from coordinator.session_record import LogEnd
from coordinator.sessions import SessionStore, open_store
from coordinator.stores.client import RedisClient
from coordinator.stores.node import Command, Node
from coordinator.stores.opening import memory_pool
from coordinator.stores.routes import FixedRoute
from specdec.errors import UnavailableError
from tests.support.stored_sessions import PROMPT, SESSION, TTL_S, commit, create, round_after


class Replying(Node):
    """A server that always says the same."""

    def __init__(self, reply: object) -> None:
        super().__init__(memory_pool())
        self._reply = reply

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        if isinstance(self._reply, RedisError) and not isinstance(self._reply, ResponseError):
            raise self._reply
        return [self._reply for _ in commands]


@pytest.mark.parametrize(
    "error",
    [
        ResponseError("DB index is out of range"),
        AuthenticationError("wrong password"),
        NoPermissionError("no permissions to run evalsha"),
    ],
)
async def test_refusals_of_redis_are_quoted(error: Exception) -> None:
    with pytest.raises(UnavailableError, match=f"the session store refuses .{error}.; see to its address, password"):
        await RedisClient(FixedRoute(Replying(error))).ping()


CALLS: dict[str, Callable[[SessionStore], Awaitable[object]]] = {
    "create": create,
    "commit": lambda store: commit(store, 1, round_after(PROMPT, (1,))),
    "heartbeat": lambda store: store.heartbeat(SESSION, 1, 1, b""),
    "cancel": lambda store: store.cancel(SESSION),
    "claim": lambda store: store.claim(SESSION),
    "tail": lambda store: store.tail(SESSION, LogEnd(1, b"", 0)),
}
MALFORMED = [None, 1, b"OK", [], [b"committed", b"1"], [None], [b"fenced"], [[b"committed"]], [b"", b"", b"", b"", 2]]
NO_SESSION: list[tuple[str, object]] = [("cancel", None), ("claim", []), ("tail", [])]  # these replies mean it


def store_that_replies(reply: object) -> SessionStore:
    return SessionStore(RedisClient(FixedRoute(Replying(reply))), TTL_S)


@pytest.mark.parametrize(
    ("name", "reply"), [(name, reply) for name in CALLS for reply in MALFORMED if (name, reply) not in NO_SESSION]
)
async def test_malformed_replies_are_unavailable(name: str, reply: object) -> None:
    with pytest.raises(UnavailableError, match=f"malformed reply to {name}"):
        await CALLS[name](store_that_replies(reply))


@pytest.mark.parametrize("fields", [[], [b"epoch"], [b"prompt_length", b"x"]])
async def test_unreadable_sessions_are_unavailable(fields: list[bytes]) -> None:
    with pytest.raises(UnavailableError, match="malformed session"):
        await store_that_replies([fields, b"", b"", b"", 0]).read(SESSION)


async def test_urls_that_redis_rejects_are_refused() -> None:
    with pytest.raises(ValueError, match="give embedded, redis://"):
        open_store("http://127.0.0.1", TTL_S)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h/0?wrong=1", "option that Redis clients do not know: 'wrong'"),
        ("rediss://h/0?ssl_cert_reqs=perhaps", "wrong option.*perhaps"),
    ],
)
async def test_wrong_options_in_a_url_are_named(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_store(url, TTL_S)
