"""The interface between the cache, which decides who holds how many blocks, and the storage of keys and values."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from specdec.engine.errors import CacheFull


class LayerShape(NamedTuple):
    """What one attention layer stores for a token."""

    num_heads: int
    key_size: int
    value_size: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that one token takes in this layer."""
        return self.num_heads * (self.key_size + self.value_size) * dtype.itemsize


class KvPool(Protocol):
    """Blocks of slots, one slot a token, for the keys and values of sequences that are known by their keys.

    Only the pool and its attention backend know where a sequence's slots are.
    """

    @property
    def block_tokens(self) -> int:
        """Slots of a block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        ...

    def num_blocks_of(self, key: str) -> int:
        """Return how many blocks a sequence holds; 0 for an unknown one."""
        ...

    def resize(self, key: str, num_blocks: int) -> None:
        """Let a sequence hold `num_blocks` blocks, of which enough are free; its first slots keep their contents."""
        ...

    def compact(self, key: str, first: int, slots: Sequence[int]) -> None:
        """Move a sequence's `slots`, increasing and from `first` on, to `first` and the slots after it."""
        ...


def num_blocks_within(num_bytes: int, shapes: Iterable[LayerShape], block_tokens: int, dtype: torch.dtype) -> int:
    """Return how many blocks `num_bytes` hold. Raises CacheFull if that is none."""
    block_bytes = block_tokens * sum(shape.num_bytes(dtype) for shape in shapes)
    num_blocks = num_bytes // block_bytes
    if num_blocks < 1:
        raise CacheFull(
            f"a KV cache of {num_bytes} bytes holds not one block of {block_tokens} tokens "
            f"({block_bytes} bytes); give it more bytes"
        )
    return num_blocks


@contextmanager
def allocating(num_bytes: int) -> Iterator[None]:
    """Raise CacheFull where the storage that is made meanwhile is more than the device has."""
    try:
        yield
    except RuntimeError as error:  # what torch raises on CPUs; on GPUs a subclass of it
        raise CacheFull(f"a KV cache of {num_bytes} bytes does not fit into memory; give it fewer") from error
