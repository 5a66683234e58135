"""Attention calls over entries of a paged cache (`paged_row.py`), of whole texts or of long texts in parts.

Torch's function walks through a text on one of the device's processors for each head that has keys: with a single
session of 8,192 tokens eight of them work, and some hundred wait. Its own way out, more splits, gives wrong rows with a
paged cache (`varlen.py`). So a long text is given to it in parts, as if each were a sequence of its own, and what each
gives is merged by the log-sum-exps (Dao et al. 2023, "Flash-Decoding"). All queries of an entry see all of a part: what
its own tokens see of one another is no part of the text. So the queries of the heads that share keys can be rows of one
head, and a key is read once for all of them.
"""

from typing import NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention.varlen import AuxRequest

from specdec.engine.attention import AttentionOptions
from specdec.engine.paged_pool import LayerPages
from specdec.engine.varlen import Attended, attend_spans, merged, one_set, row_places, varlen_attn

WHOLE_PAGES = 8  # a text of no more is not divided: merging would take longer
MIN_PART_PAGES = 2
MAX_PARTS = 16
MAX_PART_ROWS = 1024  # tokens times parts: each is merged, which costs more than waiting in a large batch


class PagedCall(NamedTuple):
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

    def attend_own(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> Attended:
        """Attend from the entries' tokens to one another, each to those before it and itself, and to no cache."""
        output = varlen_attn(
            query,
            key,
            value,
            self.cu_q,
            self.cu_q,
            self.max_q,
            self.max_q,
            return_aux=AuxRequest(lse=True),
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=True,
            num_splits=1,
        )
        assert isinstance(output, tuple)
        return output[0], output[1].T

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


class TextParts:
    """The texts that the entries of a call attend to, in parts. Nothing in it depends on a number on the device."""

    def __init__(
        self, call: PagedCall, num_seen: torch.Tensor, num_parts: int, num_rows: int, page_tokens: int
    ) -> None:
        """`num_seen` [entries] are the tokens of each text, maybe none; the call has `num_rows` tokens."""
        num_pages = -(-call.tables.shape[1] // num_parts)
        padded = functional.pad(call.tables, (0, num_parts * num_pages - call.tables.shape[1]))
        tables = padded.view(-1, num_parts, num_pages).transpose(0, 1)  # [parts, entries, pages]
        numbers = torch.arange(num_parts, device=call.used.device)[:, None]
        left = num_seen - numbers * (num_pages * page_tokens)  # [parts, entries]
        # every sequence has a key (`varlen.py`): where a part is empty, one that is certainly its own, and then ignored
        self._tables = torch.where(left[..., None] > 0, tables, call.tables[:, :1]).flatten(0, 1).int()
        self._used = left.clamp(1, num_pages * page_tokens).flatten().int()
        begins = (numbers * num_rows + call.cu_q[:-1]).flatten()
        self._cu_q = functional.pad(begins, (0, 1), value=num_parts * num_rows).int()
        self._cu_k = functional.pad(self._used.cumsum(0), (1, 0)).int()
        self._max_q, self._num_parts = call.max_q, num_parts
        entries, _ = row_places(call.cu_q, num_rows)
        is_empty = (left <= 0)[:, entries]  # [parts, tokens]
        self._bias = torch.where(is_empty, -torch.inf, 0.0)[..., None]
        self._calls: dict[int, PagedCall] = {}

    def attend(self, query: torch.Tensor, layer: LayerPages, scaling: float) -> Attended:
        """Attend from `query` [tokens, heads, size] to each part.

        Returned are outputs [parts, tokens, heads, value_size] and log-sum-exps [parts, tokens, heads].
        """
        num_kv_heads = layer.keys.shape[2]
        # [tokens, group, kv_heads, size]
        grouped = query.view(len(query), num_kv_heads, -1, query.shape[2]).transpose(1, 2)
        rows = grouped.expand(self._num_parts, *grouped.shape).flatten(0, 2)
        attended = self._call(grouped.shape[1]).attend(rows, layer, (-1, -1), scaling, wants_lse=True)
        assert isinstance(attended, tuple)
        shape = self._num_parts, *grouped.shape[:3]
        output, lse = (each.reshape(*shape, *each.shape[2:]).transpose(2, 3).flatten(2, 3) for each in attended)
        return output, lse + self._bias

    def _call(self, group: int) -> PagedCall:
        """Return the call for so many query heads that share keys."""
        if group not in self._calls:
            self._calls[group] = PagedCall(
                self._cu_q * group, self._cu_k, self._used, self._tables, self._max_q * group
            )
        return self._calls[group]


class DividedChains:
    """Chained tokens after long texts: they attend to the texts in parts, and to one another."""

    def __init__(self, call: PagedCall, num_parts: int, num_rows: int, page_tokens: int) -> None:
        self._call = call
        # single tokens see all of their text, themselves included; of longer chains each sees others of its own
        num_own = 0 if call.max_q == 1 else call.cu_q[1:] - call.cu_q[:-1]
        self._parts = TextParts(call, call.used - num_own, num_parts, num_rows, page_tokens)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerPages,
        scaling: float,
        *,
        wants_lse: bool,
    ) -> Attended:
        """Attend from the entries' tokens, whose keys and values are given and stored; see `merged`."""
        attended = [self._parts.attend(query, layer, scaling)]
        if self._call.max_q > 1:
            attended.append(one_set(self._call.attend_own(query, key, value, scaling)))
        return merged(attended, wants_lse=wants_lse)


def num_parts(num_pages: int, num_rows: int) -> int:
    """Return into how many parts the texts of a call are divided, a power of two, by its pages and tokens; 1: whole."""
    if num_pages <= WHOLE_PAGES:
        return 1
    most = min(MAX_PARTS, num_pages // MIN_PART_PAGES, MAX_PART_ROWS // max(1, num_rows))
    return 1 << (max(1, most).bit_length() - 1)
