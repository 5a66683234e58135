"""What attention over paged sequences must know besides the tokens: one vector of numbers, copied to a GPU at once.

Attention runs over entries: some tokens of one sequence, which attend to the first `num_seen` of its cached tokens.
The chained tokens of a sequence are one entry, each of them seeing what comes before it. The tokens of a tree are
another, all of them seeing the text before the tree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.engine.attention import Segment
from specdec.engine.paged_pool import PagedPool
from specdec.exact.tree import ancestor_matrix

Numbers = NDArray[np.int32]


class Entry(NamedTuple):
    """Some tokens of one sequence."""

    rows: range  # of the packed row
    num_seen: int
    pages: Sequence[int]


@dataclass(slots=True)
class PagedRow:
    """The entries of a forward."""

    page_tokens: int
    slots: list[int] = field(default_factory=list)  # [tokens]: where their keys and values are written
    positions: list[int] = field(default_factory=list)  # [tokens]
    chains: list[Entry] = field(default_factory=list)
    trees: list[Entry] = field(default_factory=list)
    parents: list[tuple[int, ...]] = field(default_factory=list)  # of each tree

    def add(self, segment: Segment, pool: PagedPool) -> None:
        """Add a sequence's new tokens."""
        begin, pages = len(self.slots), pool.pages(segment.key)
        self.slots += pool.slots(segment.key, range(segment.past, segment.total))
        self.positions += segment.positions
        root = begin + segment.tree_start - segment.past
        if root > begin:
            self.chains.append(Entry(range(begin, root), segment.tree_start, pages))
        if segment.parents:
            self.trees.append(Entry(range(root, len(self.slots)), segment.tree_start, pages))
            self.parents.append(segment.parents)

    def pad(self, num_tokens: int, num_sequences: int, max_each: int, page: int) -> None:
        """Fill up to so many tokens and sequences; what is filled in reads and writes `page`, no sequence's own."""
        while len(self.chains) < num_sequences:
            begin = len(self.slots)
            rows = range(begin, min(num_tokens, begin + max_each))
            self.slots += [page * self.page_tokens + row % self.page_tokens for row in rows]
            self.positions += [0] * len(rows)
            num_seen = max(1, len(rows))  # see `varlen.py`: every sequence has a key
            self.chains.append(Entry(rows, num_seen, [page] * self._num_pages(num_seen)))

    @property
    def max_pages(self) -> int:
        """Pages of the entry that sees the most tokens."""
        return max(self._num_pages(entry.num_seen) for entry in chain(self.chains, self.trees))

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def numbers(self, num_pages: int | None = None) -> dict[str, Numbers]:
        """Return everything that the forward's attention depends on, by name; tables are `num_pages` wide."""
        return dict(self._numbers(num_pages or self.max_pages))

    def _numbers(self, num_pages: int) -> Iterator[tuple[str, Numbers]]:
        yield "slots", _numbers(self.slots)
        yield from call_numbers("chain", self.chains, num_pages)
        if self.trees:
            yield "chain_rows", _numbers(row for entry in self.chains for row in entry.rows)
            yield "tree_rows", _numbers(row for entry in self.trees for row in entry.rows)
            yield from call_numbers("tree", self.trees, num_pages)
            yield from self._tree_numbers()

    def _tree_numbers(self) -> Iterator[tuple[str, Numbers]]:
        """Give the trees, each padded to the size of the largest; padding repeats a tree's first token."""
        sizes = [len(parents) for parents in self.parents]
        count, size = len(sizes), max(sizes)
        nodes, mask = np.zeros((count, size), np.int32), np.zeros((count, size, size), np.int32)
        for tree, (begin, parents) in enumerate(zip(accumulate(sizes, initial=0), self.parents, strict=False)):
            nodes[tree] = begin
            nodes[tree, : len(parents)] += np.arange(len(parents), dtype=np.int32)
            mask[tree, : len(parents), : len(parents)] = ancestor_matrix(parents)
        yield "tree_positions", _numbers(self.positions[row] for entry in self.trees for row in entry.rows)
        yield "tree_nodes", nodes
        yield "tree_mask", mask
        yield "tree_places", _numbers(tree * size + node for tree, count in enumerate(sizes) for node in range(count))


def call_numbers(name: str, entries: Sequence[Entry], num_pages: int) -> Iterator[tuple[str, Numbers]]:
    """Give what one attention call over some entries takes."""
    tables = np.zeros((len(entries), num_pages), np.int32)
    for table, entry in zip(tables, entries, strict=True):
        pages = entry.pages[:num_pages]
        table[: len(pages)] = pages
    yield f"{name}_cu_q", _numbers(accumulate((len(entry.rows) for entry in entries), initial=0))
    yield f"{name}_cu_k", _numbers(accumulate((entry.num_seen for entry in entries), initial=0))
    yield f"{name}_used", _numbers(entry.num_seen for entry in entries)
    yield f"{name}_tables", tables


def _numbers(values: "Sequence[int] | Iterator[int]") -> Numbers:
    return np.fromiter(values, np.int32)


class DeviceNumbers:
    """Named arrays of int32 that lie side by side on the device, so that one copy fills all of them."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        # not pinned: a copy from pinned memory would still be read when the next forward's numbers are written to it
        self._host = torch.zeros(sum(sizes), dtype=torch.int32)
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._written = dict(zip(shapes, torch.split(self._host, sizes), strict=True))
        parts = zip(shapes.items(), torch.split(self._device, sizes), strict=True)
        self._arrays = {name: part.view(shape) for (name, shape), part in parts}

    @classmethod
    def of(cls, numbers: Mapping[str, Numbers], device: torch.device) -> "DeviceNumbers":
        """Return arrays with these contents."""
        made = cls({name: array.shape for name, array in numbers.items()}, device)
        made.fill(numbers)
        return made

    def fill(self, numbers: Mapping[str, Numbers]) -> None:
        """Write all arrays."""
        for name, array in numbers.items():
            self._written[name].copy_(torch.from_numpy(array).flatten())
        if self._device is not self._host:
            self._device.copy_(self._host)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return an array on the device."""
        return self._arrays[name]
