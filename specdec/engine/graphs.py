"""CUDA graphs of decoding forwards: recorded once for a bucket of shapes, then replayed without the calls' cost.

A forward goes into the smallest bucket that holds its tokens and sequences; what is missing is padding, which attends
to a page of its own and whose outputs are dropped. All that changes from forward to forward lies in one vector of
numbers (`DeviceNumbers`), which one copy fills: tokens, positions, slots, page tables, lengths, and the wanted rows.

Forwards with a tree, or with more than MAX_EACH tokens of one sequence, are not recorded. Once recording has failed, as
it does where a model's forward depends on numbers that are on the device, no others are.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from specdec.engine.attention import Segment, attending
from specdec.engine.decoder import Decoder, DecoderOutput, PackedRow
from specdec.engine.errors import where_raised
from specdec.engine.paged import PagedBackend, PagedPlan
from specdec.engine.paged_row import DeviceNumbers, Numbers, PagedRow

logger = logging.getLogger(__name__)

EACH = (1, 8, 64)  # tokens of one sequence: plain decoding, a chain of drafts, the longest round
MAX_EACH = EACH[-1]
TOKENS = (1, 2, 4, *range(8, 64, 8), *range(64, 513, 32))
SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
MIN_PAGES = 4  # of a page table; wider ones double
MAX_GRAPHS = 64  # each keeps the logits of all its tokens on the device; what comes later is not recorded

Run = Callable[[], DecoderOutput]


class Recorder(Protocol):
    """What records the work of a function on the device."""

    def record(self, run: Run) -> Run:
        """Return what does again what `run` did, with what then lies in its inputs, and returns the same tensors.

        The caller keeps `run`, and with it the inputs.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, which share the memory of what lies between their inputs and outputs."""

    NUM_WARMUPS = 2  # before recording: libraries choose their kernels, and allocate, at first use

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, run: Run) -> Run:
        """See `Recorder`."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(self.NUM_WARMUPS):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # other threads, which have no part in it, may go on using the device
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = run()

        def replay() -> DecoderOutput:
            graph.replay()
            return output

        return replay


class Repeater:
    """Records nothing: the function runs again, into the tensors that it returned at first. For tests, on a CPU."""

    def record(self, run: Run) -> Run:
        """See `Recorder`."""
        output = run()

        def repeat() -> DecoderOutput:
            for kept, new in zip(output, run(), strict=True):
                if kept is not None and new is not None:
                    kept.copy_(new)
            return output

        return repeat


class Bucket(NamedTuple):
    """The shapes that a graph is recorded for."""

    num_tokens: int
    num_sequences: int
    max_each: int  # tokens of one sequence
    num_pages: int  # of one sequence
    hidden_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded forward, and what it reads."""

    numbers: DeviceNumbers
    replay: Run
    recorded: Run  # holds what else the graph reads: it has only its address


class Graphs:
    """The recorded forwards of one model."""

    def __init__(self, decoder: Decoder, backend: PagedBackend, recorder: Recorder, context_length: int) -> None:
        self._decoder, self._backend, self._recorder = decoder, backend, recorder
        self._num_positions = min(context_length, backend.pool.num_blocks * backend.pool.block_tokens)
        self._graphs: dict[Bucket, _Graph] = {}
        self._failed = False

    @property
    def buckets(self) -> list[Bucket]:
        """What was recorded so far."""
        return list(self._graphs)

    def run(self, row: PackedRow, segments: Sequence[Segment]) -> DecoderOutput | None:
        """Run a forward, or return None where it is not one that is recorded."""
        paged = self._backend.row(segments)
        bucket = bucket_for(paged, row.hidden_layers)
        if bucket is None or (bucket not in self._graphs and (self._failed or len(self._graphs) >= MAX_GRAPHS)):
            return None
        numbers = _numbers(row, paged, bucket, self._backend.pool.scratch_page)
        graph = self._graphs.get(bucket)
        if graph is None:
            graph = self._record(bucket, numbers)
        else:
            graph.numbers.fill(numbers)
        if graph is None:
            return None
        logits, states = graph.replay()
        wanted, observed = (
            graph.numbers[name][: len(indices)]
            for name, indices in (("logit_rows", row.logit_rows), ("observed_rows", row.observed_rows))
        )
        # both are copies: the next replay overwrites what it gives
        return logits.index_select(0, wanted), None if states is None else states.index_select(0, observed)

    def _record(self, bucket: Bucket, numbers: dict[str, Numbers]) -> _Graph | None:
        """Record a bucket's forward; return None where that fails."""
        self._decoder.cover(self._num_positions)
        on_device = DeviceNumbers.of(numbers, self._backend.pool.device)
        all_rows = torch.arange(bucket.num_tokens, device=self._backend.pool.device)
        tokens, positions = on_device["tokens"], on_device["positions"]

        def run() -> DecoderOutput:
            row = PackedRow(tokens.long(), positions.long(), all_rows, all_rows, bucket.hidden_layers)
            with attending(PagedPlan(on_device, self._backend.pool, bucket.max_each, 0)):
                return self._decoder(row)

        try:
            self._graphs[bucket] = _Graph(on_device, self._recorder.record(run), run)
        except RuntimeError as error:  # what torch raises where something cannot be recorded, or memory is short
            self._failed = True
            facts = {"error": type(error).__name__, "where": where_raised(error), "num_graphs": len(self._graphs)}
            logger.warning("graphs_refused", extra=facts)
            return None
        return self._graphs[bucket]


def bucket_for(row: PagedRow, hidden_layers: tuple[int, ...]) -> Bucket | None:
    """Return the smallest bucket that holds a forward, or None where there is none."""
    num_tokens, num_sequences = len(row.slots), len(row.chains)
    longest = max((len(entry.rows) for entry in row.chains), default=0)
    if row.trees or longest > MAX_EACH or num_tokens > TOKENS[-1] or num_sequences > SEQUENCES[-2]:
        return None
    max_each = _at_least(longest, EACH)
    num_pages = MIN_PAGES
    while num_pages < row.max_pages or num_pages * row.page_tokens < max_each:
        num_pages *= 2
    if max_each == 1:  # torch's function takes one token of every sequence, padding too
        num_sequences = _at_least(num_sequences, SEQUENCES)
        return Bucket(num_sequences, num_sequences, 1, num_pages, hidden_layers)
    padded = _at_least(num_tokens, TOKENS)
    num_more = -(-(padded - num_tokens) // max_each)
    return Bucket(padded, _at_least(num_sequences + num_more, SEQUENCES), max_each, num_pages, hidden_layers)


def _at_least(number: int, sizes: Sequence[int]) -> int:
    return sizes[bisect_left(sizes, number)]


def _numbers(row: PackedRow, paged: PagedRow, bucket: Bucket, scratch_page: int) -> dict[str, Numbers]:
    """Return all that a recorded forward reads, padded."""
    paged.pad(bucket.num_tokens, bucket.num_sequences, bucket.max_each, scratch_page)
    given = {"tokens": row.tokens, "logit_rows": row.logit_rows, "observed_rows": row.observed_rows}
    numbers = paged.numbers(bucket.num_pages)
    numbers["positions"] = np.array(paged.positions, np.int32)
    for name, values in given.items():
        numbers[name] = np.zeros(bucket.num_tokens, np.int32)
        numbers[name][: len(values)] = values
    return numbers
