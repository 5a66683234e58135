"""A Llama-family forward in one call of our C code, where attention and products are our own kernels.

Between the products of a decoding forward there is little arithmetic: calling it step by step takes longer than
computing it. `fused.py` computes the same with torch's steps, and serves where this cannot.
"""

import ctypes
from array import array
from collections.abc import Callable

import torch

from specdec.engine.compiled import CompiledPlan
from specdec.engine.decoder import DecoderOutput, PackedRow
from specdec.engine.layer_structs import (
    ForwardStruct,
    LayerStruct,
    ModelParts,
    Room,
    address,
    has_kernel,
    layer_struct,
    model_struct,
    norm_struct,
    weight_of,
)
from specdec.engine.native import kernels


def compiled_layers(parts: ModelParts) -> "CompiledLayers | None":
    """Return the forward of such a model in one call, or None where a part of it has no kernel of ours."""
    has_one_shape = len({layer.shape for layer in parts.layers}) == 1
    has_kernels = has_kernel(parts.head) and all(layer.has_kernels for layer in parts.layers)
    return CompiledLayers(parts) if has_one_shape and has_kernels else None


class CompiledLayers:
    """Runs a model's layers and head through the kernels."""

    def __init__(self, parts: ModelParts) -> None:
        """`parts` have products of our own kernel alone."""
        self._kept: list[object] = [parts]  # what the structs point to
        self._vocab_size = int(weight_of(parts.head).num_out)
        self._layers = (LayerStruct * len(parts.layers))(*(layer_struct(layer, self._kept) for layer in parts.layers))
        self._like, first = parts.embeddings.detach(), parts.layers[0]
        self._width = self._like.shape[1]
        self._model = model_struct(self._like, self._layers, first)
        self._model.norm, self._model.head = norm_struct(parts.norm, self._kept), weight_of(parts.head)
        self._room = Room(self._model)
        self._stored_in: object = None  # the cache that the layers' keys and values point into

    def __call__(self, row: PackedRow, angles: torch.Tensor, plan: CompiledPlan) -> DecoderOutput:
        """Run the model over a row of lists whose attention is all the kernel's.

        `angles` [positions, cosine and signed sine, 1, head_size] cover the row's positions.
        """
        assert angles.shape[1:] == (2, 1, self._model.head_size)
        self._store_in(plan)
        logits = self._like.new_empty(len(row.logit_rows), self._vocab_size)
        states = self._like.new_empty(len(row.observed_rows), len(row.hidden_layers), self._width)
        tokens, positions, logit_rows, observed_rows, hidden_layers = (
            array("q", numbers)
            for numbers in (row.tokens, row.positions, row.logit_rows, row.observed_rows, row.hidden_layers)
        )
        forward = ForwardStruct(
            tokens=address(tokens),
            positions=address(positions),
            slots=address(plan.slots),
            angles=angles.data_ptr(),
            rows=address(plan.rows.numbers),
            paths=address(plan.rows.paths),
            logit_rows=address(logit_rows),
            observed_rows=address(observed_rows),
            hidden_layers=address(hidden_layers),
            num_tokens=len(tokens),
            num_paths=len(plan.rows.paths),
            num_logit_rows=len(logit_rows),
            num_observed=len(observed_rows),
            num_hidden_layers=len(hidden_layers),
            logits=logits.data_ptr(),
            states=states.data_ptr(),
        )
        self._run(forward, row.when_prepared)
        return logits, states if hidden_layers else None

    def _run(self, forward: ForwardStruct, when_prepared: Callable[[], None]) -> None:
        library = kernels()
        assert library is not None, "without it no plan is whole"
        room = self._room.of(forward.num_tokens)
        when_prepared()
        library.specdec_forward(ctypes.addressof(self._model), ctypes.addressof(forward), room)

    def _store_in(self, plan: CompiledPlan) -> None:
        """Let the layers use the plan's cache, which stays the same and where it is from the first forward on."""
        if self._stored_in is plan.pool:
            return
        for layer, storage in zip(self._layers, plan.pool.layers, strict=True):
            assert storage.keys.dtype == self._like.dtype
            layer.keys, layer.values = storage.keys.data_ptr(), storage.values.data_ptr()
        self._stored_in = plan.pool
