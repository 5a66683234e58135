"""The Lua scripts: what each call to the store is."""

from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

Script = Callable[[list[str], list[Any]], Awaitable[Any]]
"""A Lua script, as a function of its keys and arguments. It raises UnavailableError, also for a malformed reply."""

Calls = Sequence[tuple[list[str], list[Any]]]
"""Keys and arguments of calls of one script."""

Scripts = Callable[[Calls], Awaitable[list[Any]]]
"""A Lua script, called for many keys at once. The reply is None where the call failed; nothing is repeated."""

LIBRARY = "lease"  # before every script

# before every script: a write that changes nothing. A replica refuses it, so none gives an answer of its own, which
# may be older than what its master has said
REFUSED_BY_REPLICAS = "redis.call('DEL', table.remove(KEYS))\n"


@cache
def read_script(name: str) -> str:
    """Return the text of `coordinator/<name>.lua`."""
    return (files("coordinator") / f"{name}.lua").read_text()


def absent_key(key: str) -> str:
    """Return a key that never exists, in the same slot of a cluster."""
    tag = key.partition("{")[2].partition("}")[0] or key
    return f"specdec:absent:{{{tag}}}"


class ScriptText:
    """A script's text, its name for EVALSHA, and its commands; `library` has the functions that scripts share."""

    def __init__(self, text: str, library: str = "") -> None:
        self._text = REFUSED_BY_REPLICAS + library + text
        self._sha = sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    def load(self) -> tuple[Any, ...]:
        """Return the command that makes a server know it."""
        return ("SCRIPT", "LOAD", self._text)

    def call(self, keys: list[str], arguments: list[Any]) -> tuple[Any, ...]:
        """Return the command that runs it."""
        return ("EVALSHA", self._sha, len(keys) + 1, *keys, absent_key(keys[0]), *arguments)
