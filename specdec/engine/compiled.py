"""The attention backend for CPUs with a kernel of our own: one call a layer for the new tokens of all sequences.

torch's kernel takes sequences of one length, so that many sessions cost many calls. Ours (`attention_kernel.c`) takes
each new token with its own text, a tree's with its own path, and computes a token's sums in an order that nothing else
in the batch changes. It is built when specdec is installed, where there is a C compiler; `sdpa.py` serves where not.
"""

import ctypes
import sys
from array import array
from collections.abc import Sequence
from typing import ClassVar

import torch

from specdec.engine.attention import AttentionOptions, AttentionPlan, PoolOptions, Segment
from specdec.engine.contiguous import ContiguousPool, LayerPool
from specdec.engine.native import has_tiles, kernels, num_lanes
from specdec.engine.pool import LayerShape
from specdec.engine.sdpa import Part, new_pool

DTYPES = (torch.float32, torch.bfloat16)
# of one sequence, by the kernel's lanes: more go through torch's, where that is faster (docs/benchmarks.md)
MAX_TOKENS = {4: 8, 8: sys.maxsize, 16: sys.maxsize}
ROW_NUMBERS = 5  # of the C struct `Row`: token, first_slot, num_linear, end, path

_POINTER = ctypes.c_void_p


class _Attention(ctypes.Structure):
    """The C struct `Attention`."""

    _fields_: ClassVar = (
        *((name, _POINTER) for name in ("query", "keys", "values", "output", "sinks", "slots")),
        *((name, ctypes.c_int64) for name in ("query_stride", "slot_heads", "output_heads")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "key_size", "value_size")),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("is_bf16", ctypes.c_int64),
        ("lanes", ctypes.c_int64),
        ("has_tiles", ctypes.c_int64),
    )


def max_tokens() -> int:
    """Return how many tokens of one sequence the kernel takes faster than torch's on this processor."""
    return MAX_TOKENS[num_lanes()]


def has_kernel(options: PoolOptions) -> bool:
    """Return whether the kernel is there, and can attend to a pool like this."""
    return _fits(options.device, options.dtype) and kernels() is not None


def lacks_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel could attend to a cache on this device and of this type, but is not there."""
    return _fits(device, dtype) and kernels() is None


def _fits(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in DTYPES


class CompiledBackend:
    """Attends to a `ContiguousPool` through the kernel; an `AttentionBackend`."""

    is_rowwise = False

    def __init__(self, shapes: Sequence[LayerShape], options: PoolOptions) -> None:
        self.pool = new_pool(shapes, options)
        self._kernel = _Kernel()
        self._max_tokens = sys.maxsize if self.is_rowwise else max_tokens()

    def plan(self, segments: Sequence[Segment]) -> AttentionPlan:
        """See `AttentionBackend`."""
        return CompiledPlan(segments, self.pool, self._kernel, self._max_tokens)


class RowwiseCompiledBackend(CompiledBackend):
    """As its base, also for prompts: the bits of a token's attention depend on its own text alone."""

    is_rowwise = True


class _Kernel:
    """Runs the kernel, with room for what it computes in between."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def attend(self, attention: _Attention, rows: "KernelRows") -> None:
        """Attend for all rows."""
        library = kernels()
        assert library is not None, "checked by has_kernel"
        address = ctypes.addressof(attention)
        num_bytes = library.specdec_room(address)
        if self._room.nbytes < num_bytes:
            self._room = torch.empty(num_bytes, dtype=torch.uint8)
        library.specdec_attend_shared(address, rows.address, rows.count, len(rows.paths), self._room.data_ptr())


class KernelRows:
    """The new tokens that the kernel attends for."""

    def __init__(self) -> None:
        self.numbers = array("q")  # ROW_NUMBERS each
        self.paths = array("q")  # the slots of a tree's nodes, from its root to each of them

    @property
    def address(self) -> int:
        """Where the rows lie."""
        return self.numbers.buffer_info()[0]

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.numbers) // ROW_NUMBERS

    def add(self, segment: Segment, first_token: int, first_slot: int) -> None:
        """Add a sequence's new tokens."""
        num_chained = segment.num_tokens - len(segment.parents)
        for token, position in enumerate(range(segment.past, segment.past + num_chained), first_token):
            self.numbers.extend((token, first_slot, position + 1, position + 1, 0))
        paths: list[list[int]] = [[]]  # of the root, which the text before the tree ends with, then of each node
        for node, parent in enumerate(segment.parents):
            path = [*paths[parent], first_slot + segment.tree_start + node]
            paths.append(path)
            token, end = first_token + num_chained + node, segment.tree_start + len(path)
            self.numbers.extend((token, first_slot, segment.tree_start, end, len(self.paths)))
            self.paths.extend(path)


class CompiledPlan:
    """The attention of one forward."""

    def __init__(self, segments: Sequence[Segment], pool: ContiguousPool, kernel: _Kernel, max_tokens: int) -> None:
        """A sequence with more than `max_tokens` new tokens goes through torch's kernel."""
        self.pool, self._layers, self._kernel = pool, iter(pool.layers), kernel
        self.rows, self.slots = KernelRows(), array("q")
        self._prompts: list[tuple[slice, Part]] = []
        for segment in segments:
            first_token, first_slot = len(self.slots), pool.first_slot(segment.key)
            self.slots.extend(range(first_slot + segment.past, first_slot + segment.total))
            if segment.num_tokens > max_tokens:
                self._prompts.append((slice(first_token, len(self.slots)), Part(segment, first_slot)))
            else:
                self.rows.add(segment, first_token, first_slot)

    @property
    def is_whole(self) -> bool:
        """Whether the kernel attends for all new tokens."""
        return not self._prompts

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        layer = next(self._layers)
        self._store(layer.keys, key)
        self._store(layer.values, value)
        output = query.new_empty(*query.shape[:2], value.shape[2], dtype=layer.values.dtype)
        if self.rows.numbers:
            self._attend(query, layer, output, options)
        for tokens, part in self._prompts:
            output[tokens] = part.attend(layer, query[tokens], options)
        return output.to(query.dtype)

    def _store(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Copy the new tokens' keys or values to their slots."""
        tokens, library = _with_whole_tokens(tokens, slots.dtype), kernels()
        assert library is not None, "checked by has_kernel"
        stride, num_bytes = tokens.stride(0) * tokens.itemsize, slots.stride(0) * slots.itemsize
        places = self.slots.buffer_info()[0]
        library.specdec_store(slots.data_ptr(), tokens.data_ptr(), stride, places, len(self.slots), num_bytes)

    def _attend(self, query: torch.Tensor, layer: LayerPool, output: torch.Tensor, options: AttentionOptions) -> None:
        query = _with_whole_tokens(query, layer.keys.dtype)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        attention = _Attention(
            query=query.data_ptr(),
            keys=layer.keys.data_ptr(),
            values=layer.values.data_ptr(),
            output=output.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            slots=self.rows.paths.buffer_info()[0],
            query_stride=query.stride(0),
            slot_heads=layer.keys.shape[1],
            output_heads=query.shape[1],
            num_heads=query.shape[1],
            num_kv_heads=layer.keys.shape[1],
            key_size=query.shape[2],
            value_size=output.shape[2],
            window=options.window or 0,
            scaling=options.scaling,
            softcap=options.softcap or 0.0,
            is_bf16=layer.keys.dtype == torch.bfloat16,
            lanes=num_lanes(),
            has_tiles=has_tiles(),
        )
        self._kernel.attend(attention, self.rows)


def _with_whole_tokens(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [tokens, heads, size] in a type, in which a token's numbers lie side by side."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()
