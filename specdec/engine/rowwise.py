"""Attention of which a token's bits depend on its own text alone, however many tokens are fed with it.

A kernel's sums depend on the shape that it is given. So a token's attention is defined by a call for it alone, over
whole blocks of its sequence's slots, of which a mask hides those after it; what lies there is finite, as new blocks
are cleared. Neighbouring tokens share a call only where that was seen to give the same bits: `JointCalls`
compares them for each form of heads, when a model is loaded. Layers with a window, a soft cap or sinks take each token
by itself. A node of a tree may see slots that do not lie side by side, which are gathered first.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec.engine.attention import AttentionOptions, PoolOptions, Segment
from specdec.engine.contiguous import ContiguousPool, LayerPool
from specdec.engine.pool import LayerShape
from specdec.engine.sdpa import Part, SdpaBackend, SdpaPlan
from specdec.exact.tree import chain_length

ROWS = 4  # a multiple of these, or vendors' kernels for few rows sum in another order
MAX_ROWS = 32  # of a call, tokens times query heads of a KV head: one block of queries in torch's kernel
CHECKED_BLOCKS = (1, 2, 3, 5, 8, 12, 15, 16, 17, 24, 32, 33)  # torch's kernel takes 512 keys at once, 16 blocks of 32


class RowwiseSdpaBackend(SdpaBackend):
    """Attends to a `ClearedPool`, token by token or as if it did; an `AttentionBackend`."""

    def __init__(self, shapes: Sequence[LayerShape], options: PoolOptions) -> None:
        self.pool = ClearedPool(
            shapes,
            num_bytes=options.num_bytes,
            block_tokens=options.block_tokens,
            dtype=options.dtype,
            device=options.device,
        )
        self._joint = JointCalls(options.block_tokens)

    def plan(self, segments: Sequence[Segment]) -> SdpaPlan:
        """See `AttentionBackend`."""
        parts = [part for segment in segments for part in self._parts(segment)]
        return SdpaPlan(parts, self.pool.layers)

    def _parts(self, segment: Segment) -> Iterator[Part]:
        """Give the parts of a chain, and of each node of a tree, in the order of their slots."""
        first_slot = self.pool.first_slot(segment.key)
        num_linear = chain_length(segment.parents)
        num_chained = segment.num_tokens - len(segment.parents) + num_linear
        if num_chained:
            yield _InCalls(Segment(segment.key, segment.past, num_chained), first_slot, self._joint)
        paths: list[list[int]] = [[]]  # the slots of the tree from its root to each node; the root is before the tree
        for slot, parent in enumerate(segment.parents, segment.tree_start):
            paths.append([*paths[parent], slot])
            if len(paths) > num_linear + 1:
                seen = [*range(segment.tree_start), *paths[-1]]
                yield _NodeInCalls(Segment(segment.key, slot, 1), first_slot, self._joint, seen)


class ClearedPool(ContiguousPool):
    """A pool in which a sequence's slots hold finite numbers, also those that it has not written yet."""

    def resize(self, key: str, num_blocks: int) -> None:
        """See `KvPool`."""
        before = self.num_blocks_of(key)
        super().resize(key, num_blocks)
        if num_blocks > before:
            begin = self.first_slot(key)
            for layer in self.layers:
                for tensor in (layer.keys, layer.values):
                    tensor[begin + before * self.block_tokens : begin + num_blocks * self.block_tokens] = 0


