"""The one attention function, as the engine calls it, against the same sums in plain steps on the same device.

In the dry run both are the plain steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention.varlen import AuxRequest

from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.report import Report
from specdec.engine.paged_call import DividedChains, PagedCall, num_parts
from specdec.engine.paged_pool import LayerPages
from specdec.engine.pool import LayerShape
from specdec.engine.varlen import (
    FLASH_PAGE_TOKENS,
    Attended,
    attend_spans,
    takes_flash,
    varlen_attn,
    window_spans,
)

HEADS, KV_HEADS, SIZE = 8, 2, 128
MAX_DIFFERENCE = 0.02  # of numbers near 1 with eight bits; of the log-sum-exps too
SEEN = (1, 255, 256, 257, 900)  # tokens of the sequences: around a page's end
LONG_SEEN = (1, 300, 1024, 2049, 4000)  # of those that are attended to in parts, some of which are empty


@dataclass(frozen=True, slots=True)
class Case:
    """One way in which the engine calls."""

    name: str
    num_queries: tuple[int, ...]  # of each sequence
    window: tuple[int, int] = (-1, 0)
    wants_lse: bool = False


CASES = (
    Case("one token each", (1,) * 5, (-1, -1)),
    Case("one token each, with sums", (1,) * 5, (-1, -1), wants_lse=True),
    Case("one token each, in a window", (1,) * 5, (99, 0)),
    Case("chains", (1, 6, 6, 6, 6)),
    Case("chains, with sums", (1, 6, 6, 6, 6), wants_lse=True),
    Case("a prompt beside rounds", (1, 6, 1, 6, 300)),
    Case("a prompt in a window", (1, 6, 1, 6, 300), (99, 0)),
    Case("the text before trees", (3, 10, 10, 10, 2), (-1, -1), wants_lse=True),
)
CASES_IN_PARTS = (
    Case("long texts in parts, one token each", (1,) * 5),
    Case("long texts in parts, chains", (1, 6, 6, 6, 0)),
)


def check_kernels(place: Place, report: Report) -> None:
    """Compare all cases."""
    for case in CASES:
        with report.part(f"attention: {case.name}"):
            _check(place, report, case)
    for case in CASES_IN_PARTS:
        with report.part(f"attention: {case.name}"):
            _check_parts(place, report, case)


def _check(place: Place, report: Report, case: Case) -> None:
    query, key, value, tables = (tensor.to(place.device) for tensor in _inputs(sum(case.num_queries), SEEN))
    cu_q, cu_k = (torch.tensor([0, *each]).cumsum(0).int().to(place.device) for each in (case.num_queries, SEEN))
    used, longest = torch.tensor(SEEN, dtype=torch.int32, device=place.device), max(case.num_queries)
    found = varlen_attn(
        query,
        key,
        value,
        cu_q,
        cu_k,
        longest,
        tables.shape[1] * FLASH_PAGE_TOKENS,
        return_aux=AuxRequest(lse=case.wants_lse),
        window_size=case.window,
        enable_gqa=True,
        seqused_k=used,
        block_table=tables,
        num_splits=1,
    )
    spans = window_spans(cu_q, used.long(), len(query), case.window)
    plain = attend_spans(query, key, value, cu_q, longest, spans, tables, scale=SIZE**-0.5, softcap=None)
    by = "torch's function" if takes_flash(query, key, value) else "plain steps"
    _compare(report, case, by, (found[0], found[1].T) if isinstance(found, tuple) else (found, plain[1]), plain)


def _compare(report: Report, case: Case, by: str, found: Attended, plain: Attended) -> None:
    differences = [(ours.float() - theirs).abs().max() for ours, theirs in zip(found, plain, strict=True)]
    worst = float(torch.stack(differences).max())  # also of what is no number, which Python's own would pass over
    report.add(f"attention: {case.name}", worst <= MAX_DIFFERENCE, f"{by}, largest difference {worst:.1e}")


def _check_parts(place: Place, report: Report, case: Case) -> None:
    """Compare long texts in parts, merged, with the same texts in one go."""
    inputs = (tensor.to(place.device) for tensor in _inputs(sum(case.num_queries), LONG_SEEN))
    query, keys, values, tables = inputs
    cu_q, cu_k = (torch.tensor([0, *each]).cumsum(0).int().to(place.device) for each in (case.num_queries, LONG_SEEN))
    used = torch.tensor(LONG_SEEN, dtype=torch.int32, device=place.device)
    call = PagedCall(cu_q, cu_k, used, tables, max(case.num_queries))
    layer = LayerPages(LayerShape(KV_HEADS, SIZE, SIZE), 0, FLASH_PAGE_TOKENS, keys.dtype, place.device)
    layer.keys, layer.values = keys, values
    count = num_parts(tables.shape[1], len(query))
    chains = DividedChains(call, count, len(query), FLASH_PAGE_TOKENS)
    own_keys, own_values = (_own(pages, call) for pages in (keys, values))
    found = chains.attend(query, own_keys, own_values, layer, SIZE**-0.5, wants_lse=True)
    spans = window_spans(cu_q, used.long(), len(query), (-1, 0))
    plain = attend_spans(query, keys, values, cu_q, call.max_q, spans, tables, scale=SIZE**-0.5, softcap=None)
    _compare(report, case, f"{count} parts", found, plain)


def _own(pages: torch.Tensor, call: PagedCall) -> torch.Tensor:
    """Return what lies in the pages for the last tokens of each text, as many as it has queries."""
    rows = []
    for table, seen, num in zip(
        call.tables, call.used.tolist(), (call.cu_q[1:] - call.cu_q[:-1]).tolist(), strict=True
    ):
        rows.append(pages[table.long()].flatten(0, 1)[seen - num : seen])
    return torch.cat(rows)


def _inputs(num_queries: int, seen: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return random queries, pages of keys and of values, and the tables of the sequences' pages, in no order."""
    generator = torch.Generator().manual_seed(1)
    counts = [-(-number // FLASH_PAGE_TOKENS) for number in seen]
    tables = torch.zeros(len(seen), max(counts), dtype=torch.int32)
    pages = torch.split(torch.randperm(sum(counts), generator=generator), counts)
    for table, own in zip(tables, pages, strict=True):
        table[: len(own)] = own
    shapes = (num_queries, HEADS, SIZE), *[(sum(counts), FLASH_PAGE_TOKENS, KV_HEADS, SIZE)] * 2
    return *(torch.randn(shape, generator=generator).bfloat16() for shape in shapes), tables
