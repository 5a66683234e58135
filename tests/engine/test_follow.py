"""Tasks that follow others: they arrive the moment those have ended well, and fail where those fail."""

import asyncio
from typing import Any

import pytest

from specdec.engine import EngineError, EngineLoop, Task
from tests.engine.toy_engine import Generation, ToyModel, decode, engine, generated, paused_forward, submitted


class GoingOn(Generation):
    """Generates more of the text of another generation, which it knows nothing of before."""

    def __init__(self, key: str, num_new: int = 1) -> None:
        super().__init__(key, [0], num_new)
        self.on_draft = self.has_text = True

    def begin_after(self, previous: Task[list[int]]) -> bool:
        assert isinstance(previous, Generation)
        self.append_instead(previous.sequence.length, previous.output[-1:])
        return True


class NotWanted(GoingOn):
    """Finds that another task follows."""

    def begin_after(self, previous: Task[list[int]]) -> bool:
        return False


async def test_following_tasks_share_the_very_next_forward() -> None:
    """Nothing comes between two forwards, also where nobody has asked for the second yet."""
    model = ToyModel()
    first, second = [Generation(key, [ord(key) % 50], 2) for key in "ab"], [GoingOn(key, 2) for key in "ab"]
    async with engine(model) as loop:
        async with paused_forward(model, loop):
            for previous, task in zip(first, second, strict=True):
                loop.follow(previous, task)
            futures = await submitted(loop, *first)
        texts = [[*await future, *await loop.run(task)] for future, task in zip(futures, second, strict=True)]
    assert texts == [generated([ord(key) % 50], 4) for key in "ab"]
    assert model.forwards == [{"plug": 1}] + 4 * [{"a": 1, "b": 1}]


async def test_a_task_may_follow_one_that_has_ended() -> None:
    async with engine(ToyModel()) as loop:
        previous, task = Generation("a", [7], 3), GoingOn("a", 2)
        text = await loop.run(previous)
        loop.follow(previous, task)
        assert [*text, *await loop.run(task)] == generated([7], 5)


async def test_a_chain_of_tasks_is_begun_ahead() -> None:
    async with engine(ToyModel()) as loop:
        tasks: list[Generation] = [Generation("a", [7])]
        for _ in range(5):
            tasks.append(GoingOn("a"))
            loop.follow(tasks[-2], tasks[-1])
        text = [token for task in tasks for token in await loop.run(task)]
    assert text == generated([7], 6)


async def test_a_task_fails_with_the_one_that_it_follows() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        previous, task = Generation("a", [7], start=5), GoingOn("a")  # nothing is cached
        loop.follow(previous, task)
        results = await asyncio.gather(loop.run(previous), loop.run(task), return_exceptions=True)
    assert all(isinstance(result, EngineError) for result in results)
    assert model.forwards == []


@pytest.mark.parametrize("how", ["dropped", "forgotten", "cancelled"])
async def test_what_nobody_will_ask_for_is_not_run(how: str) -> None:
    model = ToyModel()
    async with engine(model) as loop:
        previous, task = Generation("a", [7]), GoingOn("a", 100)
        async with paused_forward(model, loop):
            (future,) = await submitted(loop, previous)
            loop.follow(previous, task)
            if how == "dropped":
                loop.drop(task)
            elif how == "forgotten":
                loop.forget("a")
            else:
                awaiting = asyncio.ensure_future(loop.run(task))
                await asyncio.sleep(0)
                awaiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await awaiting
        assert await future == generated([7], 1)
        assert await loop.run(Generation("b", [8])) == generated([8], 1)
    assert sum("a" in forward for forward in model.forwards) == 1
    assert model.cache.open("a").num_pins == 0


async def test_a_task_that_is_not_wanted_after_all_is_not_run() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        previous, task = Generation("a", [7]), NotWanted("a")
        loop.follow(previous, task)
        assert await loop.run(previous) == generated([7], 1)
        with pytest.raises(EngineError, match="another task follows"):
            await loop.run(task)
        assert await loop.run(Generation("b", [8])) == generated([8], 1)
    assert model.forwards == [{"a": 1}, {"b": 1}]


async def test_a_dropped_task_ends_in_mid_run() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        previous, task = Generation("a", [7]), GoingOn("a", 10**6)
        loop.follow(previous, task)
        await loop.run(previous)
        loop.drop(task)
        with pytest.raises(EngineError, match="nobody awaits"):
            await loop.run(task)
        assert (loop.load.num_running, loop.load.num_waiting) == (0, 0)


async def test_stopping_ends_what_follows() -> None:
    model = ToyModel()
    loop: EngineLoop[Any] = EngineLoop(model, decode)
    loop.start()
    running, task, late = Generation("a", [7], 10**6), GoingOn("a"), GoingOn("a")
    loop.follow(running, task)
    futures = [asyncio.ensure_future(loop.run(each)) for each in (running, task)]
    await asyncio.sleep(0.01)
    await asyncio.to_thread(loop.stop)
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert all(isinstance(result, EngineError) for result in results), results
    loop.follow(running, late)
    with pytest.raises(EngineError, match="not running"):
        await loop.run(late)


async def test_a_turn_ends_though_rounds_follow_without_a_pause() -> None:
    """Who waits for a place gets it when a resident's turn is over, also from one that is never seen idle."""
    model = ToyModel(num_blocks=130)  # room for one of the two
    async with engine(model, turn_s=0.01) as loop:
        resident: list[Generation] = [Generation("a", [7] * 800)]
        async with paused_forward(model, loop):
            for _ in range(100):
                resident.append(GoingOn("a"))
                loop.follow(resident[-2], resident[-1])
            futures = await submitted(loop, resident[0], Generation("b", [8] * 800))
        await futures[1]
        with pytest.raises(EngineError, match="it follows failed"):
            await loop.run(resident[-1])


async def test_a_chain_fails_as_a_whole() -> None:
    async with engine(ToyModel()) as loop:
        tasks: list[Generation] = [Generation("a", [7], start=5)]  # nothing is cached
        for _ in range(3):
            tasks.append(GoingOn("a"))
            loop.follow(tasks[-2], tasks[-1])
        results = await asyncio.gather(*map(loop.run, tasks), return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        late = GoingOn("a")
        loop.follow(tasks[-1], late)
        with pytest.raises(EngineError, match="it follows failed"):
            await loop.run(late)


async def test_only_tasks_count_as_waiting() -> None:
    model = ToyModel()
    async with engine(model) as loop:
        async with paused_forward(model, loop):
            for _ in range(5):
                loop.forget("nobody")
            assert loop.load.num_waiting == 0
            (future,) = await submitted(loop, Generation("a", [1]))
            assert loop.load.num_waiting == 1
        await future
