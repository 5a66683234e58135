"""The KV cache: which sequences hold blocks of the pool, and which are evicted.

Idle sequences stay cached until their blocks are needed; the least recently used one is evicted first. Pinned ones, and
those of residents (`residency.py`), are not evicted.
"""

from collections.abc import Sequence as Slots
from weakref import WeakValueDictionary

from specdec.engine.errors import CacheFull
from specdec.engine.pool import KvPool
from specdec.engine.sequence import Sequence


class KvCache:
    """The sequences of a pool. Not thread-safe: it belongs to the engine thread."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._open: WeakValueDictionary[str, Sequence] = WeakValueDictionary()
        self._holders: dict[Sequence, None] = {}  # sequences that hold blocks, least recently used first

    def open(self, key: str) -> Sequence:
        """Return the sequence called `key`: what is still cached of it, or an empty one.

        A caller that knows a key can read its sequence: build keys from names that callers cannot choose freely.
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
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.num_free_blocks

    @property
    def num_tokens(self) -> int:
        """The length of the longest sequence that fits, alone, into the whole cache."""
        return self._pool.num_blocks * self._pool.block_tokens

    @property
    def usage(self) -> float:
        """Held blocks over all blocks, 0 to 1."""
        return (self.num_blocks - self.num_free_blocks) / self.num_blocks

    def num_blocks_for(self, length: int) -> int:
        """Return how many blocks `length` tokens take."""
        return -(-length // self._pool.block_tokens)

    def num_blocks_for_one(self, sequence: Sequence) -> int:
        """Return how many blocks `sequence` could hold: its own, the free ones, and those that can be evicted."""
        others = sum(self._pool.num_blocks_of(other.key) for other in self._evictable(sequence))
        return self._pool.num_blocks_of(sequence.key) + self._pool.num_free_blocks + others

    def _evictable(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that make room for `sequence`, least recently used first."""
        return [other for other in self._holders if other.is_evictable and other is not sequence]

    # --- what sequences call: see `sequence.Storage`

    def reserve(self, sequence: Sequence, length: int) -> None:
        """Hold blocks for `length` tokens; the sequence is now the most recently used one."""
        needed = self.num_blocks_for(length)
        if needed > self._pool.num_blocks_of(sequence.key):
            self._evict_for(sequence, needed)
            self._pool.resize(sequence.key, needed)
        if self._pool.num_blocks_of(sequence.key):
            self._holders.pop(sequence, None)
            self._holders[sequence] = None

    def num_reserved(self, sequence: Sequence) -> int:
        """Return how many tokens the blocks of `sequence` can hold."""
        return self._pool.num_blocks_of(sequence.key) * self._pool.block_tokens

    def compact(self, sequence: Sequence, first: int, slots: Slots[int]) -> None:
        """Move the contents of `slots` together."""
        self._pool.compact(sequence.key, first, slots)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks beyond the sequence's length."""
        needed = self.num_blocks_for(sequence.length)
        if needed < self._pool.num_blocks_of(sequence.key):
            self._pool.resize(sequence.key, needed)
        if needed == 0:
            self._holders.pop(sequence, None)

    def _evict_for(self, sequence: Sequence, needed: int) -> None:
        """Evict the least recently used idle sequences until `needed` blocks are free or the sequence's own."""
        missing = needed - self._pool.num_blocks_of(sequence.key) - self._pool.num_free_blocks
        if missing <= 0:
            return
        idle = self._evictable(sequence)
        if sum(self._pool.num_blocks_of(other.key) for other in idle) < missing:
            raise CacheFull(
                f"the KV cache of {self.num_blocks} blocks has no room for {needed} blocks of one sequence "
                f"({self.num_free_blocks} free); wait for others to finish or give it more bytes"
            )
        for other in idle:
            if missing <= 0:
                break
            missing -= self._pool.num_blocks_of(other.key)
            other.close()
