"""The attention backend for GPUs: torch's `varlen_attn` on a paged cache, one call a layer for all chained tokens.

The tokens of trees take two calls more: one to the text before the tree, which flash attention can do, and one masked
call among the tree's own tokens; the two are merged by their log-sum-exps. Layers with a soft cap, and trees in layers
with a window, whose reach differs from token to token of a tree, are attended to in plain steps. On a CPU everything
runs through the plain steps of `varlen.py`, so that tests need no GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.attention.varlen import AuxRequest

from specdec.engine.attention import AttentionOptions, PoolOptions, Segment
from specdec.engine.paged_pool import LayerPages, PagedPool
from specdec.engine.paged_row import DeviceNumbers, PagedRow
from specdec.engine.pool import LayerShape
from specdec.engine.varlen import (
    Attended,
    attend_spans,
    masked_attention,
    merged,
    varlen_attn,
    window_spans,
    with_sinks,
)


class PagedBackend:
    """Attends to a `PagedPool`; an `AttentionBackend`."""

    def __init__(self, shapes: Sequence[LayerShape], options: PoolOptions) -> None:
        self.pool = PagedPool(
            shapes,
            num_bytes=options.num_bytes,
            block_tokens=options.block_tokens,
            dtype=options.dtype,
            device=options.device,
        )

    def row(self, segments: Sequence[Segment]) -> PagedRow:
        """Return what the attention of a forward over these segments depends on."""
        row = PagedRow(self.pool.block_tokens)
        for segment in segments:
            row.add(segment, self.pool)
        return row

    def plan(self, segments: Sequence[Segment]) -> "PagedPlan":
        """See `AttentionBackend`."""
        row = self.row(segments)
        numbers = DeviceNumbers.of(row.numbers(), self.pool.device)
        longest = [max((len(entry.rows) for entry in entries), default=0) for entries in (row.chains, row.trees)]
        return PagedPlan(numbers, self.pool, longest[0], longest[1])


class _Call(NamedTuple):
    """One attention call over entries."""

    cu_q: torch.Tensor  # [entries + 1]
    cu_k: torch.Tensor  # [entries + 1]
    used: torch.Tensor  # [entries]
    tables: torch.Tensor  # [entries, pages]
    max_q: int

    def attend(
        self, query: torch.Tensor, layer: LayerPages, window: tuple[int, int], scaling: float, *, wants_lse: bool
    ) -> Attended | torch.Tensor:
        """Attend from `query` [tokens of the entries, heads, size] through torch's function, or what stands for it."""
        output = varlen_attn(
            query,
            layer.keys,
            layer.values,
            self.cu_q,
            self.cu_k,
            self.max_q,
            self.tables.shape[1] * layer.keys.shape[1],
            return_aux=AuxRequest(lse=wants_lse),
            scale=scaling,
            window_size=window,
            enable_gqa=True,
            seqused_k=self.used,
            block_table=self.tables,
            num_splits=1,
        )
        return (output[0], output[1].T) if isinstance(output, tuple) else output

    def attend_spans(
        self,
        query: torch.Tensor,
        layer: LayerPages,
        spans: tuple[torch.Tensor, torch.Tensor],
        options: AttentionOptions,
    ) -> Attended:
        """Attend in plain steps, from each token to its own span."""
        return attend_spans(
            query,
            layer.keys,
            layer.values,
            self.cu_q,
            self.max_q,
            spans,
            self.tables,
            scale=options.scaling,
            softcap=options.softcap,
        )


