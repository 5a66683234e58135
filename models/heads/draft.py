"""Training a small draft model on the target's own answers: knowledge distillation (Hinton et al. 2015)."""

import torch
from torch import nn
from transformers import LlamaForCausalLM

from models.heads.batches import Batch
from models.heads.objective import Agreement, DepthCounter, soft_cross_entropy
from models.heads.target import TargetParts, transformer_config

WIDTH_PART = 1 / 3  # of the target's
HEAD_SIZE = 64
NUM_LAYERS = 2
ANSWER_PART = 0.25  # of the tokens of answers count in a batch: the output layer costs more than all others


def new_model(target: TargetParts) -> LlamaForCausalLM:
    """Return an untrained Llama of the target's vocabulary; its embeddings are the target's along their main axes."""
    num_heads = max(1, round(WIDTH_PART * target.hidden_size / HEAD_SIZE))
    width = num_heads * HEAD_SIZE
    config = transformer_config(target, "llama", NUM_LAYERS, 3 * width)
    config.update({"hidden_size": width, "num_attention_heads": num_heads, "num_key_value_heads": 1})
    config.update({"head_dim": HEAD_SIZE, "tie_word_embeddings": True, "dtype": "bfloat16"})
    config.update({name: getattr(target.config, name, None) for name in ("bos_token_id", "eos_token_id")})
    model = LlamaForCausalLM(config)
    _, _, axes = torch.linalg.svd(target.embeddings, full_matrices=False)  # [target's width, target's width]
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    with torch.no_grad():
        embeddings.weight[:, : len(axes)].copy_(target.embeddings @ axes[:width].T)
    return model


class DraftObjective:
    """A draft model under training."""

    def __init__(self, model: LlamaForCausalLM, target: TargetParts) -> None:
        self.head: nn.Module = model
        self._model = model
        self._target = target
        self._random = torch.Generator(target.device).manual_seed(0)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss over a part of the answers' tokens."""
        logits, wanted, _ = self._predicted(batch)
        return soft_cross_entropy(logits, wanted).mean()

    def agreement(self, batch: Batch) -> Agreement:
        """Return how the choices of the next token fare."""
        counter = DepthCounter(torch.arange(self._target.vocab_size, device=self._target.device))
        counter.add(*self._predicted(batch))
        return counter.agreement

    def _predicted(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [R, V], the target's [R, V], and the tokens that came [R]."""
        counts = batch.is_answer[:, 1:]
        drawn = torch.rand(counts.shape, generator=self._random, device=counts.device)
        counts = counts & (drawn < ANSWER_PART)
        states = self._model.model(input_ids=batch.tokens[:, :-1]).last_hidden_state
        wanted = batch.states[:, :-1, -1][counts].float() @ self._target.head.T
        return self._model.lm_head(states[counts]), wanted, batch.tokens[:, 1:][counts]