class _PaddedPart(Part):
    """Neighbouring new tokens of a chain, over whole blocks of slots, in a multiple of ROWS rows."""

    def __init__(self, segment: Segment, first_slot: int, block_tokens: int) -> None:
        super().__init__(segment, first_slot)
        self._first_hidden = segment.past + 1  # from the first of the new tokens
        self._padded = -(-self.total // block_tokens) * block_tokens
        self._hidden: torch.Tensor | None = None

    def attend(self, layer: LayerPool, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """See `Part`."""
        keys, values = self.visible(layer, None)
        num_kv_heads, (num_tokens, num_heads, key_size) = keys.shape[1], query.shape
        rows = query.transpose(0, 1).reshape(1, num_kv_heads, -1, key_size)
        num_rows = rows.shape[2]
        if num_rows % ROWS:
            rows = torch.cat([rows, rows[:, :, :1].expand(-1, -1, -num_rows % ROWS, -1)], dim=2)
        hidden = self._mask_of(num_heads // num_kv_heads, query)
        output = scaled_dot_product_attention(rows, keys, values, attn_mask=hidden, scale=options.scaling)
        return output[:, :, :num_rows].reshape(num_heads, num_tokens, -1).transpose(0, 1)

    def visible(self, layer: LayerPool, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Part`."""
        slots = (2, self.first_slot, self._padded)
        return layer.keys_by_head.narrow(*slots), layer.values_by_head.narrow(*slots)

    def _mask_of(self, group: int, like: torch.Tensor) -> torch.Tensor:
        """Return the additive mask [rows, padded], the last ones for rows that nobody needs."""
        num_rows = group * self.num_tokens
        if self._hidden is None or self._hidden.shape[0] != num_rows + -num_rows % ROWS:
            hidden = like.new_full((self.num_tokens, self._padded), float("-inf")).triu_(self._first_hidden)
            self._hidden = torch.cat([hidden.repeat(group, 1), hidden[:1].expand(-num_rows % ROWS, -1)])
        return self._hidden


class _PaddedNode(_PaddedPart):
    """A token of a tree, over as many slots as one of a chain: its own path's, and others that are hidden."""

    def __init__(self, token: Segment, first_slot: int, seen: list[int], block_tokens: int) -> None:
        super().__init__(Segment(token.key, len(seen) - 1, 1), first_slot, block_tokens)
        self._slots = torch.tensor([*seen, *[seen[0]] * (self._padded - len(seen))]) + first_slot

    def visible(self, layer: LayerPool, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Part`."""
        return _gathered(layer, self._slots)


class _Node(Part):
    """A token of a tree, over the slots of its own path alone."""

    def __init__(self, token: Segment, first_slot: int, seen: list[int]) -> None:
        super().__init__(token, first_slot)
        self._slots = torch.tensor(seen) + first_slot  # in the order of their positions

    def visible(self, layer: LayerPool, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Part`."""
        return _gathered(layer, self._slots if window is None else self._slots[-window:])


def _gathered(layer: LayerPool, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of keys and values that lie in memory as the pool's do."""
    keys, values = layer.keys.index_select(0, slots), layer.values.index_select(0, slots)
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


class _InCalls(Part):
    """New tokens of which each layer says how they are divided into calls."""

    def __init__(self, segment: Segment, first_slot: int, joint: "JointCalls") -> None:
        super().__init__(segment, first_slot)
        self._new, self._joint = segment, joint
        self._divided: dict[int, list[Part]] = {}  # by tokens of a call; 0: of one, over its own slots alone

    def attend(self, layer: LayerPool, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """See `Part`."""
        is_plain = options.window is None and options.softcap is None and options.sinks is None
        size = self._joint.tokens_of_a_call(query.shape[1], layer) if is_plain else 0
        if size not in self._divided:
            self._divided[size] = self.calls(size)
        parts = self._divided[size]
        rows = torch.split(query, [part.num_tokens for part in parts])
        outputs = [part.attend(layer, each, options) for part, each in zip(parts, rows, strict=True)]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def calls(self, size: int) -> list[Part]:
        """Divide the chain into calls of so many tokens; 0: of one, over its own slots alone."""
        key, first_slot, end, block_tokens = self._new.key, self.first_slot, self.total, self._joint.block_tokens
        if size == 0:
            return [Part(Segment(key, slot, 1), first_slot) for slot in range(self._new.past, end)]
        pieces, slot = list[Part](), self._new.past
        while slot < end:
            num_tokens = min(size, end - slot, block_tokens - slot % block_tokens)
            pieces.append(_PaddedPart(Segment(key, slot, num_tokens), first_slot, block_tokens))
            slot += num_tokens
        return pieces


class _NodeInCalls(_InCalls):
    """One node of a tree."""

    def __init__(self, token: Segment, first_slot: int, joint: "JointCalls", seen: list[int]) -> None:
        super().__init__(token, first_slot, joint)
        self._seen = seen

    def calls(self, size: int) -> list[Part]:
        """See `_InCalls`."""
        if size == 0:
            return [_Node(self._new, self.first_slot, self._seen)]
        return [_PaddedNode(self._new, self.first_slot, self._seen, self._joint.block_tokens)]


class JointCalls:
    """How many neighbouring tokens may share a call, as it was seen to give the bits of a call for each of them."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._seen: dict[tuple[object, ...], int] = {}

    def tokens_of_a_call(self, num_heads: int, layer: LayerPool) -> int:
        """Return the largest number of tokens that agree, like all smaller ones, for heads of this form; at least 1."""
        keys, values = layer.keys, layer.values
        form = (num_heads, keys.shape[1:], values.shape[1:], keys.dtype, torch.get_num_threads())
        if form not in self._seen:
            self._seen[form] = self._compare(num_heads, layer)
        return self._seen[form]

    def _compare(self, num_heads: int, layer: LayerPool) -> int:
        num_kv_heads, key_size = layer.keys.shape[1:]
        shape = LayerShape(num_kv_heads, key_size, layer.values.shape[2])
        trial = LayerPool(shape, max(CHECKED_BLOCKS) * self.block_tokens, layer.keys.dtype, "cpu")
        generator = torch.Generator().manual_seed(0)
        for tensor in (trial.keys, trial.values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        queries = torch.randn(self.block_tokens, num_heads, key_size, generator=generator).to(trial.keys.dtype)
        most = max(1, min(MAX_ROWS // (num_heads // num_kv_heads), self.block_tokens))
        return min(self._num_agreeing(trial, queries, num_blocks, most) for num_blocks in CHECKED_BLOCKS)

    def _num_agreeing(self, layer: LayerPool, queries: torch.Tensor, num_blocks: int, most: int) -> int:
        """Compare calls at the beginning and at the end of a text's last block with single ones."""
        begin, options = (num_blocks - 1) * self.block_tokens, AttentionOptions(queries.shape[-1] ** -0.5)

        def call(token: int, size: int) -> torch.Tensor:
            part = _PaddedPart(Segment("", begin + token, size), 0, self.block_tokens)
            return part.attend(layer, queries[token : token + size], options)

        alone = torch.cat([call(token, 1) for token in range(self.block_tokens)])
        for size in range(2, most + 1):
            for token in (0, self.block_tokens - size):
                if not torch.equal(call(token, size), alone[token : token + size]):
                    return size - 1
        return most
