"""Attention of packed sequences over paged keys and values: torch's `varlen_attn`, and the same in plain steps.

`varlen_attn` has the signature and the semantics of `torch.nn.attention.varlen.varlen_attn` (torch 2.13). Where that
runs, on GPUs in half precision, it is called; elsewhere the sums are done here, in float32. What torch's function
cannot do (a soft cap, spans of its own for each token) is asked of `attend_spans`.

What torch's function is known for, and what is done about it:
- a paged cache needs pages of a multiple of 256 tokens ("Paged KV cache block size must be divisible by 256": torch's
  flash_api.cpp, `mha_varlen_fwd`), heads of at most 256 numbers, a multiple of 8, as many in values as in keys;
- with a paged cache more than one split gives wrong rows (pytorch issue 194167, torchtitan issue 3235): callers ask for
  one, and give it long texts in parts (`paged_call.py`);
- with one query a sequence and grouped heads the queries of a group become rows, and the log-sum-exp comes back in
  another order than it is written (`mha_varlen_fwd` reshapes it without the transpose of vllm-project/flash-attention
  pull request 87), so where it is wanted `max_q` is at least 2, which turns that off;
- a sequence without keys puts its log-sum-exp in another one's place (flash-attention issue 2842): callers give each
  sequence at least one key.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest

FLASH_PAGE_TOKENS = 256
MAX_FLASH_SIZE = 256  # of a head
MAX_SCORES = 1 << 28  # that are computed at once in plain steps: 1 GiB
MIN_FLASH_CAPABILITY = 8  # the major number: "FlashAttention only supports Ampere GPUs or newer"

Attended = tuple[torch.Tensor, torch.Tensor]
"""What was attended to [..., heads, value_size], and the log-sum-exp of the scores [..., heads], float32; where nothing
was seen the first is 0 and the second infinite, of either sign."""


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend as torch's function of this name; the log-sum-exp is [heads, total_q], as torch returns it.

    Shapes: query [total_q, heads, size], key and value [total_k, kv_heads, size] or, with a `block_table` [sequences,
    pages of one], [pages, page tokens, kv_heads, size]; `cu_seq_q` and `cu_seq_k` [sequences + 1], `seqused_k`
    [sequences], int32. A query i of n sees key j of m where i + m - n - left <= j <= i + m - n + right, a negative
    bound being none.
    """
    wants_lse = return_aux is not None and return_aux.lse
    if takes_flash(query, key, value):
        return varlen.varlen_attn(
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max(2, max_q) if wants_lse else max_q,
            max_k,
            return_aux=return_aux,
            scale=scale,
            window_size=window_size,
            enable_gqa=enable_gqa,
            seqused_k=seqused_k,
            block_table=block_table,
            num_splits=num_splits,
        )
    keys = (cu_seq_k, max_k, seqused_k, block_table)
    output, lse = _plainly(query, key, value, cu_seq_q, max_q, keys, scale, window_size)
    return (output, lse) if wants_lse else output


def _plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    max_q: int,
    keys: tuple[torch.Tensor | None, int, torch.Tensor | None, torch.Tensor | None],
    scale: float | None,
    window_size: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as `varlen_attn`, whose `cu_seq_k`, `max_k`, `seqused_k` and `block_table` are the `keys`."""
    cu_seq_k, max_k, seqused_k, block_table = keys
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    spans = window_spans(cu_seq_q, _num_used(cu_seq_k, seqused_k), query.shape[0], window_size)
    places = _pages(cu_seq_k, max_k, len(key)) if block_table is None else block_table.long()
    output, lse = _attend_rows(query, key, value, cu_seq_q, max_q, spans, places, scale=scale, softcap=None)
    return output.to(query.dtype), torch.where(torch.isinf(lse), torch.inf, lse).T.contiguous()


def takes_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether torch's own function attends to a cache like this."""
    size, page_tokens = query.shape[-1], key.shape[1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= MAX_FLASH_SIZE
        and (key.dim() == 3 or page_tokens % FLASH_PAGE_TOKENS == 0)
        and _has_flash(query.device)
    )


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= MIN_FLASH_CAPABILITY


