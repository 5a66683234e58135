"""Planted bugs in the engine, each with the test that must reject it."""

import asyncio
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention.varlen import AuxRequest

from specdec.engine.attention import NewBackend, Segment
from specdec.engine.compiled import ROW_NUMBERS, CompiledBackend, RowwiseCompiledBackend
from specdec.engine.contiguous import ContiguousPool
from specdec.engine.decoder import PackedRow
from specdec.engine.paged import PagedBackend
from specdec.engine.paged_call import PagedCall
from specdec.engine.paged_pool import PagedPool
from specdec.engine.paged_row import PagedRow
from specdec.engine.sdpa import SdpaBackend
from specdec.engine.varlen import varlen_attn
from tests.engine import test_batch_invariance, test_graphs, test_loop, test_loop_trees, test_sequence
from tests.engine.scenarios import TEXT_LENGTH, check_hidden_states, check_tree_rounds
from tests.engine.test_sequence import Texts
from tests.engine.tiny_models import ReferenceModel, load
from tests.support import architectures

Original = Any


@dataclass(frozen=True)
class Mutant:
    """A replacement for the attribute at `target`, made from the original."""

    name: str
    target: str  # module and attribute, as monkeypatch takes them
    replace: Callable[[Original], Any]
    check: Callable[[], None]

    @property
    def is_of_kernel(self) -> bool:
        """Whether it changes what the compiled kernel gets."""
        return self.target.startswith("specdec.engine.compiled")


@cache
def folder(architecture: str) -> Path:
    return architectures.build(architecture, Path(tempfile.mkdtemp()))


@cache
def reference(architecture: str) -> ReferenceModel:
    return ReferenceModel(folder(architecture))


def trees_of(architecture: str, new_backend: NewBackend = SdpaBackend) -> Callable[[], None]:
    """Return the comparison of trees with the reference; the self-check at load is skipped."""
    return lambda: check_tree_rounds(
        load(folder(architecture), self_check=False, new_backend=new_backend), reference(architecture)
    )


def parts_of(architecture: str) -> Callable[[], None]:
    """Return the comparison with the reference where texts have so many pages that they are attended to in parts."""
    return lambda: check_tree_rounds(
        load(folder(architecture), self_check=False, new_backend=PagedBackend, block_tokens=4), reference(architecture)
    )


def hidden_states_of(architecture: str, new_backend: NewBackend = SdpaBackend) -> Callable[[], None]:
    return lambda: check_hidden_states(
        load(folder(architecture), self_check=False, new_backend=new_backend), reference(architecture)
    )


def bits_in_batches() -> None:
    """Compare a text in pieces with single tokens, in int8."""
    model = load(folder("llama"), quantization="int8")
    test_batch_invariance.TestBits().test_pieces_do_not_matter(model, 5)


def one_scale_for_all(original: Original) -> Any:
    def digits_of(rows: torch.Tensor) -> Any:
        """Round as `quantize_dynamic` does: with a scale that depends on every row."""
        beside = torch.cat([rows, rows.abs().amax().expand(1, rows.shape[1])])
        digits, scales = original(beside.flatten()[None])
        digits = digits.view(2, -1, rows.shape[1])[:, :-1].reshape(2 * len(rows), -1)
        return digits, scales.expand(len(rows), 1)

    return digits_of


def accepted_path() -> None:
    test_sequence.test_accepted_path_is_kept(Texts(), [20, 31, 41, 99], [20, 31, 41])


def in_loop(test: Callable[[], Any]) -> Callable[[], None]:
    """Return a check that runs one test of the engine loop."""
    return lambda: asyncio.run(asyncio.wait_for(test(), 20))


def everything_before(parents: Sequence[int]) -> Any:
    return np.tri(len(parents), dtype=np.bool_)


def parent_only(parents: Sequence[int]) -> Any:
    matrix = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent:
            matrix[node, parent - 1] = True
    return matrix


def rows_with(change: Callable[[list[int]], list[int]]) -> Callable[[Original], Any]:
    """Change the numbers that the kernel gets of each new token: token, first slot, linear, end, path."""

    def replace(original: Original) -> Any:
        def add(self: Any, segment: Segment, first_token: int, first_slot: int) -> None:
            begin = len(self.numbers)
            original(self, segment, first_token, first_slot)
            for row in range(begin, len(self.numbers), ROW_NUMBERS):
                self.numbers[row : row + ROW_NUMBERS] = array("q", change(list(self.numbers[row : row + ROW_NUMBERS])))

        return add

    return replace


def compiled_with(change: Callable[[PackedRow], PackedRow]) -> Callable[[Original], Any]:
    """Return what lets a forward in one call run over another row."""
    return lambda original: lambda self, row, angles, plan: original(self, change(row), angles, plan)


