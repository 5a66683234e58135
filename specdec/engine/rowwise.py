"""Attention of which a token's bits depend on its own text alone, however many tokens are fed with it.

A kernel's sums depend on the shape that it is given, so each new token is a call of its own, with the keys that it sees
and no others. That costs nothing where each session feeds one token. A node of a tree may see slots that do not lie
side by side, which are gathered first.
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
        parts = [part for segment in segments for part in _parts(segment, self.pool.first_slot(segment.key))]
        return SdpaPlan(parts, self.pool.layers)


def _parts(segment: Segment, first_slot: int) -> Iterator[Part]:
    """Give each new token's own part, in the order of the slots."""
    for slot in range(segment.past, segment.tree_start):
        yield Part(Segment(segment.key, slot, 1), first_slot)
    paths: list[list[int]] = [[]]  # the slots of the tree from its root to each node; the root is before the tree
    for slot, parent in enumerate(segment.parents, segment.tree_start):
        paths.append([*paths[parent], slot])
        token = Segment(segment.key, slot, 1)
        is_chain = len(paths[-1]) == slot - segment.tree_start + 1
        yield Part(token, first_slot) if is_chain else _NodePart(token, first_slot, segment.tree_start, paths[-1])


class _NodePart(Part):
    """A token of a tree that does not see every slot before its own."""

    def __init__(self, token: Segment, first_slot: int, tree_start: int, path: list[int]) -> None:
        super().__init__(token, first_slot)
        self._visible = torch.tensor([*range(tree_start), *path]) + first_slot  # in the order of their positions

    def visible(self, layer: LayerPool, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Part`."""
        slots = self._visible if window is None else self._visible[-window:]
        slots = slots.to(layer.keys.device)
        keys, values = layer.keys.index_select(0, slots), layer.values.index_select(0, slots)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
