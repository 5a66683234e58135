"""The KV cache: exact accounting, no shared blocks, contents unchanged by evictions, moves and compactions."""

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.engine import CacheFull, ContiguousPool, EngineError, KvCache, LayerShape, Sequence
from specdec.exact.tree import path_to

SHAPES = [LayerShape(2, 3, 3), LayerShape(1, 4, 2)]  # layers may differ
BLOCK_TOKENS = 4
BLOCK_BYTES = BLOCK_TOKENS * (2 * 6 + 6) * 4


class Store:
    """A cache, and the pool from which tests read its contents."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = ContiguousPool(SHAPES, num_bytes=num_blocks * BLOCK_BYTES, block_tokens=BLOCK_TOKENS)
        self.cache = KvCache(self.pool)

    def append(self, sequence: Sequence, tokens: list[int], parents: tuple[int, ...] = ()) -> None:
        """Append tokens; write each token id as its keys and values in every layer."""
        sequence.reserve(sequence.length + len(tokens))
        begin = self.pool.first_slot(sequence.key) + sequence.length
        rows = slice(begin, begin + len(tokens))
        for layer_index, layer in enumerate(self.pool.layers):
            content = torch.tensor(tokens, dtype=torch.float32)[:, None, None] + 1000 * layer_index
            layer.keys[rows] = content
            layer.values[rows] = -content
        sequence.append(tokens, parents)

    def contents(self, sequence: Sequence) -> list[int]:
        """Return the token ids read from the attention views; assert that all layers agree."""
        if not sequence.length:
            return []
        first, length = self.pool.first_slot(sequence.key), sequence.length
        read = [layer.keys_by_head[0, -1, first : first + length, -1] for layer in self.pool.layers]
        for layer_index, (layer, keys) in enumerate(zip(self.pool.layers, read, strict=True)):
            assert torch.equal(keys - 1000 * layer_index, read[0])
            assert torch.equal(layer.values_by_head[0, 0, first : first + length, 0], -keys)
        return [int(token) for token in read[0].tolist()]

    def blocks(self, sequence: Sequence) -> range:
        """Return the blocks that a sequence holds."""
        count = self.pool.num_blocks_of(sequence.key)
        first = self.pool.first_slot(sequence.key) // BLOCK_TOKENS if count else 0
        return range(first, first + count)


class CacheMachine(RuleBasedStateMachine):
    """Random operations on several sequences; `held` models what each must contain."""

    new_store: ClassVar[Any] = Store  # a twin for another pool: `test_paged_pool.py`

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.store = self.new_store(num_blocks)
        self.cache = self.store.cache
        self.sequences = [self.cache.open(str(index)) for index in range(5)]
        self.held: list[list[int]] = [[] for _ in self.sequences]
        self.next_token = 0

    @rule(index=st.integers(0, 4), count=st.integers(1, 14))
    def append(self, index: int, count: int) -> None:
        tokens = self.new_tokens(count)
        if self.try_to_append(index, tokens):
            self.held[index] += tokens

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), size=st.integers(1, 9))
    def append_tree_and_keep_a_path(self, data: st.DataObject, size: int) -> None:
        index = data.draw(st.sampled_from([index for index, held in enumerate(self.held) if held]))
        sequence, base = self.sequences[index], len(self.held[index])
        parents = tuple(data.draw(st.integers(0, node)) for node in range(size))
        tokens = self.new_tokens(size)
        sequence.mark_committed(base)
        if self.try_to_append(index, tokens, parents):
            path = [tokens[node] for node in path_to(data.draw(st.integers(0, size - 1)) + 1, parents)]
            assert sequence.resume(base, path, num_committed=base + len(path)) == []
            self.held[index] += path

    def new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def try_to_append(self, index: int, tokens: list[int], parents: tuple[int, ...] = ()) -> bool:
        """Append; return whether there was room, which must be so if enough blocks are not pinned."""
        sequence = self.sequences[index]
        before = [self.store.blocks(other) for other in self.sequences]
        wanted = self.cache.num_blocks_for(sequence.length + len(tokens))
        num_pinned = sum(
            len(self.store.blocks(other)) for other in self.sequences if other.num_pins and other is not sequence
        )
        try:
            self.store.append(sequence, tokens, parents)
        except CacheFull:
            assert wanted + num_pinned > self.cache.num_blocks, "there was room"
            assert before == [self.store.blocks(other) for other in self.sequences]
            return False
        assert wanted + num_pinned <= self.cache.num_blocks
        self.record_evictions(index)
        return True

    def record_evictions(self, index: int) -> None:
        for other, sequence in enumerate(self.sequences):
            if other != index and sequence.length == 0 and self.held[other]:
                assert sequence.num_pins == 0, "a pinned sequence was evicted"
                self.held[other] = []

    @rule(index=st.integers(0, 4), data=st.data())
    def truncate(self, index: int, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.held[index])))
        self.sequences[index].truncate(length)
        del self.held[index][length:]

    @rule(index=st.integers(0, 4), extra=st.integers(1, 5))
    def truncate_upwards(self, index: int, extra: int) -> None:
        with pytest.raises(EngineError, match="cannot be truncated"):
            self.sequences[index].truncate(len(self.held[index]) + extra)

    @rule(index=st.integers(0, 4))
    def pin(self, index: int) -> None:
        self.sequences[index].pin()

    @precondition(lambda self: any(sequence.num_pins for sequence in self.sequences))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([sequence for sequence in self.sequences if sequence.num_pins])).unpin()

    @rule(index=st.integers(0, 4))
    def close(self, index: int) -> None:
        self.sequences[index].close()
        self.held[index] = []

    @invariant()
    def contents_are_what_was_appended(self) -> None:
        for sequence, held in zip(self.sequences, self.held, strict=True):
            assert list(sequence.tokens) == held
            assert self.store.contents(sequence) == held

    @invariant()
    def no_block_is_shared_or_lost(self) -> None:
        blocks = [block for sequence in self.sequences for block in self.store.blocks(sequence)]
        assert len(blocks) == len(set(blocks))
        assert all(0 <= block < self.cache.num_blocks for block in blocks)
        assert len(blocks) + self.cache.num_free_blocks == self.cache.num_blocks
        assert self.cache.usage == len(blocks) / self.cache.num_blocks

    @invariant()
    def no_surplus_blocks_are_held(self) -> None:
        for sequence, held in zip(self.sequences, self.held, strict=True):
            assert len(self.store.blocks(sequence)) == -(-len(held) // BLOCK_TOKENS)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=6))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_growing_sequences_keep_their_contents(lengths: list[int]) -> None:
    store = Store(sum(-(-2 * length // BLOCK_TOKENS) for length in lengths))  # exactly enough, so they must move
    sequences = [store.cache.open(str(index)) for index in range(len(lengths))]
    for part in (0, 1):
        for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            store.append(sequence, [100 * index + 10 * part + offset for offset in range(length)])
    for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        assert store.contents(sequence) == [
            100 * index + 10 * part + offset for part in (0, 1) for offset in range(length)
        ]
    assert store.cache.num_free_blocks == 0


def test_least_recently_used_idle_sequence_is_evicted() -> None:
    store = Store(3)
    old, pinned, recent = (store.cache.open(name) for name in ("old", "pinned", "recent"))
    for sequence in (old, pinned, recent):
        store.append(sequence, [1])
    store.append(old, [2])  # used again: no longer the oldest
    pinned.pin()
    store.append(store.cache.open("new"), [3])
    assert (old.length, pinned.length, recent.length) == (2, 1, 0)


def test_no_more_sequences_are_evicted_than_needed() -> None:
    store = Store(4)
    for name in "abcd":
        store.append(store.cache.open(name), [1])
    store.append(store.cache.open("new"), [1] * 5)
    assert [sequence.key for sequence in store.cache.sequences] == ["c", "d", "new"]


def test_failed_reservation_evicts_nothing() -> None:
    store = Store(3)
    idle, pinned = store.cache.open("idle"), store.cache.open("pinned")
    store.append(idle, [1])
    store.append(pinned, [1])
    pinned.pin()
    with pytest.raises(CacheFull, match="no room for 3 blocks"):
        store.cache.open("new").reserve(3 * BLOCK_TOKENS)
    assert idle.length == 1


def test_cache_larger_than_memory_is_refused() -> None:
    with pytest.raises(CacheFull, match=f"a KV cache of {1 << 60} bytes does not fit into memory; give it fewer"):
        ContiguousPool([LayerShape(1, 64, 64)], num_bytes=1 << 60, block_tokens=32)


def test_cached_sequences_survive_garbage_collection() -> None:
    store = Store(2)
    store.append(store.cache.open("a"), [7, 8])
    gc.collect()
    assert store.contents(store.cache.open("a")) == [7, 8]


def test_closed_sequence_is_found_while_referenced() -> None:
    cache = Store(2).cache
    closed = cache.open("a")
    closed.close()
    gc.collect()
    assert cache.open("a") is closed
    reference = weakref.ref(closed)
    del closed
    gc.collect()
    assert reference() is None
