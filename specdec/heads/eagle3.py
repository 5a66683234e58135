"""EAGLE-3: an autoregressive head on the target's hidden states (Li et al. 2025, "EAGLE-3").

A position of the head is a pair: the target's states at token i, of some layers, and token i + 1. It predicts token
i + 2. Where the target's states are not known yet, the head's own output at the pair before takes their place.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.heads.layers import Angles, Layer, Norm, Projected, Rotary
from specdec.heads.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """What defines the network besides its weights, by the names of the published configurations."""

    transformer: PretrainedConfig  # of the layer; vocab_size is the target's
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # l: the target's state after l layers
    target_hidden_size: int
    norm_before_residual: bool = False  # the layer adds to the normalised states
    norm_before_fc: bool = False  # one norm of all layers' states together
    fc_norm: bool = False  # a norm of each layer's states
    norm_output: bool = False  # normalised outputs take the place of states


class Eagle3Layer(Layer):
    """A decoder layer that reads a token's embedding beside a state."""

    def __init__(self, shape: Eagle3Shape) -> None:
        config = shape.transformer
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self._normalises_residual = shape.norm_before_residual

    def project_pair(
        self, embedded: torch.Tensor, state: torch.Tensor, angles: Angles
    ) -> tuple[Projected, torch.Tensor]:
        """Return projections and residual of pairs, both [..., hidden_size]."""
        normalised = self.hidden_norm(state)
        rows = torch.cat((self.input_layernorm(embedded), normalised), dim=-1)
        return self.self_attn(rows, angles), normalised if self._normalises_residual else state


class Eagle3Head(nn.Module):
    """The head. `embed_tokens` and, where a checkpoint has none of its own, `lm_head` are the target's."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        config = shape.transformer
        width, num_layers = config.hidden_size, len(shape.aux_layers)
        self.shape = shape
        self.vocabulary = DraftVocabulary(shape.draft_vocab_size, config.vocab_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.fc = nn.Linear(num_layers * shape.target_hidden_size, width, bias=False)
        self.input_norm = (
            Norm(num_layers * shape.target_hidden_size, config.rms_norm_eps) if shape.norm_before_fc else None
        )
        self.fc_norm = (
            nn.ModuleList(Norm(shape.target_hidden_size, config.rms_norm_eps) for _ in range(num_layers))
            if shape.fc_norm
            else None
        )
        self.layers = nn.ModuleList([Eagle3Layer(shape)])
        self.norm = Norm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, shape.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)

    @property
    def layer(self) -> Eagle3Layer:
        """The one decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        """Join the target's states [..., layers, target_hidden_size] to the head's own width."""
        if self.fc_norm is not None:
            states = torch.stack(
                [norm(state) for norm, state in zip(self.fc_norm, states.unbind(dim=-2), strict=True)], dim=-2
            )
        flat = states.flatten(-2)
        joined: torch.Tensor = self.fc(self.input_norm(flat) if self.input_norm else flat)
        return joined

    def predict(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [..., draft_vocab_size], and what takes the place of states at the next pair, from a layer's
        output [..., hidden_size]."""
        normalised = self.norm(output)
        return self.lm_head(normalised), normalised if self.shape.norm_output else output
