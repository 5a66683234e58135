"""The simulation's Redis gives the replies, and has the contents, of a real one after the same calls."""

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from coordinator.sessions import keys
from coordinator.stores.scripts import ScriptText, read_script
from specdec.exact.prefix import chain
from tests.simulation.lua_redis import LuaRedis

SCRIPTS = ("create", "claim", "commit", "heartbeat", "cancel", "lose", "restore", "secret")
LIFETIMES_MS = (1_000_000, 5_000_000)


@pytest.fixture
def real(redis_url: str) -> Any:
    with Redis.from_url(redis_url) as client:
        yield client


class Pair:
    """A real server and the simulated one, which are given the same commands."""

    def __init__(self, real: Any) -> None:
        self.real, self.simulated = real, LuaRedis(time.time)

    def run(self, text: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Run a script on both; fail where their replies differ."""
        script = ScriptText(text)
        assert self.simulated.execute(script.load()) == self.real.script_load(script.load()[2]).encode()
        command = script.call(list(keys), list(arguments))
        real, simulated = self._reply(command), self.simulated.execute(command)
        if isinstance(real, ResponseError):
            assert isinstance(simulated, ResponseError), (command, real, simulated)
        else:
            assert simulated == real, command
        return real

    def _reply(self, command: Sequence[Any]) -> Any:
        try:
            return self.real.execute_command(*command)
        except ResponseError as error:
            return error

    def compare_contents(self) -> None:
        """Fail where they hold other keys, values, or times to live."""
        held = self.simulated.copy()
        assert {key.decode() for key in held} == {key.decode() for key in self.real.keys("*")}
        for key, (value, end_ms) in held.items():
            assert value == (self.real.hgetall(key) if isinstance(value, dict) else self.real.get(key))
            left_ms = self.real.pttl(key)
            assert (left_ms == -1) == (end_ms is None)
            assert end_ms is None or abs(end_ms - 1000 * time.time() - left_ms) < LIFETIMES_MS[0] / 2


class Calls:
    """Draws calls to the store's scripts: mostly some that fit the session, and some that do not."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.length, self.digest, self.epoch = 1, chain(b"", [1]), 0

    def draw(self, name: str) -> tuple[Any, ...]:
        chance, lifetime_ms = self._chance, self._chance.choice(LIFETIMES_MS)
        epoch = chance.choice((self.epoch, self.epoch, self.epoch, self.epoch - 1, self.epoch + 1))
        length = chance.choice((self.length, self.length, self.length, self.length + 1))
        digest = chance.choice((self.digest, self.digest, self.digest, b"\x00\xff other"))
        fields = ("epoch", epoch, "length", length, "digest", digest, "status", "active", "prompt_length", 1)
        tokens = bytes(4 * chance.randrange(1, 4))
        match name:
            case "create":
                return (chance.choice((b"one", b"one", b"other")), lifetime_ms, bytes(4), *fields)
            case "claim":
                return (chance.choice("01"), lifetime_ms, chance.choice(("", "a model")))
            case "commit":
                ending = chance.choice((("active", ""), ("active", ""), ("active", ""), ("finished", "EOS")))
                parts = (b"\x01", chance.choice((b"", b"logprobs")))
                return (epoch, length, digest, chain(digest, tokens), tokens, *parts, lifetime_ms, *ending, b"{}")
            case "heartbeat":
                return (epoch, chance.choice((0, lifetime_ms)), length, digest)
            case "restore":
                return (epoch, length, digest, lifetime_ms, tokens, b"\x01", b"", *fields)
            case "secret":
                return (bytes(16),)
        return ()


@pytest.mark.parametrize("seed", range(4))
def test_any_calls_of_our_scripts_give_the_same(real: Any, seed: int) -> None:
    chance, pair = random.Random(seed), Pair(real)
    calls = Calls(chance)
    outcomes = set[str]()
    for _ in range(150):
        name = chance.choice((*SCRIPTS, "commit", "commit", "create", "claim"))
        names = ["specdec:secret"] if name == "secret" else keys("s")
        reply = pair.run(read_script(name), names, *calls.draw(name))
        outcomes.add(f"{name} {reply[0] if isinstance(reply, list) and reply else reply}"[:24])
        meta = real.hgetall(keys("s")[0])
        if meta:
            calls.epoch, calls.length, calls.digest = int(meta[b"epoch"]), int(meta[b"length"]), meta[b"digest"]
        pair.compare_contents()
        if chance.random() < 0.05:
            real.flushall()
            pair.simulated.replace({})
            calls = Calls(chance)
    assert len(outcomes) > 10, outcomes


@pytest.mark.parametrize(
    "text",
    [
        "return 7.9",
        "return {1, 'two', false, 4}",
        "return {1, nil, 3}",
        "return true",
        "return false",
        "return {{'a', {}}, ARGV[1]}",
        "return redis.call('GET', 'missing')",
        "return redis.call('HMGET', 'missing', 'a', 'b')",
        "return redis.call('SET', KEYS[1], 0.5) and redis.call('GET', KEYS[1])",
        "return redis.call('SET', KEYS[1], 12) and redis.call('INCR', KEYS[1])",
        "redis.call('SET', KEYS[1], 'x') return redis.call('HGET', KEYS[1], 'y')",
        "redis.call('HSET', KEYS[1], 'x', 1) return redis.call('APPEND', KEYS[1], 'y')",
        "redis.call('HSET', KEYS[1], 'x')",
        "redis.call('SET', KEYS[1], 'x') redis.call('PEXPIRE', KEYS[1], 0) return redis.call('EXISTS', KEYS[1])",
        "return redis.call('NOSUCH', KEYS[1])",
        "made_global = 1",
        "return nothing.here",
    ],
)
def test_replies_cross_as_redis_says(real: Any, text: str) -> None:
    pair = Pair(real)
    pair.run(text, ["k"], b"\xff\x00")
    pair.compare_contents()


def test_unknown_scripts_are_refused(real: Any) -> None:
    real.script_flush()
    command = ScriptText("return 1").call(["k"], [])
    with pytest.raises(ResponseError) as error:
        real.execute_command(*command)
    reply = LuaRedis(time.time).execute(command)
    assert (type(reply), str(reply)) == (type(error.value), str(error.value))


def test_keys_expire_by_the_servers_clock() -> None:
    now_s = 100.0
    redis = LuaRedis(lambda: now_s)
    script = ScriptText("redis.call('SET', KEYS[1], 1) redis.call('PEXPIRE', KEYS[1], 2500)")
    redis.execute(script.load())
    redis.execute(script.call(["k"], []))
    now_s = 102.4
    redis.execute(("PING",))
    assert b"k" in redis.values
    now_s = 102.5
    redis.execute(("PING",))
    assert not redis.values
