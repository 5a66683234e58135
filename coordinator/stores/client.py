"""Calls to the store: repeated until they succeed or patience ends; failures become UnavailableError with one sentence.

Scripts recognise their own replay, so that an attempt whose outcome is unknown may be repeated, also at another server.
Where replicas are asked for, WAIT follows each script on its connection, and a call that too few replicas have counts
as failed: it is repeated, recognised, and waited for again. Nothing that a failover may take back is ever shown.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from weakref import WeakSet

from redis.exceptions import MovedError, NoScriptError, RedisError, ResponseError

from coordinator import metrics
from coordinator.stores.batches import execute_once
from coordinator.stores.errors import TooFewReplicas, is_refusal, sentence
from coordinator.stores.node import Command, Node
from coordinator.stores.routes import Route
from coordinator.stores.scripts import LIBRARY, Calls, Script, Scripts, ScriptText, read_script
from specdec.errors import UnavailableError
from specdec.outside import REAL, Outside
from specdec.retry import RetryPolicy

PATIENCE_S = 30.0  # most failovers are over by then
WAIT_TIMEOUT_MS = 1000  # below the connection's own time-out
MAX_REDIRECTIONS = 5  # in a row, without a pause
RETRY = RetryPolicy(first_s=0.02, maximum_s=0.4)
KEEPS_ALL = "noeviction"
Answer = TypeVar("Answer")


class RedisClient:
    """A store's Redis, by its route. `num_replicas` must have a call before it counts."""

    def __init__(
        self,
        route: Route,
        *,
        num_replicas: int = 0,
        patience_s: float = PATIENCE_S,
        outside: Outside = REAL,
        read_script: Callable[[str], str] = read_script,
    ) -> None:
        self.route = route
        self._num_replicas, self._patience_s = num_replicas, patience_s
        self._outside, self._read_script = outside, read_script
        self._broken_at_s = -math.inf
        self._met = WeakSet[Node]()

    @property
    def unbroken_s(self) -> float:
        """Seconds since a connection was last found broken, or a master new.

        A Redis that went back in time leaves its connections broken.
        """
        return self._outside.now_s() - self._broken_at_s

    def _meet(self, node: Node) -> None:
        """Hear of a server's broken connections; another master than before may lack what that one had."""
        if node in self._met:
            return
        if self._met:
            self._note_break()
        self._met.add(node)
        node.on_break = self._note_break

    def _note_break(self) -> None:
        metrics.NUM_STORE_BREAKS.inc()
        self._broken_at_s = self._outside.now_s()

    def script(self, name: str, is_reply: Callable[[Any], bool]) -> Script:
        """Return the script `coordinator/<name>.lua`; `is_reply` says whether it could have given a reply."""
        text = self._text(name)

        async def run(keys: list[str], arguments: list[Any]) -> Any:
            begin_s = self._outside.now_s()
            try:
                reply = await self._call(keys[0], text.call(keys, arguments), text)
            finally:
                metrics.observe_store_call(name, self._outside.now_s() - begin_s)
            if not is_reply(reply):
                raise UnavailableError(f"the session store gave a malformed reply to {name}; try again")
            return reply

        return run

    def script_for_many(self, name: str, is_reply: Callable[[Any], bool]) -> Scripts:
        """Return the same for many keys at once: one message to each server, sent once."""
        text = self._text(name)

        async def run(calls: Calls) -> list[Any]:
            replies = await execute_once(self.route, text, calls)
            return [reply if is_reply(reply) else None for reply in replies]

        return run

    def _text(self, name: str) -> ScriptText:
        return ScriptText(self._read_script(name), self._read_script(LIBRARY))

    async def ping(self) -> None:
        """Return once Redis answered. Raises UnavailableError."""
        await self._repeated(lambda: self._attempt("", ("PING",), None))

    async def refuse_eviction(self) -> bool:
        """Raise ValueError for a Redis that gives up sessions when it is full; return whether it could be asked.

        Raises UnavailableError.
        """
        policies = await self._repeated(self._policies)
        for policy in policies:
            if policy not in (None, KEEPS_ALL):
                problem = f"the Redis of --store gives up sessions when it is full (maxmemory-policy {policy})"
                raise ValueError(f"{problem}; set maxmemory-policy {KEEPS_ALL}")
        return None not in policies

    async def close(self) -> None:
        """Close the connections."""
        await self.route.close()

    async def _policies(self) -> list[str | None]:
        """Return what each server does when it is full; None where it may not be asked. Raises RedisError."""
        return [await self._policy(node) for node in await self.route.nodes()]

    async def _policy(self, node: Node) -> str | None:
        try:
            [reply] = await node.execute([("INFO", "memory")])
        except OSError as error:
            raise _redis_error(error) from error
        if not isinstance(reply, bytes | str):
            return None  # the one in this process, or one whose user may not ask
        text = reply.decode() if isinstance(reply, bytes) else reply
        facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return facts.get("maxmemory_policy", KEEPS_ALL)

    async def _call(self, key: str, command: Command, script: ScriptText) -> Any:
        return await self._repeated(lambda: self._attempt(key, command, script))

    async def _repeated(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """Repeat attempts until one succeeds. Raises UnavailableError."""
        began_s, num_failures, num_redirections = self._outside.now_s(), 0, 0
        while True:
            try:
                return await attempt()
            except _Redirected as redirected:
                num_redirections += 1
                if num_redirections <= MAX_REDIRECTIONS:
                    continue
                error: RedisError = redirected.error
            except RedisError as failure:
                error = failure
            num_failures, num_redirections = num_failures + 1, 0
            left_s = self._patience_s - (self._outside.now_s() - began_s)
            if is_refusal(error) or left_s <= 0:
                raise UnavailableError(sentence(error)) from error
            metrics.NUM_STORE_RETRIES.inc()
            pause_s = RETRY.pause_s(num_failures, 0.0, self._outside.uniform()) or 0.0
            await asyncio.sleep(min(pause_s, left_s))

    async def _attempt(self, key: str, command: Command, script: ScriptText | None) -> Any:
        """Execute a command once, at the server that is the key's master now. Raises RedisError, _Redirected."""
        node = await self.route.find(key)
        self._meet(node)
        try:
            await self._take_turn(node)
            try:
                return await self._execute(node, command, script)
            finally:
                node.turns.release()
        except (RedisError, OSError) as error:
            failure = _redis_error(error)
            is_about_place = isinstance(failure, MovedError) or not is_refusal(failure)
            if is_about_place and await self.route.failed(node, key, failure):
                raise _Redirected(failure) from error
            raise failure from error

    async def _take_turn(self, node: Node) -> None:
        if not node.turns.locked():
            await node.turns.acquire()  # at once
            return
        try:
            async with asyncio.timeout(self._patience_s):
                await node.turns.acquire()
        except TimeoutError as error:
            raise UnavailableError("the session store is slow, and too many calls wait for it; try again") from error

    async def _execute(self, node: Node, command: Command, script: ScriptText | None) -> Any:
        """Execute a script, loaded if it is unknown there, and wait for replicas."""
        num_replicas = self._num_replicas if script else 0
        reply, num_reached = await self._sent(node, command, num_replicas)
        if script and isinstance(reply, NoScriptError):
            _check(await node.call(script.load()))
            reply, num_reached = await self._sent(node, command, num_replicas)
        _check(reply)
        _check(num_reached)
        if num_reached < num_replicas:
            raise TooFewReplicas(f"{num_reached} of the {num_replicas} replicas of --store-replicas answer")
        return reply

    async def _sent(self, node: Node, command: Command, num_replicas: int) -> tuple[Any, Any]:
        """Return a command's reply, and how many replicas have it: what WAIT says where some are asked for."""
        if not num_replicas:
            return await node.call(command), 0
        reply, num_reached = await node.execute([command, ("WAIT", num_replicas, WAIT_TIMEOUT_MS)])
        return reply, num_reached


class _Redirected(Exception):
    """Another server has the key; it may be asked at once."""

    def __init__(self, error: RedisError) -> None:
        super().__init__(str(error))
        self.error = error


def _check(reply: Any) -> None:
    """Raise a reply that is an error."""
    if isinstance(reply, ResponseError):
        raise reply


def _redis_error(error: RedisError | OSError) -> RedisError:
    return error if isinstance(error, RedisError) else RedisError(f"{type(error).__name__}")
