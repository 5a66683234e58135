"""A KV pool for GPUs: pages of a fixed size, of which each sequence holds a list. Nothing that is stored ever moves.

A page that a sequence gets may hold numbers of the one that had it before; attention reads what its sequence wrote.
"""

from collections.abc import Iterable, Sequence

import torch

from specdec.engine.pool import LayerShape, allocating, num_blocks_within


class LayerPages:
    """One layer's storage for all sequences; slot = page * page tokens + place in the page."""

    def __init__(
        self, shape: LayerShape, num_pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        place = (num_pages, page_tokens, shape.num_heads)
        self.keys = torch.zeros(*place, shape.key_size, dtype=dtype, device=device)
        self.values = torch.zeros(*place, shape.value_size, dtype=dtype, device=device)
        self._by_slot = self.keys.flatten(0, 1), self.values.flatten(0, 1)  # [slots, kv_heads, size], the same memory

    def store(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [tokens, kv_heads, size] to `slots` [tokens], int64."""
        for stored, new in zip(self._by_slot, (key, value), strict=True):
            stored.index_copy_(0, slots, new.to(stored.dtype))

    def copy(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """Copy what lies in some slots to others; the two may overlap."""
        for stored in self._by_slot:
            stored[to_slots] = stored[from_slots]  # the right side is a copy


class PagedPool:
    """Keys and values of many sequences within `num_bytes`, and of one page more; a `KvPool`.

    That page, `scratch_page`, is no sequence's: what a padded forward computes for padding is written to it.
    Raises CacheFull if `num_bytes` is less than one page, or more than the device has.
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
        self.device = torch.device(device)
        self.num_blocks = self.scratch_page = num_blocks_within(num_bytes, shapes, block_tokens, dtype)
        with allocating(num_bytes):
            self.layers = [LayerPages(shape, self.num_blocks + 1, block_tokens, dtype, device) for shape in shapes]
        self._free = list(range(self.num_blocks - 1, -1, -1))  # the last is taken first
        self._pages: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """See `KvPool`."""
        return len(self._free)

    def num_blocks_of(self, key: str) -> int:
        """See `KvPool`."""
        return len(self._pages.get(key, ()))

    def pages(self, key: str) -> Sequence[int]:
        """Return the pages of a sequence, in the order of its tokens. Do not change them."""
        return self._pages[key]

    def slots(self, key: str, places: Iterable[int]) -> list[int]:
        """Return where the tokens at some places of a sequence lie."""
        pages, size = self._pages[key], self.block_tokens
        return [pages[place // size] * size + place % size for place in places]

    def resize(self, key: str, num_blocks: int) -> None:
        """See `KvPool`."""
        pages = self._pages.setdefault(key, [])
        while len(pages) < num_blocks:
            pages.append(self._free.pop())
        while len(pages) > num_blocks:
            self._free.append(pages.pop())
        if not pages:
            del self._pages[key]

    def compact(self, key: str, first: int, slots: Sequence[int]) -> None:
        """See `KvPool`."""
        to_slots = self.slots(key, range(first, first + len(slots)))
        moved = torch.tensor([self.slots(key, slots), to_slots], device=self.device)
        for layer in self.layers:
            layer.copy(moved[0], moved[1])
