"""The KV cache: a fixed budget of blocks, one contiguous run of blocks for each sequence.

A run is contiguous so that a sequence's keys and values are views, never gathered. A run that cannot grow in place
moves to a larger gap; when no gap is large enough, all runs slide together. Both are plain copies at memory speed, and
both happen while room is reserved, so views taken after the last reservation of a batch stay valid for its forward.
"""

from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch

from specdec.engine.errors import CacheFull, EngineError


class LayerShape(NamedTuple):
    """What one attention layer stores for a token."""

    num_heads: int
    key_size: int
    value_size: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that one token takes in this layer."""
        return self.num_heads * (self.key_size + self.value_size) * dtype.itemsize


class Sequence:
    """One token sequence's claim on the cache. Made by `KvCache.open`; used on the engine thread only."""

    def __init__(self, cache: "KvCache", key: str) -> None:
        self.key = key
        self._cache = cache
        self._length = 0
        self.first_block = 0
        self.num_blocks = 0
        self.num_pins = 0

    def __repr__(self) -> str:
        return f"Sequence({self.key!r}, length={self._length}, blocks={self.first_block}+{self.num_blocks})"

    @property
    def length(self) -> int:
        """Tokens whose keys and values are cached. 0 after an eviction."""
        return self._length

    @property
    def first_slot(self) -> int:
        """Index of the first token's row in every layer's pool."""
        return self.first_block * self._cache.block_tokens

    def reserve(self, length: int) -> None:
        """Hold blocks for `length` tokens, evicting idle sequences if need be.

        Raises CacheFull, with nothing changed, when pinned sequences leave too little room.
        """
        self._cache._reserve(self, length)

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` more tokens as cached; their room must be reserved."""
        length = self._length + num_tokens
        if length > self.num_blocks * self._cache.block_tokens:
            raise EngineError(f"sequence {self.key!r} has no room reserved for {length} tokens; reserve it first")
        self._length = length

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and free the blocks behind them, reserved ones included.

        Raises EngineError when `length` is negative or more than is cached.
        """
        if not 0 <= length <= self._length:
            raise EngineError(f"sequence {self.key!r} holds {self._length} tokens and cannot be truncated to {length}")
        self._length = length
        self._cache._shrink(self)

    def pin(self) -> None:
        """Keep the sequence from being evicted until `unpin`. Pins count."""
        self.num_pins += 1

    def unpin(self) -> None:
        """Take back one `pin`."""
        self.num_pins -= 1

    def close(self) -> None:
        """Free everything. The sequence is empty afterwards."""
        self.truncate(0)


class LayerPool:
    """One layer's storage for all sequences; row = slot of one token."""

    def __init__(self, shape: LayerShape, num_slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.keys = torch.empty(num_slots, shape.num_heads, shape.key_size, dtype=dtype, device=device)
        self.values = torch.empty(num_slots, shape.num_heads, shape.value_size, dtype=dtype, device=device)
        self.keys_by_head = self.keys.transpose(0, 1)[None]  # [1, kv_heads, num_slots, key_size], the same memory
        self.values_by_head = self.values.transpose(0, 1)[None]  # [1, kv_heads, num_slots, value_size]


class KvCache:
    """Keys and values of many sequences within `num_bytes`. Not thread-safe: it belongs to the engine thread."""

    def __init__(
        self,
        shapes: Iterable[LayerShape],
        *,
        num_bytes: int,
        block_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shapes = list(shapes)
        self.block_tokens = block_tokens
        block_bytes = block_tokens * sum(shape.num_bytes(dtype) for shape in shapes)
        self.num_blocks = num_bytes // block_bytes
        if self.num_blocks < 1:
            raise CacheFull(
                f"a KV cache of {num_bytes} bytes holds not one block of {block_tokens} tokens "
                f"({block_bytes} bytes); give it more bytes"
            )
        num_slots = self.num_blocks * block_tokens
        try:
            self.layers = [LayerPool(shape, num_slots, dtype, device) for shape in shapes]
        except RuntimeError as error:  # what torch raises on CPUs; on GPUs a subclass of it
            raise CacheFull(f"a KV cache of {num_bytes} bytes does not fit into memory; give it fewer") from error
        self._pools = [pool for layer in self.layers for pool in (layer.keys, layer.values)]
        self._open: WeakValueDictionary[str, Sequence] = WeakValueDictionary()
        self._holders: dict[Sequence, None] = {}  # sequences that hold blocks, least recently used first
        self._num_used_blocks = 0

    def open(self, key: str) -> Sequence:
        """Return the sequence called `key`: what is still cached of it, or an empty one.

        Whoever knows a key can read its sequence: build keys from names that callers cannot choose for one another.
        """
        sequence = self._open.get(key)
        if sequence is None:
            sequence = self._open[key] = Sequence(self, key)
        return sequence

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that hold blocks, least recently used first."""
        return list(self._holders)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.num_blocks - self._num_used_blocks

    @property
    def num_tokens(self) -> int:
        """The longest sequence that fits, alone, in the whole cache."""
        return self.num_blocks * self.block_tokens

    @property
    def usage(self) -> float:
        """Held blocks over all blocks, 0 to 1."""
        return self._num_used_blocks / self.num_blocks

    def num_blocks_for(self, length: int) -> int:
        """Return how many blocks `length` tokens take."""
        return -(-length // self.block_tokens)

    def _reserve(self, sequence: Sequence, length: int) -> None:
        needed = self.num_blocks_for(length)
        if needed > sequence.num_blocks:
            self._make_room(sequence, needed)
            self._place(sequence, needed)
        if sequence.num_blocks:
            self._holders.pop(sequence, None)
            self._holders[sequence] = None

    def _make_room(self, sequence: Sequence, needed: int) -> None:
        """Evict the least recently used idle sequences until `needed` blocks are free or the sequence's own."""
        missing = needed - sequence.num_blocks - self.num_free_blocks
        if missing <= 0:
            return
        idle = [other for other in self._holders if other.num_pins == 0 and other is not sequence]
        if sum(other.num_blocks for other in idle) < missing:
            raise CacheFull(
                f"the KV cache of {self.num_blocks} blocks has no room for {needed} blocks of one sequence "
                f"({self.num_free_blocks} free); wait for others to finish or give it more bytes"
            )
        for other in idle:
            if missing <= 0:
                break
            missing -= other.num_blocks
            other.close()

    def _place(self, sequence: Sequence, needed: int) -> None:
        """Give the sequence a run of `needed` blocks: in place, else in the largest gap, else after sliding."""
        if not self._can_grow(sequence, needed):
            first, size = max(self._gaps(), key=lambda gap: gap[1], default=(0, 0))
            if size < needed:
                self._slide_together(last=sequence)
            else:
                # the middle of the gap: both this run and the one before it keep room to grow
                self._move(sequence, first if first == 0 else first + (size - needed) // 2)
        self._num_used_blocks += needed - sequence.num_blocks
        sequence.num_blocks = needed

    def _can_grow(self, sequence: Sequence, needed: int) -> bool:
        if sequence.num_blocks == 0:
            return False
        behind = [run.first_block for run in self._holders if run.first_block > sequence.first_block]
        return sequence.first_block + needed <= min(behind, default=self.num_blocks)

    def _gaps(self) -> list[tuple[int, int]]:
        """Return the free runs as (first block, size)."""
        gaps, end = [], 0
        for run in sorted(self._holders, key=lambda run: run.first_block):
            gaps.append((end, run.first_block - end))
            end = run.first_block + run.num_blocks
        gaps.append((end, self.num_blocks - end))
        return gaps

    def _slide_together(self, last: Sequence) -> None:
        """Move every run to the front, `last` behind all others, so that all free blocks follow it."""
        kept = self._copy(last)
        end = 0
        for run in sorted(self._holders, key=lambda run: run.first_block):
            if run is not last:
                self._move(run, end)
                end += run.num_blocks
        last.first_block = end
        self._paste(last, kept)

    def _move(self, sequence: Sequence, first_block: int) -> None:
        if first_block != sequence.first_block:
            kept = self._copy(sequence)
            sequence.first_block = first_block
            self._paste(sequence, kept)

    def _copy(self, sequence: Sequence) -> list[torch.Tensor]:
        rows = slice(sequence.first_slot, sequence.first_slot + sequence.length)
        return [pool[rows].clone() for pool in self._pools]

    def _paste(self, sequence: Sequence, kept: list[torch.Tensor]) -> None:
        rows = slice(sequence.first_slot, sequence.first_slot + sequence.length)
        for pool, content in zip(self._pools, kept, strict=True):
            pool[rows] = content

    def _shrink(self, sequence: Sequence) -> None:
        needed = self.num_blocks_for(sequence.length)
        self._num_used_blocks -= sequence.num_blocks - needed
        sequence.num_blocks = needed
        if needed == 0:
            self._holders.pop(sequence, None)
