"""Attention by torch's kernels, of which a token's bits depend on its own text alone: a call for each new token.

A kernel's sums depend on the shape that it is given: one token over its own text always gives the same one. That makes
prompts slow; `compiled.py` needs no such care, and serves where specdec was installed with a C compiler.
"""

from collections.abc import Iterator, Sequence

import torch

from specdec.engine.attention import Segment
from specdec.engine.contiguous import LayerPool
from specdec.engine.sdpa import Part, SdpaBackend, SdpaPlan


class RowwiseSdpaBackend(SdpaBackend):
    """Attends to a `ContiguousPool`, token by token; an `AttentionBackend`."""

    def plan(self, segments: Sequence[Segment]) -> SdpaPlan:
        """See `AttentionBackend`."""
        parts = [part for segment in segments for part in self._parts(segment)]
        return SdpaPlan(parts, self.pool.layers)

    def _parts(self, segment: Segment) -> Iterator[Part]:
        """Give the part of each new token, in the order of their slots."""
        first_slot = self.pool.first_slot(segment.key)
        for slot in range(segment.past, segment.tree_start):
            yield Part(Segment(segment.key, slot, 1), first_slot)
        paths: list[list[int]] = [[]]  # the slots of the tree from its root to each node; the root is before the tree
        for slot, parent in enumerate(segment.parents, segment.tree_start):
            paths.append([*paths[parent], slot])
            yield _Node(Segment(segment.key, slot, 1), first_slot, [*range(segment.tree_start), *paths[-1]])


class _Node(Part):
    """A token of a tree, over the slots of its own path alone."""

    def __init__(self, token: Segment, first_slot: int, seen: list[int]) -> None:
        super().__init__(token, first_slot)
        self._slots = torch.tensor(seen) + first_slot  # in the order of their positions

    def visible(self, layer: LayerPool, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Part`."""
        slots = self._slots if window is None else self._slots[-window:]
        keys, values = layer.keys.index_select(0, slots), layer.values.index_select(0, slots)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # lying in memory as the pool's do