def slots_in_window(self: Any, window: int, first: int, device: torch.device) -> torch.Tensor:
    segment: Segment = self._segment
    new = torch.arange(segment.past, segment.total, device=device)
    return new[:, None] - torch.arange(first, segment.total, device=device) >= window


def move_keys_only(self: ContiguousPool, key: str, first: int, slots: Sequence[int]) -> None:
    begin = self.first_slot(key)
    for layer in self.layers:
        layer.keys[begin + first : begin + first + len(slots)] = layer.keys[torch.tensor(slots) + begin]


def seeing_all_own(call: PagedCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> Any:
    sizes = call.cu_q, call.cu_q, call.max_q, call.max_q
    options: Any = {"return_aux": AuxRequest(lse=True), "scale": scaling, "enable_gqa": True}
    output, lse = varlen_attn(query, key, value, *sizes, **options)
    return output, lse.T


def counting_empty_parts(original: Original) -> Any:
    def initialise(self: Any, *given: Any) -> None:
        original(self, *given)
        self._bias = torch.zeros_like(self._bias)

    return initialise


def one_key_less(original: Original) -> Any:
    def add(self: PagedRow, segment: Segment, pool: PagedPool) -> None:
        original(self, segment, pool)
        self.trees = [entry._replace(num_seen=max(1, entry.num_seen - 1)) for entry in self.trees]

    return add


def wider_window(original: Original) -> Any:
    """Let each token see the one that has just left its window."""
    return lambda self, query, layer, options: original(self, query, layer, replace(options, window=options.window + 1))


def recorded_batches() -> None:
    """Compare recorded forwards of batches of every size with the reference."""
    test_graphs.check_batches(*test_graphs.recorded(folder("llama")), reference("llama"))


def filled_once(original: Original) -> Any:
    def fill(self: Any, numbers: Any) -> None:
        if not hasattr(self, "is_filled"):
            original(self, numbers)
        self.is_filled = True

    return fill


def first_child(parents: Sequence[int], tree_tokens: Sequence[int], root: int, tokens: Sequence[int]) -> list[int]:
    path: list[int] = []
    while len(path) < len(tokens) and root in parents:
        path.append(list(parents).index(root))
        root = path[-1] + 1
    return path


def without_final_norm(original: Original) -> Any:
    def run_layers(self: Any, row: PackedRow) -> Any:
        hidden, states = original(self, row)
        return hidden, [*states[:-1], hidden[row.observed_rows]] if states else states

    return run_layers


def one_token_late(original: Original) -> Any:
    def packed(feeds: Any, segments: Any, *more: Any) -> PackedRow:
        row: PackedRow = original(feeds, segments, *more)
        rows = [max(0, observed - 1) for observed in row.observed_rows]
        return PackedRow(row.tokens, row.positions, row.logit_rows, rows, row.hidden_layers)

    return packed


MUTANTS = [
    Mutant("siblings attend to one another", "specdec.engine.sdpa.ancestor_matrix", lambda _: everything_before, trees)
    for trees in (trees_of("llama"), trees_of("gemma2"), trees_of("gpt_oss"))
] + [
    Mutant(
        "a node attends only to its parent",
        "specdec.engine.sdpa.ancestor_matrix",
        lambda _: parent_only,
        trees_of("llama"),
    ),
    Mutant(
        "the kernel lets a node see the slots before its own",
        "specdec.engine.compiled.KernelRows.add",
        rows_with(lambda row: [*row[:2], row[3], row[3], 0]),
        trees_of("llama", RowwiseCompiledBackend),
    ),
    Mutant(
        "the kernel gives a token one key too few",
        "specdec.engine.compiled.KernelRows.add",
        rows_with(lambda row: [*row[:3], max(1, row[3] - 1), row[4]]),
        trees_of("gemma2", RowwiseCompiledBackend),
    ),
    Mutant(
        "all nodes take the path of the first",
        "specdec.engine.compiled.KernelRows.add",
        rows_with(lambda row: [*row[:4], 0]),
        trees_of("llama", RowwiseCompiledBackend),
    ),
    Mutant(
        "the compiled forward forgets windows",
        "specdec.engine.compiled_layers.layer_struct",
        lambda original: lambda parts, kept: original(replace(parts, window=None), kept),
        trees_of("mistral", CompiledBackend),
    ),
    Mutant(
        "the compiled forward forgets the norms of heads",
        "specdec.engine.compiled_layers.layer_struct",
        lambda original: lambda parts, kept: original(replace(parts, head_norm=None), kept),
        trees_of("qwen3", CompiledBackend),
    ),
    Mutant(
        "the compiled forward gives logits of the rows before",
        "specdec.engine.compiled_layers.CompiledLayers.__call__",
        compiled_with(lambda row: replace(row, logit_rows=[max(0, at - 1) for at in row.logit_rows])),
        trees_of("llama", CompiledBackend),
    ),
    Mutant(
        "the compiled forward observes one layer late",
        "specdec.engine.compiled_layers.CompiledLayers.__call__",
        compiled_with(lambda row: replace(row, hidden_layers=tuple(layer + 1 for layer in row.hidden_layers))),
        hidden_states_of("llama", CompiledBackend),
    ),
    Mutant(
        "positions count slots",
        "specdec.engine.attention.Segment.positions",
        lambda _: property(lambda self: list(range(self.past, self.total))),
        trees_of("llama"),
    ),
    Mutant(
        "windows count slots", "specdec.engine.sdpa.Part._out_of_window", lambda _: slots_in_window, trees_of("mistral")
    ),
    Mutant(
        "trees ignore windows",
        "specdec.engine.sdpa.Part._out_of_window",
        lambda original: lambda self, *others: torch.zeros_like(original(self, *others)),
        trees_of("gemma2"),
    ),
    Mutant(
        "accepted keys and values are not compacted",
        "specdec.engine.contiguous.ContiguousPool.compact",
        lambda _: lambda *arguments: None,
        trees_of("llama"),
    ),
    Mutant(
        "only keys are compacted",
        "specdec.engine.contiguous.ContiguousPool.compact",
        lambda _: move_keys_only,
        trees_of("llama"),
    ),
    Mutant(
        "pages: siblings attend to one another",
        "specdec.engine.paged_row.ancestor_matrix",
        lambda _: everything_before,
        trees_of("llama", PagedBackend),
    ),
    Mutant(
        "pages: a tree sees one key too few of the text before it",
        "specdec.engine.paged_row.PagedRow.add",
        one_key_less,
        trees_of("qwen3", PagedBackend),
    ),
    Mutant(
        "pages: the text before a tree counts as much as the tree",
        "specdec.engine.paged.merged",
        lambda _: lambda attended, wants_lse: (sum(output.mean(0) for output, _ in attended) / 2, attended[0][1][0]),
        trees_of("llama", PagedBackend),
    ),
    Mutant(
        "parts: one without a token counts",
        "specdec.engine.paged_call.TextParts.__init__",
        counting_empty_parts,
        parts_of("llama"),
    ),
    Mutant(
        "parts: a text's last token is in none",
        "specdec.engine.paged_call.TextParts.__init__",
        lambda original: lambda self, call, num_seen, *sizes: original(self, call, (num_seen - 1).clamp(min=0), *sizes),
        parts_of("llama"),
    ),
    Mutant(
        "parts: each has the same weight",
        "specdec.engine.paged_call.merged",
        lambda original: lambda attended, wants_lse: original([(output, sums * 0) for output, sums in attended]),
        parts_of("qwen3"),
    ),
    Mutant(
        "parts: queries of one head go to another's keys",
        "specdec.engine.paged_call.TextParts.attend",
        lambda original: lambda self, query, *given: original(self, query.flip(1), *given),
        parts_of("llama"),
    ),
    Mutant(
        "parts: a chain's tokens see later ones",
        "specdec.engine.paged_call.PagedCall.attend_own",
        lambda _: seeing_all_own,
        parts_of("llama"),
    ),
    Mutant(
        "parts: a chain's tokens do not see one another",
        "specdec.engine.paged_call.PagedCall.attend_own",
        lambda original: lambda self, *given: [original(self, *given)[0], original(self, *given)[1] * 0 - torch.inf],
        parts_of("llama"),
    ),
    Mutant(
        "pages: windows are one token too wide",
        "specdec.engine.paged._Chains._attend_whole",
        wider_window,
        trees_of("mistral", PagedBackend),
    ),
    Mutant(
        "pages: trees see no window",
        "specdec.engine.paged._Trees._attend_before",
        lambda original: (
            lambda self, nodes, layer, options: original(self, nodes, layer, replace(options, window=None))
        ),
        trees_of("mistral", PagedBackend),
    ),
    Mutant(
        "pages: sinks take nothing",
        "specdec.engine.paged.with_sinks",
        lambda _: lambda attended, sinks: attended,
        trees_of("gpt_oss", PagedBackend),
    ),
    Mutant(
        "pages: what is padded is seen",
        "specdec.engine.varlen.window_spans",
        lambda original: lambda *given: (original(*given)[0], original(*given)[1].clamp(min=TEXT_LENGTH + 30)),
        trees_of("llama", PagedBackend),
    ),
    Mutant(
        "pages: accepted keys and values are not compacted",
        "specdec.engine.paged_pool.PagedPool.compact",
        lambda _: lambda *arguments: None,
        trees_of("llama", PagedBackend),
    ),
    Mutant(
        "graphs: padding is written to a sequence's page",
        "specdec.engine.paged_row.PagedRow.pad",
        lambda original: lambda self, *sizes: original(self, *sizes[:-1], self.chains[0].pages[0]),
        recorded_batches,
    ),
    Mutant(
        "graphs: a replay reads what was there when it was recorded",
        "specdec.engine.paged_row.DeviceNumbers.fill",
        filled_once,
        recorded_batches,
    ),
    Mutant("activations share a scale", "specdec.engine.quantized.digits_of", one_scale_for_all, bits_in_batches),
    Mutant(
        "the path is compacted one slot too far",
        "specdec.engine.contiguous.ContiguousPool.compact",
        lambda original: lambda self, key, first, slots: original(self, key, first + 1, slots),
        trees_of("llama"),
    ),
    Mutant(
        "hidden states are one layer early",
        "specdec.engine.fused.FusedDecoder._run_layers",
        lambda original: (
            lambda self, row: (lambda hidden, states: (hidden, states[:1] + states[:-1]))(*original(self, row))
        ),
        hidden_states_of("llama"),
    ),
    Mutant(
        "the last hidden state is not normalised",
        "specdec.engine.fused.FusedDecoder._run_layers",
        without_final_norm,
        hidden_states_of("llama"),
    ),
    Mutant(
        "hidden states belong to the token before",
        "specdec.engine.model._packed",
        one_token_late,
        hidden_states_of("gpt2"),
    ),
    Mutant(
        "the path follows first children", "specdec.engine.sequence.longest_path", lambda _: first_child, accepted_path
    ),
    Mutant(
        "tokens whose rows are due are not fed again",
        "specdec.engine.sequence.Sequence.resume",
        lambda original: lambda self, *tokens, **options: original(self, *tokens, **{**options, "min_fed": 0}),
        lambda: test_sequence.test_accepted_path_is_kept(Texts(), [20, 30, 40], [20, 30]),
    ),
    Mutant(
        "matching tokens are kept for any start",
        "specdec.engine.sequence.Sequence._num_to_keep",
        lambda _: lambda *arguments: sys.maxsize,
        lambda: test_sequence.test_start_before_the_tree_truncates(Texts()),
    ),
    Mutant(
        "a repeated message keeps more than at first",
        "specdec.engine.sequence.Sequence._num_to_keep",
        lambda _: lambda *arguments: sys.maxsize,
        lambda: test_sequence.TestRepeatedMessage().test_first_message_is_fed_again_in_full(Texts()),
    ),
    Mutant(
        "a repeated message keeps nothing",
        "specdec.engine.sequence.Sequence._num_to_keep",
        lambda _: lambda self, start, match: sys.maxsize if match or start == self.num_committed else 0,
        lambda: test_sequence.TestRepeatedMessage().test_keeps_the_same_prefix(Texts()),
    ),
    Mutant(
        "drafting ahead moves the pending tree",
        "specdec.engine.sequence.Sequence.mark_committed",
        lambda original: lambda self, length: original(self, max(length, self.length + 1)),
        lambda: test_sequence.test_drafting_ahead_keeps_the_pending_tree(Texts()),
    ),
    Mutant(
        "branches count as a prefix",
        "specdec.engine.sequence.Sequence.num_linear",
        lambda _: property(lambda self: self.length),
        lambda: test_sequence.test_branches_do_not_count_as_prefix(Texts()),
    ),
    Mutant(
        "draft tokens count as a committed prefix",
        "specdec.engine.sequence.Sequence.resume",
        lambda original: lambda self, *tokens, **options: original(self, *tokens, **{**options, "on_draft": True}),
        lambda: test_sequence.test_draft_tokens_do_not_count_as_prefix(Texts()),
    ),
    Mutant(
        "failed tasks keep their tokens",
        "specdec.engine.sequence.Sequence.truncate",
        lambda original: lambda self, length: original(self, length) if length == 0 else self.release(),
        in_loop(test_loop.test_cancelling_spares_sequence_and_other_tasks),
    ),
    Mutant(
        "trees are split like prompts",
        "specdec.engine.task.Task.num_together",
        lambda _: property(lambda self: self.num_rows),
        in_loop(lambda: test_loop_trees.TestTrees().test_trees_are_never_split(1)),
    ),
    Mutant(
        "only the last chunk is observed",
        "specdec.engine.task.Task.note_fed",
        lambda original: lambda self, feed, states: (self._observed.clear(), original(self, feed, states))[-1],
        in_loop(lambda: test_loop_trees.TestHiddenStates().test_states_span_prefill_chunks(150)),
    ),
]
