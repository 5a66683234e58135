"""Trees and hidden states through the engine's thread, on a toy model."""

import asyncio
from typing import Any

import pytest
import torch

from specdec.engine import (
    CacheMiss,
    EngineError,
    Task,
)
from tests.engine.toy_engine import (
    MODULUS,
    POISON,
    Generation,
    ToyModel,
    engine,
    generated,
    paused_forward,
    submitted,
)


class Scoring(Task[list[int]]):
    """One round of a target: the greedy token at the last committed token and at each draft token."""

    def __init__(
        self, start: int, committed: list[int], draft: list[int], parents: tuple[int, ...], **more: Any
    ) -> None:
        super().__init__("a", start, [*committed, *draft], len(draft) + 1, parents=parents, **more)
        self.committed = committed


def score(tasks: list[Any], logits: torch.Tensor) -> None:
    """Finish each task with the greedy tokens of its rows."""
    parts = torch.split(logits.argmax(-1), [task.num_rows for task in tasks])
    for task, rows in zip(tasks, parts, strict=True):
        task.finish(rows.tolist())


class TestTrees:
    """Rounds on one sequence: the text 1 2 3, then the tree 10 (20, 21), 11."""

    TREE = (10, 20, 21, 11)
    PARENTS = (0, 1, 1, 0)

    def first_round(self, **more: Any) -> Scoring:
        return Scoring(0, [1, 2, 3], list(self.TREE), self.PARENTS, **more)

    async def test_rows_follow_their_paths(self) -> None:
        async with engine(ToyModel(), score) as loop:
            assert await loop.run(self.first_round()) == [6, 16, 36, 37, 17]

    async def test_accepted_path_is_not_fed_again(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            assert await loop.run(Scoring(3, [10, 21, 5], [30], (0,))) == [42, 72]
            assert await loop.run(Scoring(6, [30, 7], [], ())) == [79]
        assert [forward["a"] for forward in model.forwards] == [7, 2, 1]

    async def test_repeated_rounds_feed_the_same_tokens(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            for _ in range(3):
                assert await loop.run(Scoring(3, [10, 21, 5], [30, 31], (0, 0))) == [42, 72, 73]
        assert [forward["a"] for forward in model.forwards] == [7, 3, 3, 3]

    @pytest.mark.parametrize("num_rows", [1, 91])
    async def test_trees_are_never_split(self, num_rows: int) -> None:
        model, prompt = ToyModel(), [1] * 150
        task = Task[list[int]]("a", 0, [*prompt, *[2] * 90], num_rows, parents=(0,) * 90)
        async with engine(model, score, max_batch_tokens=100, prefill_chunk_tokens=100) as loop:
            assert await loop.run(task) == ([150 % MODULUS] + [152 % MODULUS] * 90)[-num_rows:]
        assert sum(forward["a"] for forward in model.forwards) == 240

    async def test_failed_rounds_keep_the_accepted_path(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            with pytest.raises(EngineError, match="poisoned"):
                await loop.run(Scoring(3, [10, 20, 4], [POISON, 5], (0, 0)))
            assert list(model.cache.open("a").tokens) == [1, 2, 3, 10, 20]
            assert await loop.run(Scoring(3, [10, 20, 4], [6, 5], (0, 0))) == [40, 46, 45]
        assert [forward["a"] for forward in model.forwards] == [7, 3, 3]

    async def test_cancelled_rounds_can_be_repeated(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            await asyncio.to_thread(model.entered.acquire)
            model.gate.clear()
            (future,) = await submitted(loop, Scoring(3, [10, 20, 4], [5, 6], (0, 0)))
            await asyncio.to_thread(model.entered.acquire)  # the forward has begun
            future.cancel()
            await asyncio.wait([future])
            model.gate.set()
            assert await loop.run(Scoring(3, [10, 20, 4], [5, 6], (0, 0))) == [40, 45, 46]
        assert [forward["a"] for forward in model.forwards] == [7, 3, 3]

    async def test_rounds_cancelled_while_waiting_keep_the_tree(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            async with paused_forward(model, loop):
                (future,) = await submitted(loop, Scoring(3, [11, 4], [5], (0,)))
                future.cancel()
                await asyncio.wait([future])
            assert await loop.run(Scoring(3, [10, 21, 4], [], ())) == [41]
        assert [forward["a"] for forward in model.forwards if "a" in forward] == [7, 1]

    async def test_evicted_trees_are_reported(self) -> None:
        model = ToyModel(num_blocks=2)
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            await loop.run(Task("big", 0, [1] * 16, 1))
            with pytest.raises(CacheMiss) as missed:
                await loop.run(Scoring(3, [10, 4], [5], (0,)))
            assert missed.value.cached_len == 0
            assert await loop.run(Scoring(0, [1, 2, 3, 10, 4], [5], (0,))) == [20, 25]

    async def test_new_streams_keep_matching_tokens(self) -> None:
        model = ToyModel()
        async with engine(model, score) as loop:
            await loop.run(self.first_round())
            assert await loop.run(Scoring(0, [1, 2, 3, 10, 21, 9], [4], (0,), match=True)) == [46, 50]
        assert [forward["a"] for forward in model.forwards] == [7, 2]

    async def test_accepted_draft_is_not_fed_again(self) -> None:
        model = ToyModel()
        async with engine(model) as loop:
            drafted = await loop.run(Generation("a", [1, 2, 3], 3))
            assert drafted == generated([1, 2, 3], 3)
            await loop.run(Generation("a", [*drafted[:2], 7], 1, start=3))
        assert [forward["a"] for forward in model.forwards] == [3, 1, 1, 1]
        assert list(model.cache.open("a").tokens) == [1, 2, 3, *drafted[:2], 7]


class TestHiddenStates:
    async def observed(self, task: Task[Any], **options: int) -> torch.Tensor | None:
        seen: list[torch.Tensor | None] = []

        def observe(tasks: list[Task[Any]], logits: torch.Tensor) -> None:
            seen.extend(task.hidden_states for task in tasks)
            score(tasks, logits)

        async with engine(ToyModel(), observe, **options) as loop:
            await loop.run(task)
        return seen[0]

    @pytest.mark.parametrize("count", [1, 50, 150, 300])
    async def test_states_span_prefill_chunks(self, count: int) -> None:
        prompt = [index % 90 for index in range(300)]
        task = Task[Any]("a", 0, prompt, 1, hidden_layers=(0, 2), num_observed=count)
        states = await self.observed(task, max_batch_tokens=64, prefill_chunk_tokens=64)
        sums = torch.tensor(prompt).cumsum(0) % MODULUS
        assert states is not None
        assert torch.equal(states, torch.stack([sums, sums + 2], dim=1)[300 - count :, :, None])

    async def test_tree_states_include_the_root(self) -> None:
        task = Scoring(0, [1, 2, 3], [10, 20], (0, 0), hidden_layers=(1,), num_observed=3)
        states = await self.observed(task)
        assert states is not None
        assert states.flatten().tolist() == [7, 17, 27]

    async def test_no_states_unless_requested(self) -> None:
        assert await self.observed(Task[Any]("a", 0, [1, 2], 1)) is None
