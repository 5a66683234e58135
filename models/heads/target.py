"""What a head takes from its target: its embeddings, its output head, and its configuration."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from specdec.engine.pretrained import choose_device, load_pretrained, text_config


@dataclass(frozen=True, slots=True)
class TargetParts:
    """The parts of a target that its heads share."""

    name: str
    folder: Path
    config: PreTrainedConfig
    embeddings: torch.Tensor  # [vocab_size, hidden_size]
    head: torch.Tensor  # [vocab_size, hidden_size]
    norm: torch.Tensor  # [hidden_size], the weight of the last norm
    layers: Sequence[int]  # whose states the samples hold; the last one is what the head reads

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return self.embeddings.device

    def to(self, device: torch.device) -> "TargetParts":
        """Return the same parts on a device."""
        moved = {name: getattr(self, name).to(device) for name in ("embeddings", "head", "norm")}
        return replace(self, **moved)

    @property
    def hidden_size(self) -> int:
        """The width of a state."""
        return int(self.embeddings.shape[1])

    @property
    def vocab_size(self) -> int:
        """Tokens that the target can read."""
        return int(self.embeddings.shape[0])


class TargetStates:
    """A target that computes its states of whole texts: on a GPU that is faster than to read what was kept."""

    def __init__(self, folder: Path, layers: Sequence[int], device: torch.device) -> None:
        """Load the target, as it is served there. Raises ModelRefused."""
        model = load_pretrained(str(folder), device, "auto")
        if getattr(model, "_supports_sdpa", False):
            model.set_attn_implementation("sdpa")  # never holds the scores of whole texts
            torch.backends.cuda.enable_cudnn_sdp(
                False
            )  # it plans anew for each length, which takes longer than to attend
        self._model = model.base_model
        self._layers = tuple(layers)

    @torch.no_grad()
    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the states [N, T, layers, hidden_size], bfloat16, of texts [N, T] that are padded at their ends."""
        states = self._model(tokens, output_hidden_states=True, use_cache=False).hidden_states
        return torch.stack([states[layer] for layer in self._layers], dim=2).to(torch.bfloat16)


def load_parts(folder: Path, name: str, layers: Sequence[int]) -> TargetParts:
    """Read a target's parts in float32. Raises ModelRefused."""
    model = load_pretrained(str(folder), choose_device("cpu"), "float32")
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    assert isinstance(head, nn.Linear)
    config = text_config(str(folder))
    norm = getattr(getattr(model.base_model, "norm", None), "weight", None)
    weight = norm.detach() if isinstance(norm, torch.Tensor) else torch.ones(config.hidden_size)
    return TargetParts(name, folder, config, embeddings.weight.detach(), head.weight.detach(), weight, tuple(layers))


def transformer_config(target: TargetParts, model_type: str, num_layers: int, intermediate_size: int) -> Any:
    """Return the configuration of layers as wide as the target, with its positions; "llama" or "qwen3" layers."""
    config = target.config
    num_heads = config.num_attention_heads
    return AutoConfig.for_model(
        model_type,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", num_heads),
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // num_heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=getattr(config, "rope_parameters", None),
        tie_word_embeddings=False,
    )


def adopt(head: Any, target: TargetParts) -> None:
    """Give a head the target's embeddings, last norm and output head, of the tokens of its draft vocabulary.

    Embeddings and output head stay as they are: a checkpoint need not hold them.
    """
    with torch.no_grad():
        head.embed_tokens.weight.copy_(target.embeddings)
        head.lm_head.weight.copy_(target.head[head.vocabulary.target_ids])
        head.norm.weight.copy_(target.norm)
    head.embed_tokens.weight.requires_grad_(False)
    head.lm_head.weight.requires_grad_(False)


def readopt(head: Any, target: TargetParts, draft_tokens: torch.Tensor) -> Any:
    """Give a head that was trained the target's embeddings and output head again, of other tokens; return it."""
    head.requires_grad_(True)
    norm = head.norm.weight.detach().clone()  # the only one of these that was trained
    head.vocabulary.choose(draft_tokens)
    adopt(head, target)
    with torch.no_grad():
        head.norm.weight.copy_(norm)
    return head


def state_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers to keep states of: a low, a middle and a high one (Li et al. 2025), and the last."""
    read = {min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3)}
    return (*sorted(read), num_layers)
