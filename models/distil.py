"""The draft's loss: at first the KL divergence from the target, in the end the rejection rate."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.learning import Forward
from models.rows import Rows, read_rows

PROMPT_WEIGHT = 0.25  # of a position in a prompt; in service the draft proposes only completion tokens


@torch.no_grad()
def embed_like(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """Initialise the draft's embeddings with the principal components of the target's: [vocabulary, draft's hidden]."""
    target_embeddings, draft_embeddings = target.model.embed_tokens.weight.float(), draft.model.embed_tokens.weight
    axes = torch.linalg.svd(target_embeddings, full_matrices=False).Vh[: draft_embeddings.shape[1]]
    draft_embeddings.copy_(target_embeddings @ axes.T)


def row_batches(work: Path, size: int, seed: int) -> Iterator[Rows]:
    """Yield shuffled batches of the cached distributions, endlessly."""
    rows, random = read_rows(work), np.random.default_rng(seed)
    while True:
        order = torch.from_numpy(random.permutation(len(rows.tokens)))
        yield from (rows.select(index) for index in order.split(size) if len(index) == size)


def position_weights(rows: Rows) -> Tensor:
    """Return a weight for each position, larger after the prompt; they sum to 1: [sequences, WINDOW - 1].

    The factor of the temperature cancels its inverse in the gradient of logits / temperature.
    """
    positions = torch.arange(rows.support.shape[1])
    own = positions + 1 >= rows.prompt_lengths[:, None]
    weights = torch.where(own, 1.0, PROMPT_WEIGHT) * rows.temperatures[:, None]
    return weights / weights.sum()


def with_tail(log_probs: Tensor) -> Tensor:
    """Append the log-probability of all tokens outside the support: [..., SUPPORT] to [..., SUPPORT + 1]."""
    tail = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp_min(1e-6)
    return torch.cat([log_probs, tail.log()], -1)


def distillation_loss(draft: Forward, rows: Rows, elapsed: float) -> Tensor:
    """Blend, as time elapses from 0 to 1, the divergence KL(target || draft) into the rejection rate.

    The rejection rate is 1 - sum min(p, q), the total variation between target and draft (Leviathan et al. 2023,
    corollary 3.6); early on its gradient is too weak to learn from (Zhou et al. 2024, DistillSpec, compare both).
    """
    logits = draft(rows.tokens[:, :-1], use_cache=False).logits.float() / rows.temperatures[:, None, None]
    drafted = with_tail(logits.log_softmax(-1).gather(-1, rows.support))
    target_log_probs = with_tail(rows.log_probs)
    divergence = (target_log_probs.exp() * (target_log_probs - drafted)).sum(-1)
    rejection = 1.0 - torch.minimum(target_log_probs.exp(), drafted.exp()).sum(-1)
    return ((1.0 - elapsed) * divergence + elapsed * rejection).mul(position_weights(rows)).sum()
