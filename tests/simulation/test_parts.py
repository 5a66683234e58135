"""The simulated parts: time, processes, calls and the store do what real ones do."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest

from coordinator.stores.client import RedisClient
from coordinator.stores.scripts import LIBRARY
from specdec.outside import Outside
from specdec.v1 import target_pb2, target_pb2_grpc
from tests.simulation.ledger import Log
from tests.simulation.loop import Process, SimulationStuck, VirtualLoop, virtual_loop
from tests.simulation.network import Network
from tests.simulation.store import SimulatedRedis


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def test_time_jumps_to_the_next_timer() -> None:
    async def work() -> float:
        await asyncio.sleep(3600)
        return virtual_loop().time()

    assert run(work()) == 3600


def test_timers_run_in_order_of_time_then_creation() -> None:
    order = list[str]()

    async def work() -> None:
        loop = virtual_loop()
        for name, at_s in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
            loop.call_at(at_s, order.append, name)
        await asyncio.sleep(3)

    run(work())
    assert order == ["a", "b", "c"]


def test_waiting_for_nothing_is_an_error() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(SimulationStuck, match="no timer"):
        run(work())


def test_stopped_process_goes_on_where_it_was() -> None:
    ticks = list[float]()

    async def tick() -> None:
        for _ in range(4):
            await asyncio.sleep(1)
            ticks.append(virtual_loop().time())

    async def work() -> None:
        process = Process("p")
        task = process.spawn(tick())
        await asyncio.sleep(1.5)
        process.stop()
        await asyncio.sleep(10)
        process.go_on()
        await task

    run(work())
    assert ticks == [1, 11.5, 12.5, 13.5]


async def idle(network: Network) -> Process:
    """Serve a target whose `Score` answers each request until its stream ends."""

    class Servicer:
        GetTarget = None

        async def Score(self, requests: Any, context: Any) -> None:
            async for request in requests:
                seen.append(request.score.start)
                await context.write(target_pb2.ScoreResponse(cached_len=request.score.start))

    seen.clear()
    process, servicer = Process("target"), Servicer()
    server = network.serve("target", process)
    add: Any = target_pb2_grpc.add_TargetServiceServicer_to_server
    add(servicer, server)
    server.is_ready = True
    return process


seen = list[int]()


def score(start: int) -> target_pb2.ScoreRequest:
    return target_pb2.ScoreRequest(score=target_pb2.Score(start=start))


def stub(network: Network) -> Any:
    return target_pb2_grpc.TargetServiceStub(network.channel("target"))


def test_stream_answers_and_ends() -> None:
    async def work() -> None:
        network = Network(random.Random(1))
        await idle(network)
        call = stub(network).Score()
        for start in (3, 4):
            await call.write(score(start))
            assert (await call.read()).cached_len == start
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert not network.calls()

    run(work())


def test_half_open_call_still_delivers() -> None:
    """The caller gives up, and what it had sent arrives afterwards."""

    async def work() -> None:
        network = Network(random.Random(1))
        await idle(network)
        call = stub(network).Score()
        await call.write(score(5))
        network.calls()[0].half_open()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.sleep(1)
        assert seen == [5]
        assert network.calls()
        await asyncio.sleep(60)
        assert not network.calls()

    run(work())


def test_killed_server_ends_its_calls() -> None:
    async def work() -> None:
        network = Network(random.Random(1))
        process = await idle(network)
        call = stub(network).Score()
        await call.write(score(5))
        await call.read()
        process.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub(network).GetTarget(target_pb2.GetTargetRequest())
        await asyncio.sleep(1)
        assert not process.tasks

    run(work())


def counter(store: SimulatedRedis) -> Any:
    """Return a script that counts its calls, on a connection of its own."""
    outside = Outside(lambda: virtual_loop().time(), lambda: 0.5)
    texts = {"count": "return redis.call('INCR', KEYS[1])", LIBRARY: ""}
    client = RedisClient(store.route(), outside=outside, read_script=texts.__getitem__)
    return client.script("count", lambda reply: True)


def test_lost_reply_is_executed_and_repeated() -> None:
    async def work() -> None:
        store = SimulatedRedis(random.Random(1))
        count = counter(store)
        assert await count(["n"], []) == 1
        store.lost_replies = 1.0
        asyncio.get_running_loop().call_later(1, setattr, store, "lost_replies", 0.0)
        assert await count(["n"], []) == 3

    run(work())


def test_dead_process_does_not_reach_the_store() -> None:
    async def work() -> None:
        store = SimulatedRedis(random.Random(1))
        count = counter(store)
        assert await count(["n"], []) == 1

        async def count_at_the_end() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                await count(["n"], [])

        process = Process("p")
        process.spawn(count_at_the_end())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(60)
        assert not process.tasks
        assert await count(["n"], []) == 2

    run(work())


def test_rollback_forgets_what_came_after() -> None:
    async def work() -> None:
        store = SimulatedRedis(random.Random(1))
        count = counter(store)
        await count(["n"], [])
        store.keep_snapshot()
        await count(["n"], [])
        store.roll_back()
        assert await count(["n"], []) == 2

    run(work())


def test_lost_tokens_are_owed_while_anybody_knows_them() -> None:
    async def work() -> None:
        log = Log(prompt=(0,), greedy=(), tokens=(0, 1, 2), shown=[1, 2, 3, 4, 5], is_lost=True)
        client, coordinator = Process("client"), Process("coordinator")
        log.known = {coordinator: 5, client: 3}
        log.lose_unknown()
        assert log.shown == [1, 2, 3, 4, 5]
        coordinator.kill()
        log.lose_unknown()
        assert (log.shown, log.unknown) == ([1, 2, 3], [1, 2, 3, 4, 5])
        client.kill()
        log.lose_unknown()
        assert log.shown == [1, 2], "what the store has"
        assert not log.has_all

    run(work())


@pytest.mark.parametrize(("tokens", "is_lost"), [((0, 1), False), ((0, 1, 9), True)], ids=["no fault", "other text"])
def test_other_tokens_are_owed_to_the_dead_too(tokens: tuple[int, ...], is_lost: bool) -> None:
    log = Log(prompt=(0,), greedy=(), tokens=tokens, shown=[1, 2, 3], is_lost=is_lost)
    log.lose_unknown()
    assert log.shown == [1, 2, 3]
