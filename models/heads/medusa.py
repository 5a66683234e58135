"""Training Medusa heads: each on its own, on the target's last states (Cai et al. 2024, section 2.2.1)."""

import torch

from models.heads.batches import Batch
from models.heads.objective import Agreement, DepthCounter, soft_cross_entropy
from models.heads.target import TargetParts
from specdec.heads.medusa import MedusaHead, MedusaShape

NUM_HEADS = 4
HEAD_WEIGHT = 0.8  # of a head's loss, relative to the head before (Cai et al. 2024)


def new_head(target: TargetParts, draft_tokens: torch.Tensor) -> MedusaHead:
    """Return untrained heads over a draft vocabulary; their output head is the target's, and stays so."""
    shape = MedusaShape(
        hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        draft_vocab_size=len(draft_tokens),
        num_heads=NUM_HEADS,
        num_layers=1,
        has_own_lm_heads=False,
    )
    head = MedusaHead(shape)
    head.vocabulary.choose(draft_tokens)
    weight = head.lm_heads[0].weight
    assert isinstance(weight, torch.nn.Parameter)
    with torch.no_grad():
        weight.copy_(target.head[head.vocabulary.target_ids])
    weight.requires_grad_(False)
    return head


class MedusaObjective:
    """Medusa heads under training."""

    def __init__(self, head: MedusaHead, target: TargetParts) -> None:
        self.head = head
        self._target = target

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the heads' mean losses, later heads weighing less."""
        total = torch.zeros((), device=batch.tokens.device)
        for depth, (logits, finals, _) in enumerate(self._predicted(batch)):
            with torch.no_grad():
                wanted = self.head.lm_heads[0](finals)
            total = total + HEAD_WEIGHT**depth * soft_cross_entropy(logits, wanted).mean()
        return total

    def agreement(self, batch: Batch) -> Agreement:
        """Return how each head's choices fare."""
        counter = DepthCounter(self.head.vocabulary.target_ids)
        for logits, finals, tokens in self._predicted(batch):
            counter.add(logits, finals.float() @ self._target.head.T, tokens)
        return counter.agreement

    def _predicted(self, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return for each head logits [R, D], the states that the target predicts from, and the tokens that came."""
        finals = batch.states[..., -1, :]
        parts = []
        for depth in range(self.head.shape.num_heads):
            ahead = depth + 1
            counts = batch.is_answer[:, ahead + 1 :]
            states = finals[:, : -(ahead + 1)][counts].float()
            logits = self.head(states)[:, depth]
            parts.append((logits, finals[:, ahead:-1][counts].float(), batch.tokens[:, ahead + 1 :][counts]))
        return parts
