"""Sessions that move between coordinators: two of them over one real Redis.

`python -m tests.coordinator.test_takeover 1000` returns to a superseded owner a thousand times.
"""

import asyncio
import sys
from contextlib import aclosing

import pytest

from coordinator.sessions import SessionStore, open_store
from specdec.errors import DataLossError
from tests.support.redis_server import RedisServer, running_redis
from tests.support.toy_coordinator import LENGTH, Gate, ToyCoordinator, lapse, take, take_last

NUM_RETURNS = 20


async def return_to_superseded_owner(store: SessionStore, number: int) -> list[int]:
    """Follow a session at one coordinator, then at another, then at the superseded first one; return its text.

    A second follower keeps the first coordinator's generation alive, in the middle of a round.
    """
    first, second = ToyCoordinator(store), ToyCoordinator(store)
    name = f"session {number}"
    await first.create(name)
    first.toys.before = gate = Gate(4)
    async with aclosing(first.follow(name, 0, b"")) as staying:
        await take(staying, 4)
        second.toys.before = Gate(12)
        await lapse(store, name)
        async with aclosing(second.follow(name, 0, b"")) as elsewhere:
            tokens, chunk = await take_last(elsewhere, 12)
        first.toys.before = Gate()
        tokens += await first.tokens(name, len(tokens), chunk.digest)
        gate.opened.set()
        assert len(await take(staying, LENGTH - 4)) == LENGTH - 4
    assert tokens == await first.stored(name)
    return tokens


async def returns(url: str, count: int) -> int:
    """Return so many times to a superseded owner; return how often the text was whole."""
    store = open_store(url, 1000.0)
    texts = [await return_to_superseded_owner(store, number) for number in range(count)]
    await store.close()
    return sum(len(text) == LENGTH for text in texts)


async def test_returning_to_a_superseded_owner_loses_nothing(redis_url: str) -> None:
    assert await returns(redis_url, NUM_RETURNS) == NUM_RETURNS


async def test_a_store_that_lost_tokens_is_reported(redis_server: RedisServer, redis_url: str) -> None:
    """The control: a client that has more than the store gets an error, at every coordinator."""
    store = open_store(redis_url, 1000.0)
    first, second = ToyCoordinator(store), ToyCoordinator(store)
    await first.create("s")
    first.toys.before = Gate(8)
    async with aclosing(first.follow("s", 0, b"")) as chunks:
        tokens, chunk = await take_last(chunks, 8)
        for coordinator in (first, second):
            coordinator.toys.before = Gate()
            with pytest.raises(DataLossError, match="past the"):
                await coordinator.tokens("s", len(tokens) + 100)
            with pytest.raises(DataLossError, match="other tokens"):
                await coordinator.tokens("s", len(tokens), b"x" * 16)
    assert chunk.digest
    await store.close()


if __name__ == "__main__":
    with running_redis() as server:
        number = int(sys.argv[1])
        print(
            f"{asyncio.run(returns(server.url, number))} of {number} returns to a superseded owner gave the whole text"
        )
