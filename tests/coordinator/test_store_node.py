"""Calls to one Redis server: which share a message, what becomes of those that are given up, which connections stay."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from redis.asyncio import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from coordinator.stores.node import Command, Node
from coordinator.stores.opening import memory_pool, server_pool
from tests.support.redis_server import running_redis


class Watched(Node):
    """Notes how many commands each message has."""

    def __init__(self) -> None:
        super().__init__(memory_pool())
        self.sizes: list[int] = []

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        self.sizes.append(len(commands))
        return await super().execute(commands)


class Broken(Watched):
    """Loses its connection in every message."""

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        self.sizes.append(len(commands))
        await asyncio.sleep(0)
        raise RedisConnectionError("gone")


def counting(number: int) -> Command:
    return ("ECHO", str(number))


async def test_calls_of_one_moment_share_a_message() -> None:
    node = Watched()
    assert await asyncio.gather(*(node.call(counting(number)) for number in range(9))) == [
        str(number).encode() for number in range(9)
    ]
    assert node.sizes == [1, 8]


async def test_an_error_reply_is_one_calls_own() -> None:
    node = Watched()
    commands = [counting(0), counting(1), ("GET",), counting(3)]
    replies = await asyncio.gather(*map(node.call, commands))
    assert isinstance(replies.pop(2), ResponseError)
    assert (replies, node.sizes) == ([b"0", b"1", b"3"], [1, 3])


async def test_a_call_that_is_given_up_leaves_the_others_their_replies() -> None:
    node = Watched()
    calls = [asyncio.create_task(node.call(counting(number))) for number in range(4)]
    await asyncio.sleep(0)
    calls[2].cancel()
    replies = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(replies.pop(2), asyncio.CancelledError)
    assert replies == [b"0", b"1", b"3"]
    assert await node.call(counting(5)) == b"5"


async def test_all_calls_of_a_lost_message_fail() -> None:
    node = Broken()
    replies = await asyncio.gather(*(node.call(counting(number)) for number in range(5)), return_exceptions=True)
    assert [type(reply) for reply in replies] == [RedisConnectionError] * 5
    assert node.sizes == [1, 4]


async def test_connections_are_kept_until_they_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    num_made = 0
    connect = Connection._connect

    async def counted(self: Connection) -> None:
        nonlocal num_made
        num_made += 1
        await connect(self)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(Connection, "_connect", counted)
    with running_redis() as server:
        node = Node(server_pool(server.url))
        for number in range(3):
            assert await node.execute([counting(number)]) == [str(number).encode()]
        assert num_made == 1
        await node.drop()
        assert await node.execute([counting(3)]) == [b"3"]
        assert num_made == 2
        await node.close()
