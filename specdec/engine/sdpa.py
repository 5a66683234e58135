"""The attention backend for CPUs: torch's scaled dot-product attention, sequence by sequence, on contiguous runs."""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec.engine.attention import AttentionOptions, PoolOptions, Segment
from specdec.engine.contiguous import ContiguousPool, LayerPool
from specdec.engine.pool import LayerShape
from specdec.exact.tree import ancestor_matrix


def new_pool(shapes: Sequence[LayerShape], options: PoolOptions) -> ContiguousPool:
    """Return an empty pool. Raises CacheFull as `ContiguousPool`."""
    return ContiguousPool(
        shapes,
        num_bytes=options.num_bytes,
        block_tokens=options.block_tokens,
        dtype=options.dtype,
        device=options.device,
    )


class SdpaBackend:
    """Attends to a `ContiguousPool`; an `AttentionBackend`."""

    def __init__(self, shapes: Sequence[LayerShape], options: PoolOptions) -> None:
        self.pool = new_pool(shapes, options)

    def plan(self, segments: Sequence[Segment]) -> "SdpaPlan":
        """See `AttentionBackend`."""
        return SdpaPlan([Part(segment, self.pool.first_slot(segment.key)) for segment in segments], self.pool.layers)


class Part:
    """One segment, where its slots lie, and its masks."""

    def __init__(self, segment: Segment, first_slot: int) -> None:
        self.num_tokens, self.total = segment.num_tokens, segment.total
        self.first_slot = first_slot
        self.written = slice(first_slot + segment.past, first_slot + segment.total)
        self._segment = segment
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def attend(self, layer: LayerPool, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Attend from the new tokens to all that the sequence holds: [new, heads, size] -> [new, heads, value_size]."""
        keys, values = self.visible(layer, options.window)
        if options.softcap is None and options.sinks is None:
            return _attend_fast(self, query, keys, values, options)
        return _attend_plainly(self, query, keys, values, options)

    def first_visible(self, window: int | None) -> int:
        """Return the first slot, counted from the sequence's first, that any of the new tokens sees."""
        return 0 if window is None else max(0, self._segment.past + 1 - window)

    def visible(self, layer: LayerPool, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that any of the new tokens sees, [1, kv_heads, visible, size] each."""
        first = self.first_visible(window)
        slots = (2, self.first_slot + first, self.total - first)
        return layer.keys_by_head.narrow(*slots), layer.values_by_head.narrow(*slots)

    def mask(self, window: int | None, repeats: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return the additive mask [repeats * num_tokens, visible], or None where every new token sees everything."""
        if self.num_tokens == 1:
            return None
        if window is not None and window >= self.total:
            window = None
        key = (window, repeats)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, like).repeat(repeats, 1)
        return self._masks[key]

    def _build_mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor:
        segment, first = self._segment, self.first_visible(window)
        mask = like.new_full((segment.num_tokens, segment.total - first), float("-inf"))  # [new tokens, visible]
        mask.triu_(segment.past - first + 1)
        if segment.parents:
            others = torch.from_numpy(~ancestor_matrix(segment.parents)).to(like.device)  # [tree, tree]
            size = len(segment.parents)
            mask[-size:, -size:] = like.new_zeros(size, size).masked_fill_(others, float("-inf"))
        if window is not None:
            mask.masked_fill_(self._out_of_window(window, first, like.device), float("-inf"))
        return mask

    def _out_of_window(self, window: int, first: int, device: torch.device) -> torch.Tensor:
        """Return [new tokens, visible], true where the slot's position is too far before the token's."""
        new = torch.tensor(self._segment.positions, device=device)
        cached = torch.arange(first, self._segment.past, device=device)
        return new[:, None] - torch.cat([cached, new]) >= window


class SdpaPlan:
    """The attention of one forward."""

    def __init__(self, parts: Sequence[Part], layers: list[LayerPool]) -> None:
        self._parts = parts
        self._sizes = [part.num_tokens for part in parts]
        self._layers = iter(layers)
        self._slots = self._written_slots(layers[0].keys.device) if len(parts) > 1 else None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        layer = next(self._layers)
        if self._slots is None:
            layer.keys[self._parts[0].written] = key
            layer.values[self._parts[0].written] = value
            return self._parts[0].attend(layer, query, options)
        layer.keys.index_copy_(0, self._slots, key)
        layer.values.index_copy_(0, self._slots, value)
        queries = torch.split(query, self._sizes)
        pairs = zip(self._parts, queries, strict=True)
        return torch.cat([part.attend(layer, rows, options) for part, rows in pairs])

    def _written_slots(self, device: torch.device) -> torch.Tensor:
        slots = [slot for part in self._parts for slot in range(part.written.start, part.written.stop)]
        return torch.tensor(slots, device=device)  # [total]


def _grouped(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Stack the query heads that share a KV head: [new, heads, size] -> [1, kv_heads, group * new, size]."""
    if query.shape[0] == 1:
        return query.view(1, num_kv_heads, -1, query.shape[-1])
    return query.transpose(0, 1).reshape(1, num_kv_heads, -1, query.shape[-1])


def _ungrouped(output: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Undo `_grouped`: [1, kv_heads, group * new, size] -> [new, heads, size]."""
    if num_tokens == 1:
        return output.view(1, -1, output.shape[-1])
    return output.reshape(-1, num_tokens, output.shape[-1]).transpose(0, 1)


def _attend_fast(
    part: Part, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attend with one fused kernel; grouping the heads into rows reads each key once and copies none.

    Shapes: query [new, heads, key_size], keys and values [1, kv_heads, visible, size] -> [new, heads, value_size].
    """
    mask = part.mask(options.window, query.shape[1] // keys.shape[1], query)
    grouped = _grouped(query, keys.shape[1])
    output = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=options.scaling)
    return _ungrouped(output, part.num_tokens)


def _attend_plainly(
    part: Part, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attend in small steps, for layers with a soft cap on their scores (Gemma 2) or attention sinks (GPT-OSS)."""
    group = query.shape[1] // keys.shape[1]
    scores = torch.matmul(_grouped(query, keys.shape[1]), keys.transpose(2, 3)) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    mask = part.mask(options.window, group, query)
    if mask is not None:
        scores = scores + mask
    weights = _softmax(scores, options.sinks, group)  # [1, kv_heads, group * new, visible]
    return _ungrouped(torch.matmul(weights.to(values.dtype), values), part.num_tokens)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, group: int) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    _, num_kv_heads, num_rows, _ = scores.shape
    extra = sinks.view(1, num_kv_heads, group, 1).repeat_interleave(num_rows // group, dim=2).to(scores.dtype)
    return torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
