"""The attention backend for GPUs: torch's `varlen_attn` on a paged cache, one call a layer for all chained tokens.

The tokens of trees take two calls more: one to the text before the tree, which flash attention can do, and one masked
call among the tree's own tokens; the two are merged by their log-sum-exps. Long texts are attended to in parts
(`paged_call.py`). Layers with a soft cap, and trees in layers with a window, whose reach differs from token to token of
a tree, are attended to in plain steps. On a CPU everything runs through the plain steps of `varlen.py`, so that tests
need no GPU.
"""

from collections.abc import Sequence

import torch

from specdec.engine.attention import AttentionOptions, PoolOptions, Segment
from specdec.engine.paged_call import DividedChains, PagedCall, TextParts, num_parts
from specdec.engine.paged_pool import LayerPages, PagedPool
from specdec.engine.paged_row import DeviceNumbers, PagedRow
from specdec.engine.pool import LayerShape
from specdec.engine.varlen import Attended, masked_attention, merged, one_set, window_spans, with_sinks


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


class PagedPlan:
    """The attention of one forward. No shape in it depends on a number on the device, so that it can be captured."""

    def __init__(self, numbers: DeviceNumbers, pool: PagedPool, max_chain: int, max_tree: int) -> None:
        """At most `max_chain` chained tokens and `max_tree` of a tree belong to one sequence; 0: there are none."""
        self._layers = iter(pool.layers)
        self._slots = numbers["slots"].long()
        self._trees = _Trees(numbers, max_tree, pool.block_tokens) if max_tree else None
        self._chain_rows = numbers["chain_rows"].long() if max_tree else None
        num_rows = len(self._slots if self._chain_rows is None else self._chain_rows)
        self._chains = _Chains(_call("chain", numbers, max_chain), num_rows, pool.block_tokens)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        layer = next(self._layers)
        layer.store(self._slots, key, value)
        query = query.to(layer.keys.dtype)
        if self._trees is None or self._chain_rows is None:
            return self._chains.attend(query, key, value, layer, options)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        if len(self._chain_rows):
            rows = self._chain_rows
            output[rows] = self._chains.attend(query[rows], key[rows], value[rows], layer, options)
        output[self._trees.rows] = self._trees.attend(query, key, value, layer, options)
        return output


class _Chains:
    """The chained tokens of one forward."""

    def __init__(self, call: PagedCall, num_rows: int, page_tokens: int) -> None:
        self._call = call
        count = num_parts(call.tables.shape[1], num_rows)
        self._divided = DividedChains(call, count, num_rows, page_tokens) if count > 1 else None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerPages,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Let each token see what comes before it, and itself: [tokens, heads, size] -> [tokens, heads, value_size]."""
        if self._divided and options.softcap is None and options.window is None:
            own = key.to(query.dtype), value.to(query.dtype)
            attended: Attended | torch.Tensor = self._divided.attend(
                query, *own, layer, options.scaling, wants_lse=options.sinks is not None
            )
        else:
            attended = self._attend_whole(query, layer, options)
        if isinstance(attended, torch.Tensor):
            return attended
        return (with_sinks(attended, options.sinks) if options.sinks is not None else attended)[0].to(query.dtype)

    def _attend_whole(
        self, query: torch.Tensor, layer: LayerPages, options: AttentionOptions
    ) -> Attended | torch.Tensor:
        call = self._call
        window = (-1 if options.window is None else options.window - 1, 0)
        if call.max_q == 1 and options.window is None:
            window = (-1, -1)  # the same for a last token, and torch's function then reads a key once for its heads
        if options.softcap is not None:
            spans = window_spans(call.cu_q, call.used, len(query), window)
            return call.attend_spans(query, layer, spans, options)
        return call.attend(query, layer, window, options.scaling, wants_lse=options.sinks is not None)


def _call(name: str, numbers: DeviceNumbers, max_q: int) -> PagedCall:
    cu_q, cu_k, used, tables = (numbers[f"{name}_{part}"] for part in ("cu_q", "cu_k", "used", "tables"))
    return PagedCall(cu_q, cu_k, used, tables, max_q)


class _Trees:
    """The trees of one forward."""

    def __init__(self, numbers: DeviceNumbers, max_tree: int, page_tokens: int) -> None:
        self.rows = numbers["tree_rows"].long()  # [nodes]: of the packed row
        self._call = _call("tree", numbers, max_tree)
        count = num_parts(self._call.tables.shape[1], len(self.rows))
        text = self._call, self._call.used
        self._parts = TextParts(*text, count, len(self.rows), page_tokens) if count > 1 else None
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
            [
                self._attend_before(nodes, layer, options),
                self._attend_within(nodes, key[self.rows], value[self.rows], options),
            ],
            wants_lse=options.sinks is not None,
        )
        if options.sinks is not None:
            attended = with_sinks(attended, options.sinks)
        return attended[0].to(query.dtype)

    def _attend_before(self, nodes: torch.Tensor, layer: LayerPages, options: AttentionOptions) -> Attended:
        """Attend to the text before the trees, in parts: [parts, nodes, heads, size] and [parts, nodes, heads]."""
        if options.softcap is None and options.window is None:
            if self._parts:
                return self._parts.attend(nodes, layer, options.scaling)
            attended = self._call.attend(nodes, layer, (-1, -1), options.scaling, wants_lse=True)
            assert isinstance(attended, tuple)
            return one_set(attended)
        begin, end = window_spans(self._call.cu_q, self._call.used, len(nodes), (-1, -1))
        if options.window is not None:
            begin = (self._positions - options.window + 1).clamp(min=0)
        return one_set(self._call.attend_spans(nodes, layer, (begin, end), options))

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
        return one_set((output.flatten(0, 1)[self._places], lse.flatten(0, 1)[self._places]))
