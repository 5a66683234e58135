"""A head's own, reduced vocabulary of the target's most frequent tokens (Zhao et al. 2025, "FR-Spec")."""

import torch
from torch import nn


class DraftVocabulary(nn.Module):
    """Maps draft ids to target ids; checkpoints hold the offsets `d2t` and the target tokens that have an id, `t2d`."""

    d2t: torch.Tensor  # int64 [draft_vocab_size]: what to add to a draft id to get the target's
    t2d: torch.Tensor  # bool [target_vocab_size]

    def __init__(self, draft_vocab_size: int, target_vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(target_vocab_size) < draft_vocab_size)

    @property
    def is_reduced(self) -> bool:
        """Whether some target tokens have no draft id."""
        return len(self.d2t) < len(self.t2d)

    @property
    def target_ids(self) -> torch.Tensor:
        """The target's ids, int64 [draft_vocab_size]; rising where the vocabulary was chosen by `choose`."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def choose(self, target_ids: torch.Tensor) -> None:
        """Give draft ids to these target tokens [draft_vocab_size]."""
        ids = torch.unique(target_ids, sorted=True)
        if len(ids) != len(self.d2t):
            raise ValueError(f"{len(ids)} different tokens were chosen for a draft vocabulary of {len(self.d2t)}")
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()
        self.t2d[ids] = True
