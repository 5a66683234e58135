"""Medusa: independent heads on the target's last hidden state (Cai et al. 2024, "Medusa").

Head d predicts the token d + 1 places after the one that the target's own head predicts from the same state.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from specdec.heads.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """What defines the network besides its weights."""

    hidden_size: int
    target_vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_layers: int  # of each head
    has_own_lm_heads: bool  # one a head; otherwise all share the target's
    has_bias: bool = True  # in the layers


class ResidualBlock(nn.Module):
    """Adds a layer's activation to its input."""

    def __init__(self, hidden_size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=bias)
        nn.init.zeros_(self.linear.weight)  # begins as the identity, as in the paper

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden_size] for [..., hidden_size]."""
        return hidden + functional.silu(self.linear(hidden))


class MedusaHead(nn.Module):
    """All heads of a target."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        self.shape = shape
        self.vocabulary = DraftVocabulary(shape.draft_vocab_size, shape.target_vocab_size)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(shape.hidden_size, shape.has_bias) for _ in range(shape.num_layers)))
            for _ in range(shape.num_heads)
        )
        num_lm_heads = shape.num_heads if shape.has_own_lm_heads else 1
        self.lm_heads = nn.ModuleList(
            nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False) for _ in range(num_lm_heads)
        )

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Return logits [..., num_heads, draft_vocab_size] from the target's normalised states [..., hidden_size]."""
        outputs = [block(state) for block in self.blocks]
        if len(self.lm_heads) == 1:
            shared: torch.Tensor = self.lm_heads[0](torch.stack(outputs, dim=-2))
            return shared
        return torch.stack([head(output) for head, output in zip(self.lm_heads, outputs, strict=True)], dim=-2)
