"""The layer of an autoregressive head in one call of our C code, over pairs of several texts at once.

A pair is a token's embedding beside a state. What it computes is what `specdec/heads/drafting/fast.py` computes with
torch's steps, up to rounding; for the few rows of a draft each of those takes longer than its arithmetic.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.engine.layer_structs import (
    ForwardStruct,
    GroupStruct,
    LayerParts,
    LayerStruct,
    NormParts,
    PairsStruct,
    Room,
    address,
    layer_struct,
    model_struct,
    norm_struct,
)
from specdec.engine.native import kernels


@dataclass(frozen=True, slots=True)
class TextPairs:
    """New pairs of one text: their keys and values are written behind those of `begin` entries."""

    keys: torch.Tensor  # [entries, kv_heads, head_size], with room for all
    values: torch.Tensor
    begin: int
    num_linear: Sequence[int]  # entries from the first on that each pair sees
    others: Sequence[Sequence[int]]  # and entries that it sees besides, itself among them; empty: none


class CompiledPairs:
    """Runs the layer; on one thread at a time."""

    def __init__(
        self, parts: LayerParts, embeddings: torch.Tensor, state_norm: NormParts, adds_to_normalised: bool
    ) -> None:
        """`parts` must have kernels, and weights of the embeddings' type."""
        self._kept: list[object] = [parts, embeddings]  # what the structs point to
        self._like = embeddings.detach()
        self._layers = (LayerStruct * 1)(layer_struct(parts, self._kept))
        self._state_norm, self._adds_to_normalised = norm_struct(state_norm, self._kept), adds_to_normalised
        self._model = model_struct(self._like, self._layers, parts)
        self._room = Room(self._model)

    def __call__(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        states: torch.Tensor,
        angles: torch.Tensor,
        texts: Sequence[TextPairs],
    ) -> torch.Tensor:
        """Write the pairs' keys and values; return the layer's outputs [N, width] for states [N, width].

        `angles` [positions, cosine and signed sine, 1, head_size] cover the positions.
        """
        assert angles.shape[1:] == (2, 1, self._model.head_size), "all of a head is turned"
        rows, paths, slots, groups = array("q"), array("q"), array("q"), []
        for text in texts:
            first = len(slots)
            for row, (num_linear, others) in enumerate(zip(text.num_linear, text.others, strict=True), start=first):
                rows.extend((row, 0, num_linear, num_linear + len(others), len(paths)))
                paths.extend(others)
            slots.extend(range(text.begin, text.begin + len(text.num_linear)))
            groups.append(GroupStruct(text.keys.data_ptr(), text.values.data_ptr(), first, len(slots) - first))
        states = states.to(self._like.dtype).contiguous()
        outputs = torch.empty_like(states)
        pairs = PairsStruct(self._state_norm, self._adds_to_normalised, states.data_ptr(), outputs.data_ptr())
        token_ids, places = array("q", tokens), array("q", positions)
        forward = ForwardStruct(
            tokens=address(token_ids),
            positions=address(places),
            slots=address(slots),
            angles=angles.data_ptr(),
            rows=address(rows),
            paths=address(paths),
            num_tokens=len(token_ids),
        )
        self._run(pairs, forward, (GroupStruct * len(groups))(*groups))
        return outputs

    def _run(self, pairs: PairsStruct, forward: ForwardStruct, groups: "ctypes.Array[GroupStruct]") -> None:
        library = kernels()
        assert library is not None, "the parts have kernels"
        arguments = ctypes.addressof(pairs), ctypes.addressof(forward), ctypes.addressof(groups), len(groups)
        library.specdec_pairs(ctypes.addressof(self._model), *arguments, self._room.of(forward.num_tokens))
