"""The one attention function, as the engine calls it, against the same sums in plain steps on the same device.

In the dry run both are the plain steps.
"""

from dataclasses import dataclass

import torch
from torch.nn.attention.varlen import AuxRequest

from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.report import Report
from specdec.engine.varlen import FLASH_PAGE_TOKENS, attend_spans, takes_flash, varlen_attn, window_spans

HEADS, KV_HEADS, SIZE = 8, 2, 128
MAX_DIFFERENCE = 0.02  # of numbers near 1 with eight bits; of the log-sum-exps too
SEEN = (1, 255, 256, 257, 900)  # tokens of the sequences: around a page's end


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


def check_kernels(place: Place, report: Report) -> None:
    """Compare all cases."""
    for case in CASES:
        with report.part(f"attention: {case.name}"):
            _check(place, report, case)


def _check(place: Place, report: Report, case: Case) -> None:
    query, key, value, tables = (tensor.to(place.device) for tensor in _inputs(sum(case.num_queries)))
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
    output, lse = (found[0], found[1].T) if isinstance(found, tuple) else (found, plain[1])
    worst = max(float((ours - theirs).abs().max()) for ours, theirs in ((output.float(), plain[0]), (lse, plain[1])))
    by = "torch's function" if takes_flash(query, key, value) else "plain steps"
    report.add(f"attention: {case.name}", worst <= MAX_DIFFERENCE, f"{by}, largest difference {worst:.1e}")


def _inputs(num_queries: int) -> tuple[torch.Tensor, ...]:
    """Return random queries, pages of keys and of values, and the tables of the sequences' pages, in no order."""
    generator = torch.Generator().manual_seed(1)
    counts = [-(-seen // FLASH_PAGE_TOKENS) for seen in SEEN]
    tables = torch.zeros(len(SEEN), max(counts), dtype=torch.int32)
    pages = torch.split(torch.randperm(sum(counts), generator=generator), counts)
    for table, own in zip(tables, pages, strict=True):
        table[: len(own)] = own
    shapes = (num_queries, HEADS, SIZE), *[(sum(counts), FLASH_PAGE_TOKENS, KV_HEADS, SIZE)] * 2
    return *(torch.randn(shape, generator=generator).bfloat16() for shape in shapes), tables
