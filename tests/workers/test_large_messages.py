"""Large messages wait in a line that is fair between tenants, and holds so many bytes."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from specdec.errors import OverloadedError
from specdec.serving.large_messages import BYTES_A_SECOND, MAX_WAITING_BYTES, NUM_REFUSED, QUICK_BYTES, LargeMessages
from tests.simulation.loop import VirtualLoop

SIZE = 1 << 20
TIME_S = SIZE / BYTES_A_SECOND  # that one takes


class Line:
    """Who was let in, and when, in virtual time."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.messages = LargeMessages()
        self.let_in = list[tuple[str, float]]()

    async def send(self, tenant: str, size: int = SIZE) -> None:
        await self.messages.wait(tenant, size)
        self.let_in.append((tenant, self.loop.time()))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        began_s = self.loop.time()
        try:
            self.loop.run_until_complete(work)
        finally:
            self.loop.close()
        self.let_in = [(tenant, round((at_s - began_s) / TIME_S, 3)) for tenant, at_s in self.let_in]


def test_they_come_one_after_the_other_and_small_ones_at_once() -> None:
    line = Line()

    async def work() -> None:
        await asyncio.gather(*(line.send("acme") for _ in range(3)), line.send("acme", QUICK_BYTES))

    line.run(work())
    assert line.let_in == [("acme", 0.0), ("acme", 1.0), ("acme", 2.0), ("acme", 3.0)]


def test_tenants_come_in_turn() -> None:
    line = Line()

    async def work() -> None:
        greedy = [asyncio.create_task(line.send("greedy")) for _ in range(10)]
        await asyncio.sleep(0.5 * TIME_S)
        await asyncio.gather(*greedy, line.send("modest"))

    line.run(work())
    assert line.let_in[:3] == [("greedy", 1.0), ("modest", 2.0), ("greedy", 3.0)]


def test_one_that_leaves_takes_nobodys_turn() -> None:
    line = Line()

    async def work() -> None:
        leaves = [asyncio.create_task(line.send("acme")) for _ in range(2)]
        stays = asyncio.create_task(line.send("acme"))
        await asyncio.sleep(0.25 * TIME_S)
        for task in leaves:
            task.cancel()
        await stays

    line.run(work())
    assert line.let_in == [("acme", 1.25)]


def test_one_tenant_leaves_room_for_another_and_what_leaves_makes_room() -> None:
    line, size, num_refused = Line(), MAX_WAITING_BYTES // 8, NUM_REFUSED._value.get()

    async def work() -> None:
        waiting = [asyncio.create_task(line.send("greedy", size)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="try again soon"):
            await line.send("greedy", size)
        await asyncio.gather(*(line.send("modest", size) for _ in range(2)), *waiting)
        await asyncio.gather(*(line.send("greedy", size) for _ in range(4)))

    line.run(work())
    assert len(line.let_in) == 10
    assert NUM_REFUSED._value.get() == num_refused + 1
