"""Running a model over one packed row; transformers' own forward is one way, `fused.py` another."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.linear import pack_linears


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The new tokens of all sequences, one after the other, and the rows of which outputs are needed."""

    tokens: list[int]
    positions: list[int]
    logit_rows: list[int]  # at least one: heads fail on empty input
    observed_rows: list[int]
    hidden_layers: tuple[int, ...]  # ascending


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

    def __call__(self, row: PackedRow) -> DecoderOutput:
        """See `Decoder`."""
        device = self._model.device
        kept = torch.tensor(row.logit_rows, device=device)
        packed = torch.tensor([row.tokens, row.positions], device=device)  # [2, tokens]
        options: dict[str, Any] = {"logits_to_keep": kept} if self._takes_rows else {}
        if row.hidden_layers:
            options["output_hidden_states"] = True
        output = self._model(input_ids=packed[:1], position_ids=packed[1:], use_cache=False, **options)
        logits = output.logits[0] if self._takes_rows else output.logits[0, kept]
        if not row.hidden_layers:
            return logits, None
        observed = torch.tensor(row.observed_rows, device=device)
        states = [output.hidden_states[layer][0, observed] for layer in row.hidden_layers]
        return logits, torch.stack(states, dim=1)
