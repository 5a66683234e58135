"""A Redis of the few commands that our scripts and client use: bytes and hashes that expire, and Lua itself.

`test_lua_redis.py` holds it to what a real server does: both are given the same scripts and the same checks.
"""

from collections.abc import Callable, Sequence
from hashlib import sha1
from typing import Any, ClassVar

from lupa import lua51
from redis.exceptions import NoScriptError, ResponseError

Value = bytes | dict[bytes, bytes]
Contents = dict[bytes, tuple[Value, float | None]]
"""Values by key, and when they expire: milliseconds of the server's clock."""

PRELUDE = """
function(call)
  redis = {call = call}
  KEYS, ARGV = {}, {}
  setmetatable(_G, {__newindex = function(_, name) error('a script made the global variable ' .. name) end})
  return function(script, keys, arguments)
    KEYS, ARGV = keys, arguments
    return script()
  end
end
"""


class LuaRedis:
    """One server's keys and scripts; every command is executed at once."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._values: dict[bytes, Value] = {}
        self._ends_ms: dict[bytes, float] = {}
        self._scripts: dict[bytes, Any] = {}
        self._lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._run = self._lua.eval(PRELUDE)(self._call)
        self.changed: dict[bytes, None] = {}
        """Keys that were written or removed since the reader of this emptied it, in order."""

    @property
    def values(self) -> dict[bytes, Value]:
        """All keys with their values, for reading; some may have expired since the last command."""
        return self._values

    def execute(self, command: Sequence[Any]) -> Any:
        """Execute one command; return its reply, which may be a ResponseError."""
        self.expire()
        name, *arguments = map(_encoded, command)
        try:
            match name:
                case b"EVALSHA":
                    return self._evaluate(*arguments)
                case b"SCRIPT":
                    return self._load(arguments[1])
                case b"PING":
                    return b"PONG"
                case _:
                    raise ResponseError(f"unknown command '{name.decode()}'")
        except ResponseError as error:
            return error

    def expire(self) -> None:
        """Remove the keys whose time has come."""
        now_ms = 1000 * self._now_s()
        for key in [key for key, end_ms in self._ends_ms.items() if end_ms <= now_ms]:
            self._remove(key)

    def forget_scripts(self) -> None:
        """Do as a restart does."""
        self._scripts.clear()

    def copy(self) -> Contents:
        """Return all keys as they are, which later commands do not change."""
        return {key: (_copied(value), self._ends_ms.get(key)) for key, value in self._values.items()}

    def replace(self, contents: Contents) -> None:
        """Take the place of all keys."""
        self._values = {key: _copied(value) for key, (value, _) in contents.items()}
        self._ends_ms = {key: end_ms for key, (_, end_ms) in contents.items() if end_ms is not None}

    # ---- scripts

    def _load(self, text: bytes) -> bytes:
        name = sha1(text, usedforsecurity=False).hexdigest().encode()
        self._scripts[name] = self._lua.compile(text)
        return name

    def _evaluate(self, name: bytes, num_keys: bytes, *rest: bytes) -> Any:
        script, count = self._scripts.get(name), int(num_keys)
        if script is None:
            raise NoScriptError("No matching script. Please use EVAL.")
        try:
            reply = self._run(script, self._lua.table_from(rest[:count]), self._lua.table_from(rest[count:]))
        except lua51.LuaError as error:
            raise ResponseError(f"{error} script: {name.decode()}") from error
        return _from_lua(reply)

    def _call(self, name: bytes, *arguments: Any) -> Any:
        """Run a command of a script; replies become Lua's as Redis says: nothing is false."""
        try:
            command = self.COMMANDS[name]
        except KeyError:
            raise ResponseError(f"unknown command '{name.decode()}' called from script") from None
        reply = command(self, *map(_encoded, arguments))
        if isinstance(reply, list):
            return self._lua.table_from([False if item is None else item for item in reply])
        return False if reply is None else reply

    # ---- the commands of scripts

    def _get(self, key: bytes) -> bytes | None:
        return self._string(key) if key in self._values else None

    def _set(self, key: bytes, value: bytes) -> bytes:
        self._write(key, value)
        self._ends_ms.pop(key, None)
        return b"OK"

    def _append(self, key: bytes, value: bytes) -> int:
        whole = self._string(key) + value
        self._write(key, whole)
        return len(whole)

    def _strlen(self, key: bytes) -> int:
        return len(self._string(key))

    def _incr(self, key: bytes) -> int:
        number = int(self._string(key) or 0) + 1
        self._write(key, b"%d" % number)
        return number

    def _del(self, *keys: bytes) -> int:
        found = [key for key in dict.fromkeys(keys) if key in self._values]
        for key in found:
            self._remove(key)
        return len(found)

    def _exists(self, *keys: bytes) -> int:
        return sum(key in self._values for key in keys)

    def _pexpire(self, key: bytes, time_ms: bytes) -> int:
        if key not in self._values:
            return 0
        self._ends_ms[key] = 1000 * self._now_s() + int(time_ms)
        self.expire()
        return 1

    def _hget(self, key: bytes, field: bytes) -> bytes | None:
        return self._hash(key).get(field)

    def _hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        found = self._hash(key)
        return [found.get(field) for field in fields]

    def _hgetall(self, key: bytes) -> list[bytes]:
        return [part for entry in self._hash(key).items() for part in entry]

    def _hset(self, key: bytes, *entries: bytes) -> int:
        if not entries or len(entries) % 2:
            raise ResponseError("wrong number of arguments for 'hset' command")
        before = self._hash(key)
        after = before | dict(zip(entries[::2], entries[1::2], strict=True))
        self._write(key, after)
        return len(after) - len(before)

    def _hincrby(self, key: bytes, field: bytes, number: bytes) -> int:
        result = int(self._hget(key, field) or 0) + int(number)
        self._write(key, self._hash(key) | {field: b"%d" % result})
        return result

    COMMANDS: ClassVar[dict[bytes, Callable[..., Any]]] = {
        b"GET": _get,
        b"SET": _set,
        b"APPEND": _append,
        b"STRLEN": _strlen,
        b"INCR": _incr,
        b"DEL": _del,
        b"EXISTS": _exists,
        b"PEXPIRE": _pexpire,
        b"HGET": _hget,
        b"HMGET": _hmget,
        b"HGETALL": _hgetall,
        b"HSET": _hset,
        b"HINCRBY": _hincrby,
    }

    # ---- keys

    def _string(self, key: bytes) -> bytes:
        value = self._values.get(key, b"")
        if isinstance(value, dict):
            raise ResponseError(WRONG_TYPE)
        return value

    def _hash(self, key: bytes) -> dict[bytes, bytes]:
        value = self._values.get(key, {})
        if isinstance(value, bytes):
            raise ResponseError(WRONG_TYPE)
        return value

    def _write(self, key: bytes, value: Value) -> None:
        self._values[key] = value
        self.changed[key] = None

    def _remove(self, key: bytes) -> None:
        del self._values[key]
        self._ends_ms.pop(key, None)
        self.changed[key] = None


WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


def _encoded(argument: Any) -> bytes:
    """Return an argument as it crosses the wire."""
    if isinstance(argument, bytes):
        return argument
    if isinstance(argument, float) and not argument.is_integer():
        return b"%.17g" % argument
    return argument.encode() if isinstance(argument, str) else b"%d" % argument


def _from_lua(reply: Any) -> Any:
    """Return a script's reply as a client gets it."""
    if isinstance(reply, bool):
        return 1 if reply else None
    if isinstance(reply, float):
        return int(reply)
    if lua51.lua_type(reply) != "table":
        return reply
    items = list[Any]()
    while (item := reply[len(items) + 1]) is not None:
        items.append(_from_lua(item))
    return items


def _copied(value: Value) -> Value:
    return dict(value) if isinstance(value, dict) else value
