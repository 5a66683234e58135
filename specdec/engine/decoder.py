"""Running a model over one packed row; transformers' own forward is one way, `fused.py` another."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.linear import pack_linears

Indices = list[int] | torch.Tensor
"""Whole numbers: in a list, or on the model's device already, where a recorded forward finds them (`graphs.py`)."""


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The new tokens of all sequences, one after the other, and the rows of which outputs are needed."""

    tokens: Indices
    positions: Indices
    logit_rows: Indices  # at least one: heads fail on empty input; as many as tokens: all rows, in order
    observed_rows: Indices
    hidden_layers: tuple[int, ...]  # ascending
    when_prepared: Callable[[], None] = field(default=nothing, compare=False)  # called before the long computation


DecoderOutput = tuple[torch.Tensor, torch.Tensor | None]
"""Logits [logit_rows, vocab_size] and, if there are `hidden_layers`, states [observed_rows, hidden_layers, width]."""


ReplaceLinear = Callable[[nn.Module], nn.Module]


class Decoder(Protocol):
    """A model whose attention goes through `attention.current_attention`."""

    def __call__(self, row: PackedRow) -> DecoderOutput:
        """Run the model over the row."""
        ...

    def replace_linears(self, replace: ReplaceLinear) -> None:
        """Put what `replace` returns in place of each linear layer; it may see other modules, and return them."""
        ...

    def cover(self, num_positions: int) -> None:
        """Compute what depends on positions alone, for so many: rows whose positions are tensors need it."""
        ...


def on_device(indices: Indices, device: torch.device) -> torch.Tensor:
    """Return the numbers as a tensor on a device."""
    return indices if isinstance(indices, torch.Tensor) else torch.tensor(indices, device=device)


class TransformersDecoder:
    """Runs transformers' own forward. Weights that several processes share are not packed."""

    def __init__(self, model: PreTrainedModel, *, is_shared: bool = False) -> None:
        if not is_shared:
            pack_linears(model)
        self._model = model
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def replace_linears(self, replace: ReplaceLinear) -> None:
        """See `Decoder`."""
        for parent in list(self._model.modules()):
            for name, child in list(parent.named_children()):
                setattr(parent, name, replace(child))

    def cover(self, num_positions: int) -> None:
        """See `Decoder`: the model computes its angles in each forward."""

    def __call__(self, row: PackedRow) -> DecoderOutput:
        """See `Decoder`."""
        row.when_prepared()
        device = self._model.device
        kept = on_device(row.logit_rows, device)
        tokens, positions = (on_device(indices, device)[None] for indices in (row.tokens, row.positions))
        options: dict[str, Any] = {"logits_to_keep": kept} if self._takes_rows else {}
        if row.hidden_layers:
            options["output_hidden_states"] = True
        output = self._model(input_ids=tokens, position_ids=positions, use_cache=False, **options)
        logits = output.logits[0] if self._takes_rows else output.logits[0, kept]
        if not row.hidden_layers:
            return logits, None
        observed = on_device(row.observed_rows, device)
        states = [output.hidden_states[layer][0, observed] for layer in row.hidden_layers]
        return logits, torch.stack(states, dim=1)
