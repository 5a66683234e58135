"""A Redis Cluster: the slots' masters, learned from any node and corrected by redirections.

All keys of a session share a hash tag, and so a slot; keys outside sessions have a slot of their own. While a slot
moves, calls with its keys wait: a cluster executes nothing then that names a key which does not exist (TRYAGAIN).
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.crc import key_slot
from redis.exceptions import MovedError, RedisError, ResponseError

from coordinator.stores.errors import NoMaster
from coordinator.stores.node import Node
from specdec.serving.store_url import Place

ANSWER_TIMEOUT_S = 1.0
Slots = dict[int, Place]


class ClusterRoute:
    """The way to the master of each slot."""

    def __init__(self, places: Sequence[Place], node_at: Callable[[Place], Node]) -> None:
        self._seeds, self._node_at = tuple(places), node_at
        self._nodes: dict[Place, Node] = {}
        self._slots: Slots = {}
        self._is_current = False
        self._lookup = asyncio.Lock()

    async def find(self, key: str) -> Node:
        """Return the master of a key's slot. Raises NoMaster."""
        async with self._lookup:
            if not self._is_current:
                self._slots = await self._look_up()
                self._is_current = True
        place = self._slots.get(_slot(key))
        if place is None:
            self._is_current = False
            raise NoMaster("a slot of the cluster has no master")
        return self._node(place)

    async def failed(self, node: Node, key: str, error: RedisError) -> bool:
        """Follow a slot that has moved at once; look the cluster up after anything else."""
        if isinstance(error, MovedError):
            self._slots[_slot(key)] = (error.host or self._host_of(node), error.port)
            return True
        self._is_current = False
        if not isinstance(error, ResponseError):
            await node.drop()
        return False

    async def nodes(self) -> list[Node]:
        """Return the masters. Raises NoMaster."""
        await self.find("")
        return [self._node(place) for place in sorted(set(self._slots.values()))]

    async def close(self) -> None:
        """Close the connections."""
        for node in self._nodes.values():
            await node.close()

    def _node(self, place: Place) -> Node:
        if place not in self._nodes:
            self._nodes[place] = self._node_at(place)
        return self._nodes[place]

    def _host_of(self, node: Node) -> str:
        return next(place[0] for place, known in self._nodes.items() if known is node)

    async def _look_up(self) -> Slots:
        """Ask nodes until one answers; those that were masters last, as one of them may be gone."""
        for place in _unique([*self._seeds, *self._slots.values(), *self._nodes]):
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    [reply] = await self._node(place).execute([("CLUSTER", "SLOTS")])
                if not isinstance(reply, Exception):
                    return _slots(reply, place[0])
                failure: Exception = reply
            except (RedisError, OSError, TimeoutError) as error:
                failure = error
        if isinstance(failure, RedisError) and not isinstance(failure, NoMaster):
            raise failure
        raise NoMaster("no node of the cluster answers")


def _slot(key: str) -> int:
    return key_slot(key.encode())


def _unique(places: Iterable[Place]) -> list[Place]:
    return list(dict.fromkeys(places))


def _slots(reply: Any, host: str) -> Slots:
    """Return the master of each slot; one without a name is on the host that was asked."""
    slots: Slots = {}
    for first, last, master, *_ in reply:
        place = ((master[0] or b"").decode() or host, int(master[1]))
        slots |= dict.fromkeys(range(int(first), int(last) + 1), place)
    return slots
