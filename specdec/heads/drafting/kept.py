"""A session's keys and values: those of observed positions, and behind them, for one round, those of draft tokens."""

from collections.abc import Sequence

import torch

MIN_CAPACITY = 256  # entries


class KeptKeys:
    """Keys and values of entries with ascending positions. Only what is kept outlives a round; the rest is scratch."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_size: int, like: torch.Tensor) -> None:
        self.positions: list[int] = []  # of kept entries
        self._content = like.new_empty(num_layers, 2, 0, num_kv_heads, head_size)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._content.numel() * self._content.element_size()

    @property
    def last(self) -> int:
        """The last kept position; -1: none."""
        return self.positions[-1] if self.positions else -1

    def reserve(self, num_entries: int) -> None:
        """Make room for entries behind those kept."""
        needed, capacity = len(self) + num_entries, self._content.shape[2]
        if needed > capacity:
            grown = list(self._content.shape)
            grown[2] = max(MIN_CAPACITY, 2 * needed)
            content = self._content.new_empty(grown)
            content[:, :, :capacity] = self._content
            self._content = content

    def write(self, layer: int, begin: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [N, kv_heads, head_size] of the entries from `begin` on; there must be room."""
        end = begin + len(key)
        self._content[layer, 0, begin:end] = key
        self._content[layer, 1, begin:end] = value

    def read(self, layer: int, num_entries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first keys and values, [kv_heads, num_entries, head_size], without copying."""
        keys, values = self._content[layer, :, :num_entries].transpose(1, 2)
        return keys, values

    def storage(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all that is there of keys and values, [entries, kv_heads, head_size], for a kernel of our own."""
        return self._content[layer, 0], self._content[layer, 1]

    def keep(self, positions: Sequence[int]) -> None:
        """Keep the entries at these positions, which were written behind those kept."""
        self.positions += positions

    def truncate(self, end: int) -> None:
        """Drop what is at position `end` or after it."""
        while self.positions and self.positions[-1] >= end:
            self.positions.pop()
