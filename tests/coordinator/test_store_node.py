"""Calls to one Redis server: which share a message, what becomes of those that are given up, which connections stay."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import hiredis
import pytest
from redis.asyncio import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from coordinator.stores.node import Command, Node
from coordinator.stores.opening import memory_pool, server_pool
from tests.support.redis_server import RedisServer, running_redis


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


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The connections that were made, each as often as it was."""
    made = list[Connection]()
    connect = Connection._connect

    async def noted(self: Connection) -> None:
        made.append(self)
        await connect(self)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(Connection, "_connect", noted)
    return made


@asynccontextmanager
async def real_node(options: str = "") -> AsyncIterator[tuple[Node, RedisServer, list[None]]]:
    """Run a Redis; yield the node, the server, and the breaks that the node tells of."""
    breaks = list[None]()
    with running_redis() as server:
        node = Node(server_pool(server.url + options))
        node.on_break = lambda: breaks.append(None)
        yield node, server, breaks
        await node.close()


async def test_connections_are_kept_until_they_are_dropped(made: list[Connection]) -> None:
    async with real_node() as (node, _, _):
        for number in range(3):
            assert await node.execute([counting(number)]) == [str(number).encode()]
        assert len(made) == 1
        await node.drop()
        assert await node.execute([counting(3)]) == [b"3"]
        assert len(made) == 2


SLOW: Command = ("BLPOP", "nothing is here", "0.2")


async def given_up(node: Node, *commands: Command) -> None:
    """Send commands, and leave before they are answered."""
    call = asyncio.create_task(node.execute(commands))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def read_alone() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if "nobody waits for" in task.get_name()]


async def test_a_caller_that_leaves_breaks_no_connection(made: list[Connection]) -> None:
    """What it was sent is read without it, answers nobody else, and the store looks no less well than before."""
    async with real_node() as (node, _, breaks):
        await node.execute([counting(0)])
        await given_up(node, counting(1), SLOW, counting(2))
        await given_up(node, SLOW)
        assert await node.execute([counting(3)]) == [b"3"]
        await asyncio.sleep(0.4)
        for number in range(4, 8):
            assert await node.execute([counting(number)]) == [str(number).encode()]
        replies = await asyncio.gather(*(node.execute([counting(number)]) for number in range(3)))
        assert replies == [[b"0"], [b"1"], [b"2"]]
        assert (len(set(made)), len(made), breaks) == (3, 3, [])


async def test_a_connection_that_breaks_when_its_caller_has_left_is_noted(made: list[Connection]) -> None:
    async with real_node() as (node, server, breaks):
        await given_up(node, ("BLPOP", "nothing is here", "0"))
        server.kill()
        async with asyncio.timeout(10):
            while not breaks:  # noqa: ASYNC110  # nothing but the list tells
                await asyncio.sleep(0.01)
        assert breaks == [None]
        server.start()
        assert await node.execute([counting(1)]) == [b"1"]


async def test_callers_that_leave_take_no_more_connections_than_there_are() -> None:
    async with real_node("?max_connections=14") as (node, _, _):
        for _ in range(8):  # of which one may be read without its caller
            await given_up(node, ("BLPOP", "nothing is here", "1"))
        assert len(read_alone()) == 1
        calls = []
        for _ in range(12):
            await node.turns.acquire()
            calls.append(asyncio.create_task(node.execute([SLOW])))
            calls[-1].add_done_callback(lambda _: node.turns.release())
        assert await asyncio.gather(*calls) == [[None]] * 12


async def test_a_connection_that_is_read_alone_comes_back_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Connection.read_response
    async with real_node("?max_connections=14") as (node, _, _):
        for _ in range(16):
            await node.execute([counting(0)])
            monkeypatch.setattr(Connection, "read_response", never)
            call = asyncio.create_task(node.execute([counting(1)]))
            await asyncio.sleep(0.01)
            monkeypatch.setattr(Connection, "read_response", unreadable)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await asyncio.sleep(0.01)
            monkeypatch.setattr(Connection, "read_response", read)
        assert await node.execute([counting(2)]) == [b"2"]


async def never(_: Connection, **__: object) -> None:
    await asyncio.Event().wait()


async def unreadable(_: Connection, **__: object) -> None:
    raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text")


async def test_callers_that_leave_while_they_connect_take_no_connection_with_them() -> None:
    async with real_node("?max_connections=4") as (node, _, _):
        for num_steps in range(60):
            await node.drop()
            call = asyncio.create_task(node.execute([counting(0)]))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        assert await node.execute([counting(1)]) == [b"1"]


async def test_what_nobody_asked_for_answers_nobody(made: list[Connection]) -> None:
    async with real_node() as (node, _, breaks):
        await node.execute([counting(0)])
        await made[0].send_packed_command([hiredis.pack_command(counting(9))])
        await asyncio.sleep(0.05)
        assert await node.execute([counting(1)]) == [b"1"]
        assert breaks == [None]


async def test_nothing_is_read_any_more_once_a_node_is_closed() -> None:
    async with real_node() as (node, _, breaks):
        await given_up(node, ("BLPOP", "nothing is here", "0"))
        await node.close()
        assert breaks == []
        assert not read_alone()
