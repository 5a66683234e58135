"""DFlash: a block of tokens in one forward, conditioned on the target's hidden states (Chen et al. 2026, "DFlash").

The block is the last committed token, then mask tokens; each mask predicts the token at its own position. The positions
of a block see one another, and the target's states at all tokens before the block.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.heads.layers import Angles, Layer, Norm, Rotary, attend
from specdec.heads.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class DFlashShape:
    """What defines the network besides its weights, by the names of the published configurations."""

    transformer: PretrainedConfig  # of the layers; vocab_size is the target's
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # l: the target's state after l layers
    target_hidden_size: int
    block_size: int  # the last committed token, and the masks
    mask_token_id: int


KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [..., L, kv_heads, head_size]."""


class DFlashHead(nn.Module):
    """The head. `embed_tokens` and, where a checkpoint has none of its own, `lm_head` are the target's."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        config = shape.transformer
        self.shape = shape
        self.vocabulary = DraftVocabulary(shape.draft_vocab_size, config.vocab_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(shape.aux_layers) * shape.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, shape.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)

    def offered(self, states: torch.Tensor, positions: torch.Tensor) -> list[KeysAndValues]:
        """Return what the target's states [..., L, layers, target_hidden_size] at `positions` [..., L] offer to each
        layer."""
        joined = self.hidden_norm(self.fc(states.flatten(-2)))
        angles = self.rotary(positions)
        return [layer.self_attn.keys_and_values(joined, angles) for layer in self.layers]  # type: ignore[union-attr, operator]

    def predict(
        self, tokens: torch.Tensor, positions: torch.Tensor, context: list[KeysAndValues], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return logits [..., B - 1, draft_vocab_size] of the B - 1 tokens that follow `tokens` [...].

        `positions` [...] are those of the tokens; `mask` [..., B, L + B] is True where a position of the block sees
        one of the L tokens of the context, or of the block.
        """
        hidden, angles = self.begin(tokens, positions)
        for layer, (keys, values) in zip(self.layers, context, strict=True):
            assert isinstance(layer, Layer)
            own = layer.project(hidden, angles)
            key, value = torch.cat((keys, own.key), dim=-3), torch.cat((values, own.value), dim=-3)
            hidden = layer.finish(hidden, attend(own.query, key, value, mask))
        return self.logits(hidden)

    def begin(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Angles]:
        """Return embeddings [..., B, hidden_size] and angles of blocks that begin with tokens [...]."""
        places = positions.unsqueeze(-1) + torch.arange(self.shape.block_size, device=positions.device)
        block = torch.full_like(places, self.shape.mask_token_id)
        block[..., 0] = tokens
        return self.embed_tokens(block), self.rotary(places)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., B - 1, draft_vocab_size] from the last layer's output [..., B, hidden_size]."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden[..., 1:, :]))
        return logits
