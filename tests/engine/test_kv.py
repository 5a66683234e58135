"""The cache: exact accounting, no shared blocks, and contents that survive whatever happens to the neighbours."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.engine import CacheFull, EngineError, KvCache, Sequence
from specdec.engine.kv import LayerShape

SHAPES = [LayerShape(2, 3, 3), LayerShape(1, 4, 2)]  # layers may differ
BLOCK_TOKENS = 4
BLOCK_BYTES = BLOCK_TOKENS * (2 * 6 + 6) * 4


def make_cache(num_blocks: int) -> KvCache:
    return KvCache(SHAPES, num_bytes=num_blocks * BLOCK_BYTES, block_tokens=BLOCK_TOKENS)


def append(cache: KvCache, sequence: Sequence, tokens: list[float]) -> None:
    """Cache one recognisable number a token, in every layer."""
    length = sequence.length
    sequence.reserve(length + len(tokens))
    rows = slice(sequence.first_slot + length, sequence.first_slot + length + len(tokens))
    for layer_index, layer in enumerate(cache.layers):
        content = torch.tensor(tokens)[:, None, None] + 1000 * layer_index
        layer.keys[rows] = content
        layer.values[rows] = -content
    sequence.advance(len(tokens))


def contents(cache: KvCache, sequence: Sequence) -> list[float]:
    """What was appended, read through the views that attention reads; all layers must agree."""
    first, length = sequence.first_slot, sequence.length
    read = [layer.keys_by_head[0, -1, first : first + length, -1] for layer in cache.layers]
    for layer_index, (layer, keys) in enumerate(zip(cache.layers, read, strict=True)):
        assert torch.equal(keys - 1000 * layer_index, read[0])
        assert torch.equal(layer.values_by_head[0, 0, first : first + length, 0], -keys)
    return read[0].tolist()


class CacheMachine(RuleBasedStateMachine):
    """Many sequences come, grow, shrink, pin and go; a plain dictionary of lists says what each must hold."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.cache = make_cache(num_blocks)
        self.sequences = [self.cache.open(str(index)) for index in range(5)]
        self.held: list[list[float]] = [[] for _ in self.sequences]
        self.next_token = 0.0

    @rule(index=st.integers(0, 4), count=st.integers(1, 14))
    def append(self, index: int, count: int) -> None:
        sequence = self.sequences[index]
        tokens = [self.next_token + offset for offset in range(count)]
        self.next_token += count
        before = [(other.first_block, other.num_blocks) for other in self.sequences]
        wanted = self.cache.num_blocks_for(sequence.length + count)
        pinned = sum(other.num_blocks for other in self.sequences if other.num_pins and other is not sequence)
        try:
            append(self.cache, sequence, tokens)
        except CacheFull:
            assert wanted + pinned > self.cache.num_blocks, "there was room"
            assert before == [(other.first_block, other.num_blocks) for other in self.sequences]
            return
        assert wanted + pinned <= self.cache.num_blocks
        self.held[index] += tokens
        self.note_evictions(index)

    def note_evictions(self, index: int) -> None:
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
            assert sequence.length == len(held)
            assert contents(self.cache, sequence) == held

    @invariant()
    def no_block_is_shared_or_lost(self) -> None:
        blocks = [
            block
            for sequence in self.sequences
            for block in range(sequence.first_block, sequence.first_block + sequence.num_blocks)
        ]
        assert len(blocks) == len(set(blocks))
        assert all(0 <= block < self.cache.num_blocks for block in blocks)
        assert len(blocks) + self.cache.num_free_blocks == self.cache.num_blocks
        assert self.cache.usage == len(blocks) / self.cache.num_blocks

    @invariant()
    def blocks_are_just_enough(self) -> None:
        for sequence, held in zip(self.sequences, self.held, strict=True):
            assert sequence.num_blocks == -(-len(held) // BLOCK_TOKENS)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=6))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_growing_neighbours_keep_their_contents(lengths: list[int]) -> None:
    cache = make_cache(sum(-(-2 * length // BLOCK_TOKENS) for length in lengths))  # exactly enough: they must move
    sequences = [cache.open(str(index)) for index in range(len(lengths))]
    for part in (0, 1):
        for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            append(cache, sequence, [100.0 * index + 10 * part + offset for offset in range(length)])
    for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        assert contents(cache, sequence) == [
            100.0 * index + 10 * part + offset for part in (0, 1) for offset in range(length)
        ]
    assert cache.num_free_blocks == 0


def test_the_least_recently_used_idle_sequence_goes_first() -> None:
    cache = make_cache(3)
    old, pinned, recent = (cache.open(name) for name in ("old", "pinned", "recent"))
    for sequence in (old, pinned, recent):
        append(cache, sequence, [1.0])
    append(cache, old, [2.0])  # used again: no longer the oldest
    pinned.pin()
    append(cache, cache.open("new"), [3.0])
    assert (old.length, pinned.length, recent.length) == (2, 1, 0)


def test_only_as_many_go_as_must() -> None:
    cache = make_cache(4)
    for name in "abcd":
        append(cache, cache.open(name), [1.0])
    append(cache, cache.open("new"), [1.0] * 5)
    assert [sequence.key for sequence in cache.sequences] == ["c", "d", "new"]


def test_a_budget_past_the_memory_is_refused() -> None:
    with pytest.raises(CacheFull, match=f"a KV cache of {1 << 60} bytes does not fit into memory; give it fewer"):
        KvCache([LayerShape(1, 64, 64)], num_bytes=1 << 60, block_tokens=32)


def test_a_full_cache_evicts_nobody_in_vain() -> None:
    cache = make_cache(3)
    idle, pinned = cache.open("idle"), cache.open("pinned")
    append(cache, idle, [1.0])
    append(cache, pinned, [1.0])
    pinned.pin()
    with pytest.raises(CacheFull, match="no room for 3 blocks"):
        cache.open("new").reserve(3 * BLOCK_TOKENS)
    assert idle.length == 1


def test_a_key_names_one_sequence_until_it_holds_nothing_and_nobody_knows_it() -> None:
    cache = make_cache(2)
    append(cache, cache.open("a"), [7.0, 8.0])
    gc.collect()
    assert contents(cache, cache.open("a")) == [7.0, 8.0]
    known = cache.open("a")
    known.close()
    gc.collect()
    assert cache.open("a") is known
    del known
    gc.collect()
    assert (len(cache._open), cache.num_free_blocks) == (0, 2)


def test_advancing_needs_a_reservation() -> None:
    sequence = make_cache(2).open("a")
    with pytest.raises(EngineError, match="reserve it first"):
        sequence.advance(1)
