"""The loop of a service listens between few steps, lets what is urgent go first, and reads grpc's signals at once."""

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from specdec.serving.event_loop import FIRST_IN_A_ROW, PASS_STEPS, Priority, ServiceLoop, set_priority

NUM_STEPS = 100
NUM_BUSY, BUSY_S = 100, 0.0003
NUM_THREADS, NUM_WAKES, WAIT_S = 4, 2000, 5.0


def on_service_loop(work: Callable[[], Any]) -> Any:
    """Run a coroutine function on a loop of its own."""
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        return runner.run(work())


@pytest.fixture
def pair() -> Any:
    near, far = socket.socketpair()
    far.setblocking(False)
    with near, far:
        yield near, far


def test_the_loop_listens_before_all_that_is_ready_has_run(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair

    async def work() -> int:
        loop, ran, heard = asyncio.get_running_loop(), list[int](), asyncio.Event()
        ran_before = list[int]()

        def hear() -> None:
            ran_before.append(len(ran))
            far.recv(1)
            heard.set()

        loop.add_reader(far, hear)
        near.send(b"x")
        for step in range(NUM_STEPS):
            loop.call_soon(ran.append, step)
        await heard.wait()
        loop.remove_reader(far)
        assert ran == sorted(ran)
        return ran_before[0]

    assert on_service_loop(work) <= 2 * PASS_STEPS


def test_no_thread_wakes_the_loop_in_vain() -> None:
    """Each waits for what it has asked for, while others wake the loop too; nothing else would."""

    def ask(loop: asyncio.AbstractEventLoop) -> int:
        for number in range(NUM_WAKES):
            answered = threading.Event()
            loop.call_soon_threadsafe(answered.set)
            if not answered.wait(WAIT_S):
                return number
        return NUM_WAKES

    async def work() -> list[int]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            asked = [loop.run_in_executor(threads, ask, loop) for _ in range(NUM_THREADS)]
            return await asyncio.gather(*asked)

    assert on_service_loop(work) == [NUM_WAKES] * NUM_THREADS


def test_a_closed_loop_is_woken_no_more() -> None:
    files = set(os.listdir("/proc/self/fd"))
    loop = ServiceLoop()
    loop.close()
    loop.close()
    assert set(os.listdir("/proc/self/fd")) == files
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon_threadsafe(print)


def test_what_goes_first_keeps_its_order_and_goes_before_what_is_ready() -> None:
    async def work() -> list[str]:
        loop, ran, everything = asyncio.get_running_loop(), list[str](), asyncio.Event()
        for step in range(NUM_STEPS):
            loop.call_soon(ran.append, f"other {step}")
        set_priority(Priority.FIRST)
        for step in range(3):
            loop.call_soon(ran.append, f"first {step}")
        set_priority(Priority.IN_TURN)
        loop.call_soon(everything.set)
        await everything.wait()
        return ran

    ran = on_service_loop(work)
    assert ran[:3] == ["first 0", "first 1", "first 2"]
    assert ran[3:] == [f"other {step}" for step in range(NUM_STEPS)]


def test_a_flood_lets_nothing_overtake_what_was_there_before() -> None:
    async def work() -> list[str]:
        loop, ran, everything = asyncio.get_running_loop(), list[str](), asyncio.Event()
        set_priority(Priority.FIRST)
        for step in range(5 * FIRST_IN_A_ROW):
            loop.call_soon(ran.append, f"first {step}")
        set_priority(Priority.IN_TURN)
        loop.call_soon(ran.append, "in its turn")
        set_priority(Priority.FIRST)
        for step in range(2):
            loop.call_soon(ran.append, f"later {step}")
        set_priority(Priority.IN_TURN)
        loop.call_soon(everything.set)
        await everything.wait()
        return ran

    first = [f"first {step}" for step in range(5 * FIRST_IN_A_ROW)]
    assert on_service_loop(work) == [*first, "in its turn", "later 0", "later 1"]


@pytest.mark.parametrize("num_flooding", [FIRST_IN_A_ROW // 2, 2 * FIRST_IN_A_ROW])
def test_a_flood_of_what_goes_first_leaves_others_their_share(num_flooding: int) -> None:
    async def work() -> tuple[int, int]:
        loop, num_first, num_others = asyncio.get_running_loop(), 0, 0
        done = asyncio.Event()

        def again() -> None:
            nonlocal num_first
            num_first += 1
            loop.call_soon(again)

        def other() -> None:
            nonlocal num_others
            num_others += 1
            if num_others == NUM_STEPS:
                done.set()
            else:
                loop.call_soon(other)

        loop.call_soon(other)
        set_priority(Priority.FIRST)
        for _ in range(num_flooding):
            loop.call_soon(again)
        set_priority(Priority.IN_TURN)
        await asyncio.wait_for(done.wait(), 10.0)
        return num_first, num_others

    num_first, num_others = on_service_loop(work)
    assert num_first == pytest.approx(max(FIRST_IN_A_ROW, num_flooding) * num_others, rel=0.1)


def test_a_task_that_goes_first_hands_that_to_the_tasks_that_it_starts_until_it_waits_its_turn() -> None:
    async def work() -> list[str]:
        ran = list[str]()

        async def note(name: str) -> None:
            ran.append(name)

        async def urgent() -> None:
            set_priority(Priority.FIRST)
            first = asyncio.create_task(note("first"))
            set_priority(Priority.IN_TURN)
            await asyncio.gather(first, asyncio.create_task(note("in its turn")))

        tasks = [asyncio.create_task(urgent()), *(asyncio.create_task(note(f"other {n}")) for n in range(9))]
        await asyncio.gather(*tasks)
        return ran

    assert on_service_loop(work) == ["first", *(f"other {n}" for n in range(9)), "in its turn"]


def test_signals_that_have_gathered_call_back_once(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair

    async def work() -> int:
        num_calls = 0

        def call_back(word: str) -> None:
            nonlocal num_calls
            assert word == "context"
            num_calls += len(far.recv(1))

        loop = asyncio.get_running_loop()
        loop.add_reader(far, call_back, "context")
        near.send(b"x" * 150)
        await asyncio.sleep(0.05)
        assert num_calls == 1
        near.send(b"x")
        await asyncio.sleep(0.05)
        loop.remove_reader(far)
        return num_calls

    assert on_service_loop(work) == 2


async def _refuse(request: bytes, context: Any) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no")


CLIENT = """
import sys, time, grpc
with grpc.insecure_channel("127.0.0.1:" + sys.argv[1]) as channel:
    method = channel.unary_unary("/a.Service/Method")
    for call in range(4):
        if call == 1:
            begin = time.perf_counter()  # the first one opened the connection
        try:
            method(b"", timeout=30, wait_for_ready=True)
        except grpc.RpcError as refusal:
            assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, refusal
print(time.perf_counter() - begin)
"""


async def _refused_beside_work() -> float:
    server = grpc.aio.server()
    handler: Any = grpc.unary_unary_rpc_method_handler(_refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", {"Method": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    set_priority(Priority.FIRST)
    await server.start()
    set_priority(Priority.IN_TURN)

    async def session() -> None:
        while True:
            end = time.perf_counter() + BUSY_S
            while time.perf_counter() < end:
                pass
            await asyncio.sleep(0)

    sessions = [asyncio.create_task(session()) for _ in range(NUM_BUSY)]
    try:
        words = (sys.executable, "-c", CLIENT, str(port))
        client = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        output, _ = await client.communicate()
        return float(output)
    finally:
        for task in sessions:
            task.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        await server.stop(None)


def test_what_fails_for_one_event_leaves_the_others() -> None:
    """As grpc.aio does for an event of a loop that is closed: what it has not come to is handled in the next pass."""

    async def handled() -> list[int]:
        ours, theirs = socket.socketpair()
        events, done = [0, 1, 2, 3], asyncio.Event()
        seen = list[int]()

        def handle() -> None:
            ours.recv(1)
            while events:
                seen.append(events.pop(0))
                if seen[-1] == 1:
                    raise RuntimeError("Event loop is closed")
            done.set()

        with ours, theirs:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda *_: None)
            theirs.send(bytes(len(events)))
            loop.add_reader(ours, handle)
            await asyncio.wait_for(done.wait(), 10)
            loop.remove_reader(ours)
        return seen

    assert on_service_loop(handled) == [0, 1, 2, 3]


def test_calls_are_refused_soon_beside_many_sessions() -> None:
    ours_s = on_service_loop(_refused_beside_work)
    asyncio_s = asyncio.run(_refused_beside_work())
    assert ours_s < asyncio_s / 3, (ours_s, asyncio_s)
