"""The paged pool: exact accounting, no shared pages, and nothing that is stored ever moves."""

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import invariant

from specdec.engine import CacheFull, KvCache, LayerShape, Sequence
from specdec.engine.paged_pool import PagedPool
from tests.engine.test_cache import BLOCK_BYTES, BLOCK_TOKENS, SHAPES, CacheMachine


class PagedStore:
    """As `test_cache.Store`, of a paged pool."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = PagedPool(SHAPES, num_bytes=num_blocks * BLOCK_BYTES, block_tokens=BLOCK_TOKENS)
        self.cache = KvCache(self.pool)

    def append(self, sequence: Sequence, tokens: list[int], parents: tuple[int, ...] = ()) -> None:
        sequence.reserve(sequence.length + len(tokens))
        places = range(sequence.length, sequence.length + len(tokens))
        slots = torch.tensor(self.pool.slots(sequence.key, places))
        for index, (layer, shape) in enumerate(zip(self.pool.layers, SHAPES, strict=True)):
            content = torch.tensor(tokens, dtype=torch.float32)[:, None, None] + 1000 * index
            key = content.expand(-1, shape.num_heads, shape.key_size)
            layer.store(slots, key, -content.expand(-1, shape.num_heads, shape.value_size))
        sequence.append(tokens, parents)

    def contents(self, sequence: Sequence) -> list[int]:
        """Return the token ids read from the pages; assert that all layers agree."""
        slots = self.pool.slots(sequence.key, range(sequence.length)) if sequence.length else []
        read = [layer.keys.flatten(0, 1)[slots] for layer in self.pool.layers]
        for index, (layer, keys) in enumerate(zip(self.pool.layers, read, strict=True)):
            assert torch.equal(keys[:, 0, 0] - 1000 * index, read[0][:, 0, 0])
            assert torch.equal(layer.values.flatten(0, 1)[slots][:, 0, 0], -keys[:, -1, -1])
        return [int(token) for token in read[0][:, 0, 0].tolist()]

    def blocks(self, sequence: Sequence) -> list[int]:
        return list(self.pool.pages(sequence.key)) if self.pool.num_blocks_of(sequence.key) else []


class PagedMachine(CacheMachine):
    """The same random operations; besides, no page of a sequence is ever replaced by another."""

    new_store: ClassVar[Any] = PagedStore

    @invariant()
    def nothing_moves(self) -> None:
        tensors = [tensor for layer in self.store.pool.layers for tensor in (layer.keys, layer.values)]
        now = [self.store.blocks(sequence) for sequence in self.sequences]
        before, places = getattr(self, "seen", (now, [tensor.data_ptr() for tensor in tensors]))
        assert places == [tensor.data_ptr() for tensor in tensors]
        for old, new in zip(before, now, strict=True):
            kept = min(len(old), len(new))
            assert old[:kept] == new[:kept]
        self.seen = (now, places)


TestPagedMachine = PagedMachine.TestCase
TestPagedMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)


def test_pages_are_kept_while_others_come_and_go() -> None:
    store = PagedStore(8)
    kept, leaves, grows = (store.cache.open(name) for name in ("kept", "leaves", "grows"))
    for sequence in (kept, leaves, grows):
        store.append(sequence, [1, 2, 3, 4, 5])
    pages = store.blocks(kept)
    leaves.close()
    store.append(grows, list(range(10, 20)))
    store.append(kept, [6, 7, 8, 9])
    assert store.blocks(kept)[:2] == pages
    assert len(set(store.blocks(kept) + store.blocks(grows))) == 7
    assert store.contents(kept) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_scratch_page_belongs_to_nobody() -> None:
    store = PagedStore(3)
    store.append(store.cache.open("all"), list(range(3 * BLOCK_TOKENS)))
    assert store.cache.num_free_blocks == 0
    assert store.pool.scratch_page not in store.blocks(store.cache.open("all"))
    assert store.pool.layers[0].keys.shape[0] == store.pool.scratch_page + 1


@pytest.mark.parametrize(("num_bytes", "message"), [(1 << 60, "fit into memory"), (BLOCK_BYTES - 1, "not one block")])
def test_impossible_sizes_are_refused(num_bytes: int, message: str) -> None:
    with pytest.raises(CacheFull, match=message):
        PagedPool(SHAPES, num_bytes=num_bytes, block_tokens=BLOCK_TOKENS)


def test_layers_may_be_of_half_precision() -> None:
    pool = PagedPool([LayerShape(1, 2, 2)], num_bytes=64, block_tokens=4, dtype=torch.bfloat16)
    pool.layers[0].store(torch.tensor([5]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    assert pool.layers[0].keys.flatten(0, 1)[5].tolist() == [[1.0, 1.0]]
