"""The inputs and outputs of a forward."""

from dataclasses import dataclass

import torch

from specdec.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to append to one sequence, and the outputs needed at their positions."""

    sequence: Sequence
    tokens: list[int]
    num_rows: int  # last tokens whose logits are needed; 0: none
    parents: tuple[int, ...] = ()  # of a tree that the last tokens form (see `exact/tree.py`); empty: a chain
    hidden_layers: tuple[int, ...] = ()  # 0: the embeddings; l: after l layers; num_layers: what the head reads
    num_observed: int = 0  # last tokens whose hidden states are needed


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What the model computed for a list of feeds, in their order."""

    logits: torch.Tensor  # float32 [sum of num_rows, vocab_size]
    hidden_states: tuple[torch.Tensor | None, ...]
    """For each feed [num_observed, len(hidden_layers), hidden_size], in the model's type; None where none were asked
    for."""
