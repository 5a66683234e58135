"""What routes make of what Sentinels and nodes say, true or not; replies that mean another attempt."""

from collections.abc import Sequence
from typing import Any

import pytest
from redis.exceptions import (
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from coordinator.stores.client import RedisClient
from coordinator.stores.node import Command, Node
from coordinator.stores.opening import memory_pool
from coordinator.stores.routes import FixedRoute
from coordinator.stores.sentinel import SentinelRoute
from specdec.errors import UnavailableError
from specdec.serving.store_url import Place


class Told(Node):
    """A server that gives the next of its replies, and the last one again and again."""

    def __init__(self, *replies: object) -> None:
        super().__init__(memory_pool())
        self.replies = list(replies)
        self.num_asked = 0

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        self.num_asked += 1
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, RedisError) and not isinstance(reply, ResponseError):
            raise reply
        return [reply for _ in commands]


def named(host: str, epoch: int) -> list[bytes]:
    """What a Sentinel says of a master."""
    return [b"name", b"main", b"ip", host.encode(), b"port", b"6379", b"config-epoch", str(epoch).encode()]


def sentinels(*answers: object) -> tuple[SentinelRoute, dict[Node, Place]]:
    """A route by such Sentinels, and the places of the nodes that it makes."""
    places: dict[Node, Place] = {}

    def node_at(place: Place) -> Node:
        node = Told(b"PONG")
        places[node] = place
        return node

    return SentinelRoute("main", [Told(answer) for answer in answers], node_at), places


async def test_the_sentinel_that_knows_the_latest_failover_is_believed() -> None:
    route, places = sentinels(named("old", 3), named("new", 4), named("old", 3))
    assert places[await route.find("")] == ("new", 6379)


async def test_sentinels_that_do_not_answer_or_know_nothing_are_left_out() -> None:
    silent, ignorant, broken = RedisConnectionError("gone"), ResponseError("No such master with that name"), [b"ip"]
    route, places = sentinels(silent, ignorant, broken, named("one", 1))
    assert places[await route.find("")] == ("one", 6379)
    with pytest.raises(UnavailableError, match=r"has no master \(none of 2 Sentinels names a master of main\)"):
        await RedisClient(sentinels(silent, ignorant)[0], patience_s=0.0).ping()


async def test_sentinels_are_asked_again_after_a_failure_alone() -> None:
    sentinel = Told(named("one", 1), named("two", 2))
    places: dict[Node, Place] = {}

    def node_at(place: Place) -> Node:
        node = Told(b"PONG")
        places[node] = place
        return node

    route = SentinelRoute("main", [sentinel], node_at)
    first = await route.find("")
    assert await route.find("") is first
    await route.failed(first, "", RedisConnectionError("gone"))
    assert [places[node] for node in (first, await route.find(""))] == [("one", 6379), ("two", 6379)]
    assert sentinel.num_asked == 2


PASSING = [
    ReadOnlyError("You can't write against a read only replica."),
    ClusterDownError("The cluster is down"),
    TryAgainError("Multiple keys request during rehashing of slot"),
    ResponseError("NOREPLICAS Not enough good replicas to write."),
    ResponseError("Error running script (call to f_1): @user_script:1: -READONLY You can't write against"),
    RedisConnectionError("Connection reset by peer"),
]


@pytest.mark.parametrize("error", PASSING, ids=str)
async def test_states_that_pass_are_waited_for(error: RedisError) -> None:
    node = Told(error, error, b"PONG")
    await RedisClient(FixedRoute(node)).ping()
    assert node.num_asked == 3


@pytest.mark.parametrize("error", [OutOfMemoryError("command not allowed"), ResponseError("WRONGTYPE")], ids=str)
async def test_refusals_are_not_repeated(error: RedisError) -> None:
    node = Told(error, b"PONG")
    with pytest.raises(UnavailableError, match="refuses"):
        await RedisClient(FixedRoute(node)).ping()
    assert node.num_asked == 1


@pytest.mark.parametrize(
    ("reply", "is_checked"), [(b"maxmemory_policy:noeviction\r\n", True), (ResponseError("NOPERM"), False)]
)
async def test_a_policy_that_may_not_be_asked_for_is_told(reply: object, is_checked: bool) -> None:
    assert await RedisClient(FixedRoute(Told(reply))).refuse_eviction() is is_checked


async def test_a_connection_that_breaks_while_its_policy_is_asked_for_is_no_failed_start() -> None:
    node = Told(RedisConnectionError("Connection reset by peer"), b"maxmemory_policy:allkeys-lru\r\n")
    with pytest.raises(ValueError, match="gives up sessions when it is full"):
        await RedisClient(FixedRoute(node)).refuse_eviction()
    assert node.num_asked == 2
