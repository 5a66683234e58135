"""The plain steps compute what `varlen_attn` is documented to compute, in torch's form, and merge exactly."""

import inspect
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen
from torch.nn.attention.varlen import AuxRequest

from specdec.engine import varlen
from specdec.engine.varlen import attend_spans, masked_attention, merged, one_set, varlen_attn, with_sinks

HEADS, KV_HEADS, KEY_SIZE, VALUE_SIZE = 4, 2, 6, 5
PAGE_TOKENS = 3
LENGTHS = [(1, 7), (5, 5), (3, 11), (4, 2)]  # queries and keys of each sequence; the last has queries that see nothing
WINDOWS = [(-1, -1), (-1, 0), (3, 0), (0, 0), (2, 1)]


class Texts(NamedTuple):
    """Sequences, packed, and in pages among others' that hold no numbers."""

    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    tables: torch.Tensor
    used: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor


def texts() -> Texts:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(sum(count for count, _ in LENGTHS), HEADS, KEY_SIZE, generator=generator)
    keys = [torch.randn(count, KV_HEADS, KEY_SIZE, generator=generator) for _, count in LENGTHS]
    values = [torch.randn(count, KV_HEADS, VALUE_SIZE, generator=generator) for _, count in LENGTHS]
    counts = [-(-len(key) // PAGE_TOKENS) for key in keys]
    order = torch.randperm(sum(counts) + 2, generator=generator)
    key_pages = torch.full((len(order), PAGE_TOKENS, KV_HEADS, KEY_SIZE), torch.nan)
    value_pages = torch.full((len(order), PAGE_TOKENS, KV_HEADS, VALUE_SIZE), torch.nan)
    tables = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32)
    for table, pages, key, value in zip(tables, torch.split(order[:-2], counts), keys, values, strict=True):
        table[: len(pages)] = pages
        for place, (one_key, one_value) in enumerate(zip(key, value, strict=True)):
            page = int(pages[place // PAGE_TOKENS])
            key_pages[page, place % PAGE_TOKENS] = one_key
            value_pages[page, place % PAGE_TOKENS] = one_value
    used = torch.tensor([count for _, count in LENGTHS], dtype=torch.int32)
    cu_q, cu_k = (torch.tensor([0, *counts]).cumsum(0).int() for counts in zip(*LENGTHS, strict=True))
    return Texts(query, keys, values, key_pages, value_pages, tables, used, cu_q, cu_k)


def by_definition(given: Texts, window: tuple[int, int], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [total_q, heads, value_size] and log-sum-exp [heads, total_q], number by number, in float64."""
    outputs = torch.zeros(len(given.query), HEADS, VALUE_SIZE, dtype=torch.float64)
    sums = torch.full((HEADS, len(given.query)), math.inf, dtype=torch.float64)
    row = 0
    for (num_queries, num_keys), key, value in zip(LENGTHS, given.keys, given.values, strict=True):
        for number in range(num_queries):
            at = number + num_keys - num_queries
            first = 0 if window[0] < 0 else max(0, at - window[0])
            last = num_keys - 1 if window[1] < 0 else min(num_keys - 1, at + window[1])
            for head in range(HEADS if last >= first else 0):
                shared = head * KV_HEADS // HEADS
                scores = key[first : last + 1, shared].double() @ given.query[row, head].double() * scale
                sums[head, row] = torch.logsumexp(scores, 0)
                outputs[row, head] = torch.softmax(scores, 0) @ value[first : last + 1, shared].double()
            row += 1
    return outputs, sums


def attend(given: Texts, window: tuple[int, int], **special: Any) -> Any:
    """Attend to the pages; the table, and the lengths that are used, say what there is."""
    return varlen_attn(
        given.query,
        given.key_pages,
        given.value_pages,
        given.cu_q,
        None,
        max(count for count, _ in LENGTHS),
        given.tables.shape[1] * PAGE_TOKENS,
        **{
            "return_aux": AuxRequest(lse=True),
            "scale": 0.7,
            "window_size": window,
            "enable_gqa": True,
            "seqused_k": given.used,
            "block_table": given.tables,
            "num_splits": 1,
            **special,
        },
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_pages_are_attended_to_by_definition(window: tuple[int, int]) -> None:
    given = texts()
    output, lse = attend(given, window)
    expected, expected_lse = by_definition(given, window, 0.7)
    assert (output.dtype, lse.dtype, lse.shape) == (torch.float32, torch.float32, (HEADS, len(given.query)))
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", WINDOWS)
def test_packed_keys_are_attended_to_as_pages_are(window: tuple[int, int]) -> None:
    given = texts()
    packed = torch.cat(given.keys), torch.cat(given.values)
    sizes = max(count for count, _ in LENGTHS), max(count for _, count in LENGTHS)
    output = varlen_attn(given.query, *packed, given.cu_q, given.cu_k, *sizes, scale=0.7, window_size=window)
    assert isinstance(output, torch.Tensor)
    torch.testing.assert_close(output, attend(given, window, return_aux=None), rtol=0, atol=2e-6)


def test_fewer_sequences_at_once_attend_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = texts()
    together = attend(given, (-1, 0))
    monkeypatch.setattr(varlen, "MAX_SCORES", 1)
    assert all(map(torch.equal, attend(given, (-1, 0)), together))


def test_signature_is_torchs_own() -> None:
    ours, theirs = inspect.signature(varlen_attn).parameters, inspect.signature(torch_varlen.varlen_attn).parameters
    assert [(each.name, each.kind, each.default) for each in ours.values()] == [
        (each.name, each.kind, each.default) for each in theirs.values()
    ]


@pytest.mark.parametrize(("wants_lse", "max_q"), [(True, 2), (False, 1)])
def test_torchs_function_never_regroups_where_sums_are_wanted(
    wants_lse: bool, max_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, calls = texts(), []
    monkeypatch.setattr(varlen, "takes_flash", lambda *tensors: True)
    monkeypatch.setattr(torch_varlen, "varlen_attn", lambda *given, **options: calls.append((given, options)))
    varlen_attn(given.query, *given[3:5], given.cu_q, given.cu_k, 1, 9, return_aux=AuxRequest(lse=wants_lse))
    ((arguments, options),) = calls
    assert (arguments[5], options["return_aux"].lse) == (max_q, wants_lse)


def test_torchs_function_is_for_gpus() -> None:
    half = torch.zeros(1, 256, 1, 8, dtype=torch.bfloat16)
    assert not varlen.takes_flash(half[0], half, half)


def attended_parts(num_keys: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 3, HEADS, KEY_SIZE, generator=generator)
    key = torch.randn(1, num_keys, KV_HEADS, KEY_SIZE, generator=generator)
    return query, key, torch.randn(1, num_keys, KV_HEADS, VALUE_SIZE, generator=generator)


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("nothing", [-torch.inf, torch.inf])
@pytest.mark.parametrize("cut", [0, 4, 9])
def test_parts_merge_to_the_whole(cut: int, nothing: float, softcap: float | None) -> None:
    query, key, value = attended_parts(9)
    first = (torch.arange(9) < cut).expand(1, 3, 9)
    one, other, whole = (
        masked_attention(query, key, value, seen, scale=0.7, softcap=softcap)
        for seen in (first, ~first, torch.ones_like(first))
    )
    other = other[0], torch.where(torch.isinf(other[1]), nothing, other[1])  # torch gives one infinity or the other
    for got, expected in zip(merged([one_set(one), one_set(other)]), whole, strict=True):
        torch.testing.assert_close(got, expected)


def test_two_empty_parts_merge_to_nothing() -> None:
    query, key, value = attended_parts(2)
    nothing = masked_attention(query, key, value, torch.zeros(1, 3, 2, dtype=torch.bool), scale=1.0, softcap=None)
    output, lse = merged([one_set(nothing), one_set(nothing)])
    assert output.abs().max() == 0
    assert bool((lse == -torch.inf).all())


def test_sinks_take_their_share_of_the_softmax() -> None:
    query, key, value = attended_parts(9)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    seen = torch.ones(1, 3, 9, dtype=torch.bool)
    output, lse = with_sinks(masked_attention(query, key, value, seen, scale=0.7, softcap=None), sinks)
    scores = torch.einsum("bqhd,bkhd->bqhk", query, key.repeat_interleave(2, dim=2)) * 0.7
    scores = torch.cat([scores, sinks[None, None, :, None].expand(1, 3, HEADS, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :-1]
    torch.testing.assert_close(output, torch.einsum("bqhk,bkhd->bqhd", weights, value.repeat_interleave(2, dim=2)))
    torch.testing.assert_close(lse, torch.logsumexp(scores, dim=-1))


def test_not_a_number_stays_one() -> None:
    query, key, value = attended_parts(4)
    seen = torch.ones(1, 3, 4, dtype=torch.bool)
    broken = masked_attention(query, key * torch.nan, value, seen, scale=1.0, softcap=None)
    sound = masked_attention(query, key, value, seen, scale=1.0, softcap=None)
    for pair in ((broken, sound), (sound, broken)):
        assert bool(merged([*map(one_set, pair)])[0].isnan().all())


def test_each_query_may_have_a_span_of_its_own() -> None:
    given = texts()
    begin, end = torch.zeros(len(given.query), dtype=torch.long), torch.zeros(len(given.query), dtype=torch.long)
    begin[3], end[3] = 2, 4  # the third token of the second text sees its third and fourth key
    options: dict[str, Any] = {"scale": 0.7, "softcap": None}
    pages = given.key_pages, given.value_pages, given.cu_q, 5
    output, lse = attend_spans(given.query, *pages, (begin, end), given.tables, **options)
    scores = given.keys[1][2:4, 0] @ given.query[3, 0] * 0.7
    torch.testing.assert_close(output[3, 0], torch.softmax(scores, 0) @ given.values[1][2:4, 0])
    assert bool((lse[:3] == -torch.inf).all())


def test_keys_need_a_place_and_a_count() -> None:
    given = texts()
    for missing in ("seqused_k", "block_table"):
        with pytest.raises(ValueError, match="varlen_attn needs"):
            attend(given, (-1, 0), **{missing: None})
