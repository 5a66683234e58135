"""Which server is asked: asked again at every attempt, and told when an attempt failed."""

from typing import Protocol

from redis.exceptions import RedisError

from coordinator.stores.node import Node


class Route(Protocol):
    """The way to the master of a key."""

    async def find(self, key: str) -> Node:
        """Return a key's present master. Raises RedisError where nobody knows."""

    async def failed(self, node: Node, key: str, error: RedisError) -> bool:
        """Take note that an attempt failed; return whether the next one may follow at once."""

    async def nodes(self) -> list[Node]:
        """Return all servers that keep sessions. Raises RedisError where nobody knows."""

    async def close(self) -> None:
        """Close the connections."""


class FixedRoute:
    """One server."""

    def __init__(self, node: Node) -> None:
        self.node = node

    async def find(self, key: str) -> Node:
        """Return the server."""
        return self.node

    async def failed(self, node: Node, key: str, error: RedisError) -> bool:
        """Give up connections: behind the same address another server may have become the master."""
        await self.node.drop()
        return False

    async def nodes(self) -> list[Node]:
        """Return the server."""
        return [self.node]

    async def close(self) -> None:
        """Close its connections."""
        await self.node.close()
