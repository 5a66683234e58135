"""The master that Sentinels name: looked up again after every attempt that failed.

All Sentinels are asked at once, and the answer with the highest configuration epoch counts: one that was cut off from
the others, or has just started, still names the former master. That one is found out in any case, as it refuses every
script (coordinator/stores/client.py).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError

from coordinator.stores.errors import NoMaster
from coordinator.stores.node import Node
from specdec.serving.store_url import Place

ANSWER_TIMEOUT_S = 1.0  # of a Sentinel; the others have answered long before


class SentinelRoute:
    """The way to the master of one service."""

    def __init__(self, service: str, sentinels: Sequence[Node], node_at: Callable[[Place], Node]) -> None:
        self._service, self._sentinels, self._node_at = service, sentinels, node_at
        self._master: Node | None = None  # None: to be looked up
        self._known: dict[Place, Node] = {}
        self._lookup = asyncio.Lock()

    async def find(self, key: str) -> Node:
        """Return the master. Raises NoMaster."""
        async with self._lookup:
            if self._master is None:
                self._master = await self._look_up()
            return self._master

    async def failed(self, node: Node, key: str, error: RedisError) -> bool:
        """Ask the Sentinels before the next attempt."""
        if self._master is node:
            self._master = None
        await node.drop()
        return False

    async def nodes(self) -> list[Node]:
        """Return the master: what replicas are set to does not count until they are promoted."""
        return [await self.find("")]

    async def close(self) -> None:
        """Close the connections."""
        for node in [*self._sentinels, *self._known.values()]:
            await node.close()

    async def _look_up(self) -> Node:
        answers = await asyncio.gather(*map(self._ask, self._sentinels))
        known = [answer for answer in answers if answer is not None]
        if not known:
            raise NoMaster(f"none of {len(answers)} Sentinels names a master of {self._service}")
        _, place = max(known)
        if place not in self._known:
            self._known[place] = self._node_at(place)
        return self._known[place]

    async def _ask(self, sentinel: Node) -> tuple[int, Place] | None:
        """Return a Sentinel's configuration epoch and master; None: it does not answer, or knows none."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                [reply] = await sentinel.execute([("SENTINEL", "MASTER", self._service)])
            return _answer(reply)
        except (RedisError, OSError, TimeoutError, KeyError, ValueError):
            return None


def _answer(reply: Any) -> tuple[int, Place]:
    if isinstance(reply, Exception):
        raise reply
    facts = reply if isinstance(reply, Mapping) else dict(zip(reply[::2], reply[1::2], strict=True))
    return int(facts[b"config-epoch"]), (facts[b"ip"].decode(), int(facts[b"port"]))