class PagedPlan:
    """The attention of one forward. No shape in it depends on a number on the device, so that it can be captured."""

    def __init__(self, numbers: DeviceNumbers, pool: PagedPool, max_chain: int, max_tree: int) -> None:
        """At most `max_chain` chained tokens and `max_tree` of a tree belong to one sequence; 0: there are none."""
        self._layers = iter(pool.layers)
        self._slots = numbers["slots"].long()
        self._chains = _call("chain", numbers, max_chain)
        self._trees = _Trees(numbers, max_tree) if max_tree else None
        self._chain_rows = numbers["chain_rows"].long() if max_tree else None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        layer = next(self._layers)
        layer.store(self._slots, key, value)
        query = query.to(layer.keys.dtype)
        if self._trees is None or self._chain_rows is None:
            return self._attend_chains(query, layer, options)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        if len(self._chain_rows):
            output[self._chain_rows] = self._attend_chains(query[self._chain_rows], layer, options)
        output[self._trees.rows] = self._trees.attend(query, key, value, layer, options)
        return output

    def _attend_chains(self, query: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> torch.Tensor:
        """Let each token see what comes before it: [tokens, heads, size] -> [tokens, heads, value_size]."""
        calls, sinks = self._chains, options.sinks
        window = (-1 if options.window is None else options.window - 1, 0)
        if calls.max_q == 1 and options.window is None:
            window = (-1, -1)  # the same for a last token, and torch's function then reads a key once for its heads
        if options.softcap is not None:
            spans = window_spans(calls.cu_q, calls.used, len(query), window)
            attended: Attended | torch.Tensor = calls.attend_spans(query, layer, spans, options)
        else:
            attended = calls.attend(query, layer, window, options.scaling, wants_lse=sinks is not None)
        if isinstance(attended, torch.Tensor):
            return attended
        return (with_sinks(attended, sinks) if sinks is not None else attended)[0].to(query.dtype)


def _call(name: str, numbers: DeviceNumbers, max_q: int) -> _Call:
    cu_q, cu_k, used, tables = (numbers[f"{name}_{part}"] for part in ("cu_q", "cu_k", "used", "tables"))
    return _Call(cu_q, cu_k, used, tables, max_q)


class _Trees:
    """The trees of one forward."""

    def __init__(self, numbers: DeviceNumbers, max_tree: int) -> None:
        self.rows = numbers["tree_rows"].long()  # [nodes]: of the packed row
        self._call = _call("tree", numbers, max_tree)
        self._positions = numbers["tree_positions"].long()  # [nodes]
        self._nodes = numbers["tree_nodes"].long()  # [trees, size]: the nodes of each, padded
        self._mask = numbers["tree_mask"].bool()  # [trees, size, size]: the column's is an ancestor, or the row's own
        self._places = numbers["tree_places"].long()  # [nodes]: where they are among the padded ones

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerPages,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend from the trees' tokens, whose rows are among others: [tokens, heads, size] -> [nodes, heads, size]."""
        nodes = query[self.rows]
        attended = merged(
            self._attend_before(nodes, layer, options),
            self._attend_within(nodes, key[self.rows], value[self.rows], options),
        )
        if options.sinks is not None:
            attended = with_sinks(attended, options.sinks)
        return attended[0].to(query.dtype)

    def _attend_before(self, nodes: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> Attended:
        """Attend to the text before the trees."""
        if options.softcap is None and options.window is None:
            attended = self._call.attend(nodes, layer, (-1, -1), options.scaling, wants_lse=True)
            assert isinstance(attended, tuple)
            return attended
        begin, end = window_spans(self._call.cu_q, self._call.used, len(nodes), (-1, -1))
        if options.window is not None:
            begin = (self._positions - options.window + 1).clamp(min=0)
        return self._call.attend_spans(nodes, layer, (begin, end), options)

    def _attend_within(
        self, nodes: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> Attended:
        """Attend to the trees' own tokens, each to its ancestors and itself."""
        seen = self._mask
        if options.window is not None:
            positions = self._positions[self._nodes]
            seen = seen & (positions[:, :, None] - positions[:, None] < options.window)
        queries, keys, values = (rows[self._nodes] for rows in (nodes, key, value))
        output, lse = masked_attention(queries, keys, values, seen, scale=options.scaling, softcap=options.softcap)
        return output.flatten(0, 1)[self._places], lse.flatten(0, 1)[self._places]
