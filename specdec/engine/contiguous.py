"""A KV pool for CPUs: one contiguous run of blocks for each sequence.

A run is contiguous so that a sequence's keys and values are views, never gathered. A run that cannot grow in place
moves to a larger gap; when no gap is large enough, all runs slide together. Both are plain copies at memory speed, and
both happen while room is reserved, so views taken after the last reservation of a batch stay valid for its forward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from specdec.engine.helpers import ReadByHelpers
from specdec.engine.pool import LayerShape, allocating, num_blocks_within


class LayerPool(ReadByHelpers):
    """One layer's storage for all sequences; row = slot of one token."""

    def __init__(self, shape: LayerShape, num_slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.keys = torch.empty(num_slots, shape.num_heads, shape.key_size, dtype=dtype, device=device)
        self.values = torch.empty(num_slots, shape.num_heads, shape.value_size, dtype=dtype, device=device)
        self.keys_by_head = self.keys.transpose(0, 1)[None]  # [1, kv_heads, num_slots, key_size], the same memory
        self.values_by_head = self.values.transpose(0, 1)[None]  # [1, kv_heads, num_slots, value_size]


@dataclass(slots=True)
class _Run:
    """The blocks of one sequence."""

    first_block: int
    num_blocks: int

    @property
    def end(self) -> int:
        return self.first_block + self.num_blocks


class ContiguousPool:
    """Keys and values of many sequences within `num_bytes`; a `KvPool`.

    Raises CacheFull if `num_bytes` is less than one block, or more than the machine has.
    """

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
        self.num_blocks = num_blocks_within(num_bytes, shapes, block_tokens, dtype)
        num_slots = self.num_blocks * block_tokens
        with allocating(num_bytes):
            self.layers = [LayerPool(shape, num_slots, dtype, device) for shape in shapes]
        self._tensors = [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]
        self._runs: dict[str, _Run] = {}

    @property
    def num_free_blocks(self) -> int:
        """See `KvPool`."""
        # a copy, made at once: the load is read on other threads while the engine opens and closes sequences
        return self.num_blocks - sum(run.num_blocks for run in list(self._runs.values()))

    def num_blocks_of(self, key: str) -> int:
        """See `KvPool`."""
        run = self._runs.get(key)
        return run.num_blocks if run else 0

    def first_slot(self, key: str) -> int:
        """Return the row of the sequence's first token in every layer."""
        return self._runs[key].first_block * self.block_tokens

    def resize(self, key: str, num_blocks: int) -> None:
        """See `KvPool`."""
        if num_blocks == 0:
            self._runs.pop(key, None)
            return
        run = self._runs.setdefault(key, _Run(0, 0))
        if num_blocks > run.num_blocks and not self._can_grow(run, num_blocks):
            self._find_place(run, num_blocks)
        run.num_blocks = num_blocks

    def compact(self, key: str, first: int, slots: Sequence[int]) -> None:
        """See `KvPool`."""
        begin = self.first_slot(key)
        rows = torch.tensor(slots, device=self._tensors[0].device) + begin
        for tensor in self._tensors:
            tensor[begin + first : begin + first + len(slots)] = tensor[rows]  # the right side is a copy

    def _can_grow(self, run: _Run, num_blocks: int) -> bool:
        if run.num_blocks == 0:
            return False
        later = [other.first_block for other in self._runs.values() if other.first_block > run.first_block]
        return run.first_block + num_blocks <= min(later, default=self.num_blocks)

    def _find_place(self, run: _Run, num_blocks: int) -> None:
        """Move the run into the largest gap; where that is too small, compact all runs and append it."""
        first, size = max(self._gaps(), key=lambda gap: gap[1])
        if size < num_blocks:
            self._slide_together(last=run)
        else:
            # the middle of the gap: both this run and the one before it keep room to grow
            self._move(run, first if first == 0 else first + (size - num_blocks) // 2)

    def _gaps(self) -> list[tuple[int, int]]:
        """Return the free runs as (first block, size)."""
        gaps, end = [], 0
        for run in self._in_order():
            gaps.append((end, run.first_block - end))
            end = run.end
        gaps.append((end, self.num_blocks - end))
        return gaps

    def _in_order(self) -> list[_Run]:
        return sorted((run for run in self._runs.values() if run.num_blocks), key=lambda run: run.first_block)

    def _slide_together(self, last: _Run) -> None:
        """Move every run to the front, `last` after all others, so that all free blocks follow it."""
        contents = self._copy(last)
        end = 0
        for run in self._in_order():
            if run is not last:
                self._move(run, end)
                end = run.end
        last.first_block = end
        self._paste(last, contents)

    def _move(self, run: _Run, first_block: int) -> None:
        if first_block != run.first_block:
            contents = self._copy(run)
            run.first_block = first_block
            self._paste(run, contents)

    def _rows(self, run: _Run) -> slice:
        return slice(run.first_block * self.block_tokens, run.end * self.block_tokens)

    def _copy(self, run: _Run) -> list[torch.Tensor]:
        return [tensor[self._rows(run)].clone() for tensor in self._tensors]

    def _paste(self, run: _Run, contents: list[torch.Tensor]) -> None:
        for tensor, content in zip(self._tensors, contents, strict=True):
            tensor[self._rows(run)] = content
