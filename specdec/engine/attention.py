"""Attention over packed sequences: the one function that every served model attends with.

All sequences' new tokens lie in one row `[1, total_tokens]`, so linear layers run once over all of them. This function
writes each sequence's new keys and values into its own cache slots and attends for each sequence by itself, causally,
to everything that it holds. It is registered with transformers' `AttentionInterface` under `ATTENTION_NAME`; no mask
function is registered under that name, so models build no masks.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from specdec.engine.errors import EngineError, ModelRefused
from specdec.engine.kv import LayerPool, LayerShape, Sequence

ATTENTION_NAME = "specdec"


class AttentionOptions:
    """What a layer asks for besides queries, keys and values."""

    __slots__ = ("scaling", "sinks", "softcap", "window")

    def __init__(self, scaling: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> None:
        self.scaling = scaling
        self.window = window
        self.softcap = softcap
        self.sinks = sinks  # [heads]: a logit for each head that takes weight and gives no value


class Attends(Protocol):
    """What stands behind the registered function during one forward."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Attend in the next layer.

        Shapes: query [total, heads, key_size], key and value [total, kv_heads, size] -> [total, heads, value_size].
        """
        ...


_current = threading.local()  # .attends: the plan of the forward that this thread is running


@contextmanager
def attending(attends: Attends) -> Iterator[None]:
    """Let models on this thread attend through `attends`."""
    _current.attends = attends
    try:
        yield
    finally:
        _current.attends = None


def current_attention() -> Attends:
    """Return what this thread's forward attends through."""
    attends: Attends | None = getattr(_current, "attends", None)
    if attends is None:
        raise EngineError("packed attention was called outside of LanguageModel.forward")
    return attends


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention functions do.

    Shapes: query, key and value [1, heads, total, size] -> [1, total, heads, size].
    Raises ModelRefused for a layer that brings its own mask or position bias.
    """
    if attention_mask is not None or position_bias is not None:
        raise ModelRefused(
            f"{type(module).__name__} adds its own mask or bias to attention, which packed sequences cannot honour; "
            "choose a model with rotary or learned positions"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [total, heads, size]
    return current_attention().attend(query, key, value, options)[None], None


AttentionInterface.register(ATTENTION_NAME, packed_attention)


class Segment:
    """One sequence's share of the packed row."""

    def __init__(self, sequence: Sequence, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.past = sequence.length
        self.first_slot = sequence.first_slot
        self.total = self.past + num_tokens
        self.written = slice(self.first_slot + self.past, self.first_slot + self.total)
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def first_visible(self, window: int | None) -> int:
        """Return the first position that any of the new tokens sees."""
        return 0 if window is None else max(0, self.past + 1 - window)

    def mask(self, window: int | None, repeats: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return the additive mask [repeats * num_tokens, visible], or None where every new token sees everything."""
        if window is not None and window >= self.total:
            window = None
        if self.num_tokens == 1:
            return None
        key = (window, repeats)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, repeats, like)
        return self._masks[key]

    def _build_mask(self, window: int | None, repeats: int, like: torch.Tensor) -> torch.Tensor:
        first = self.first_visible(window)
        mask = like.new_full((self.num_tokens, self.total - first), float("-inf"))  # [new tokens, visible]
        mask.triu_(self.past - first + 1)
        if window is not None:
            hidden = torch.ones_like(mask, dtype=torch.bool).tril_(self.past - first - window)
            mask.masked_fill_(hidden, float("-inf"))
        return mask.repeat(repeats, 1)


class PackedAttention:
    """The plan of one forward: which rows belong to which sequence, and where its keys and values lie."""

    def __init__(self, segments: list[Segment], layers: list[LayerPool]) -> None:
        self.num_layers_done = 0
        self._segments = segments
        self._sizes = [segment.num_tokens for segment in segments]
        self._layers = layers
        self._slots = self._written_slots() if len(segments) > 1 else None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `Attends.attend`."""
        layer = self._layers[self.num_layers_done]
        self.num_layers_done += 1
        if self._slots is None:
            layer.keys[self._segments[0].written] = key
            layer.values[self._segments[0].written] = value
            return _attend_segment(self._segments[0], layer, query, options)
        layer.keys.index_copy_(0, self._slots, key)
        layer.values.index_copy_(0, self._slots, value)
        queries = torch.split(query, self._sizes)
        parts = zip(self._segments, queries, strict=True)
        return torch.cat([_attend_segment(segment, layer, part, options) for segment, part in parts])

    def _written_slots(self) -> torch.Tensor:
        slots = [slot for segment in self._segments for slot in range(segment.written.start, segment.written.stop)]
        return torch.tensor(slots, device=self._layers[0].keys.device)  # [total]


def _attend_segment(segment: Segment, layer: LayerPool, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Attend from one sequence's new tokens to all that it holds: [new, heads, size] -> [new, heads, value_size]."""
    first = segment.first_visible(options.window)
    keys = layer.keys_by_head.narrow(2, segment.first_slot + first, segment.total - first)
    values = layer.values_by_head.narrow(2, segment.first_slot + first, segment.total - first)
    if options.softcap is None and options.sinks is None:
        return _attend_fast(segment, query, keys, values, options)
    return _attend_plainly(segment, query, keys, values, options)


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
    segment: Segment, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attend with one fused kernel; grouping the heads into rows reads each key once and copies none.

    Shapes: query [new, heads, key_size], keys and values [1, kv_heads, visible, size] -> [new, heads, value_size].
    """
    mask = segment.mask(options.window, query.shape[1] // keys.shape[1], query)
    grouped = _grouped(query, keys.shape[1])
    output = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=options.scaling)
    return _ungrouped(output, segment.num_tokens)


def _attend_plainly(
    segment: Segment, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attend in small steps, for layers with a soft cap on their scores (Gemma 2) or attention sinks (GPT-OSS)."""
    group = query.shape[1] // keys.shape[1]
    scores = torch.matmul(_grouped(query, keys.shape[1]), keys.transpose(2, 3)) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    mask = segment.mask(options.window, group, query)
    if mask is not None:
        scores = scores + mask
    weights = _softmax(scores, options.sinks, group)  # [1, kv_heads, group * new, visible]
    return _ungrouped(torch.matmul(weights.to(values.dtype), values), segment.num_tokens)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, group: int) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    _, num_kv_heads, num_rows, _ = scores.shape
    extra = sinks.view(1, num_kv_heads, group, 1).repeat_interleave(num_rows // group, dim=2).to(scores.dtype)
    return torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


class ShapeProbe:
    """Stands in for a plan in the very first forward and records what each layer stores."""

    def __init__(self) -> None:
        self.shapes: list[LayerShape] = []

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Record the layer's shape and answer zeros."""
        self.shapes.append(LayerShape(key.shape[1], key.shape[2], value.shape[2]))
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