def attend_spans(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    max_q: int,
    spans: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> Attended:
    """Attend from each query to the keys of its sequence between its `spans`, begin and end [total_q] each.

    Shapes: query [total_q, heads, key_size], key and value [pages, page tokens, kv_heads, size].
    """
    pages = block_table.long()
    return _attend_rows(query, key, value, cu_seq_q, max_q, spans, pages, scale=scale, softcap=softcap)


def window_spans(
    cu_seq_q: torch.Tensor, used: torch.Tensor, total_q: int, window_size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first key that each query sees and the one after its last, [total_q] each."""
    (sequence, number), (left, right) = row_places(cu_seq_q, total_q), window_size
    num_keys, num_queries = used[sequence], (cu_seq_q[1:] - cu_seq_q[:-1])[sequence]
    position = number + num_keys - num_queries
    begin = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
    end = num_keys if right < 0 else torch.minimum(position + right + 1, num_keys)
    return begin, end


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> Attended:
    """Attend in plain steps, in float32, where `seen` [batch, queries, keys].

    Shapes: query [batch, queries, heads, key_size], key and value [batch, keys, kv_heads, size].
    """
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    shape = (*query.shape[:2], num_kv_heads, num_heads // num_kv_heads, query.shape[3])
    grouped = query.float().reshape(shape)  # [batch, queries, kv_heads, group, key_size]
    scores = torch.einsum("bqhgd,bkhd->bqhgk", grouped, key.float()) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen[:, :, None, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(torch.isinf(lse), 0.0, lse)[..., None])
    # what nobody sees may be anything, and 0 times NaN is NaN
    values = value.float().masked_fill(~seen.any(dim=1)[..., None, None], 0.0)
    output = torch.einsum("bqhgk,bkhd->bqhgd", weights, values)
    return output.flatten(2, 3), lse.flatten(2, 3)


def merged(attended: Sequence[Attended], *, wants_lse: bool = True) -> Attended:
    """Return the attention to all of some disjoint sets of keys, from the attention to each.

    Each of `attended` has some sets: outputs [sets, ..., heads, size] and log-sum-exps [sets, ..., heads], minus
    infinity where nothing was seen. Returned are [..., heads, size] and [..., heads], float32; the second is empty
    unless it is wanted.
    """
    lse = torch.cat([sums for _, sums in attended])
    # NaN where nothing was seen at all, and then all outputs are 0
    shares = torch.split(torch.softmax(lse, 0).nan_to_num(), [len(sums) for _, sums in attended])
    outputs = [(output * share[..., None]).sum(0) for (output, _), share in zip(attended, shares, strict=True)]
    return sum(outputs[1:], outputs[0]), lse.logsumexp(0) if wants_lse else lse.new_empty(0)


def one_set(attended: Attended) -> Attended:
    """Return attention to one set of keys as `merged` takes it."""
    output, lse = attended
    return output[None], torch.where(torch.isinf(lse), -torch.inf, lse)[None]


def with_sinks(attended: Attended, sinks: torch.Tensor) -> Attended:
    """Let a share of each head's attention go to its sink, a logit without a value, `sinks` [heads]."""
    output, lse = attended
    lse, sinks = torch.where(torch.isinf(lse), -torch.inf, lse), sinks.float()
    return output * torch.sigmoid(lse - sinks)[..., None], torch.logaddexp(lse, sinks.expand_as(lse))


def _num_used(cu_seq_k: torch.Tensor | None, seqused_k: torch.Tensor | None) -> torch.Tensor:
    if seqused_k is not None:
        return seqused_k.long()
    if cu_seq_k is None:
        raise ValueError("varlen_attn needs seqused_k or cu_seq_k")
    return (cu_seq_k[1:] - cu_seq_k[:-1]).long()


def row_places(cu_seq_q: torch.Tensor, total_q: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each query's sequence and its number there, [total_q] each."""
    rows = torch.arange(total_q, device=cu_seq_q.device)
    sequence = torch.searchsorted(cu_seq_q[1:].long().contiguous(), rows, right=True).clamp(max=len(cu_seq_q) - 2)
    return sequence, rows - cu_seq_q.long()[sequence]


def _pages(cu_seq_k: torch.Tensor | None, max_k: int, total_k: int) -> torch.Tensor:
    """Return where the keys of each sequence lie [sequences, max_k]; those after its last are another's."""
    if cu_seq_k is None:
        raise ValueError("varlen_attn needs block_table or cu_seq_k")
    places = cu_seq_k[:-1, None].long() + torch.arange(max_k, device=cu_seq_k.device)
    return places.clamp(max=total_k - 1)


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    max_q: int,
    spans: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> Attended:
    """Attend from packed queries to the pages [sequences, pages of one] of keys and values.

    No shape depends on a number on the device. Some sequences at a time: the scores of all may not fit into memory.
    """
    places = cu_seq_q[:-1, None].long() + torch.arange(max_q, device=query.device)  # [sequences, max_q]
    is_query = places < cu_seq_q[1:, None]
    places = places.clamp(max=query.shape[0] - 1)
    num_keys = pages.shape[1] * (key.shape[1] if key.dim() == 4 else 1)
    slots = torch.arange(num_keys, device=query.device)
    together = max(1, MAX_SCORES // (max_q * num_keys * query.shape[1]))
    attended = []
    for rows, valid, table in zip(*(torch.split(part, together) for part in (places, is_query, pages)), strict=True):
        begin, end = (bound[rows][..., None] for bound in spans)
        seen = (slots >= begin) & (slots < end) & valid[..., None]
        keys, values = (_in_line(tensor[table]) for tensor in (key, value))
        attended.append(masked_attention(query[rows], keys, values, seen, scale=scale, softcap=softcap))
    sequence, number = row_places(cu_seq_q, query.shape[0])
    number = number.clamp(max=max_q - 1)
    output, lse = (torch.cat(parts)[sequence, number] for parts in zip(*attended, strict=True))
    return output, lse


def _in_line(gathered: torch.Tensor) -> torch.Tensor:
    """Join each sequence's pages: [sequences, keys, kv_heads, size]."""
    return gathered.flatten(1, 2) if gathered.dim() == 5 else gathered
