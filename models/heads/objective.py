"""What heads are trained to do, and how it is measured: to give the target's distribution.

The loss of a position is the cross-entropy of the head's distribution under the target's, over the draft vocabulary
(Hinton et al. 2015): its gradient vanishes where both are the same, and the rejection rate with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from models.heads.batches import Batch


class Objective(Protocol):
    """One kind of head under training."""

    @property
    def head(self) -> nn.Module:
        """What is trained."""
        ...

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a batch."""
        ...

    def agreement(self, batch: Batch) -> "Agreement":
        """Return how a batch's drafts would fare."""
        ...


def soft_cross_entropy(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy [...] of logits [..., V] under the distribution of target logits [..., V]."""
    probs = target_logits.float().softmax(dim=-1)
    return functional.cross_entropy(logits.float().flatten(0, -2), probs.flatten(0, -2), reduction="none").view(
        logits.shape[:-1]
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """Sums over positions by depth [D]; all tokens before the depth are the target's own."""

    num_positions: torch.Tensor
    num_equal: torch.Tensor  # the head's first choice was the target's token
    overlap: torch.Tensor  # sum of min(p, q) over tokens
    num_within_four: torch.Tensor  # the target's token was among the head's four first choices

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(
            self.num_positions + other.num_positions,
            self.num_equal + other.num_equal,
            self.overlap + other.overlap,
            self.num_within_four + other.num_within_four,
        )

    def __str__(self) -> str:
        def rates(values: torch.Tensor) -> str:
            return " ".join(f"{rate:.3f}" for rate in (values / self.num_positions.clamp(min=1)).tolist())

        return (
            f"first choice {rates(self.num_equal)}; among four {rates(self.num_within_four)}; "
            f"overlap {rates(self.overlap)}"
        )


def total(agreements: Iterable[Agreement]) -> Agreement:
    """Return the sum of at least one."""
    first, *others = agreements
    return sum(others, first)


class DepthCounter:
    """Adds up the agreement of one depth after the other."""

    def __init__(self, target_ids: torch.Tensor) -> None:
        self._ids = target_ids  # of the draft vocabulary
        self._columns: list[tuple[float, float, float, float]] = []

    def add(self, logits: torch.Tensor, target_logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add a depth: logits over the draft vocabulary [N, D], the target's over all [N, V], its tokens [N].

        All of the target's mass outside the draft vocabulary counts as rejected.
        """
        probs = target_logits.float().softmax(dim=-1)[:, self._ids]
        overlap = torch.minimum(probs, logits.float().softmax(dim=-1)).sum(dim=-1)
        best = self._ids[logits.topk(4, dim=-1).indices]
        hits = best == tokens[:, None]
        self._columns.append(
            (
                float(len(tokens)),
                float(hits[:, 0].sum()),
                float(overlap.sum()),
                float(hits.any(dim=-1).sum()),
            )
        )

    @property
    def agreement(self) -> Agreement:
        """What was added up."""
        return Agreement(*(torch.tensor(column) for column in zip(*self._columns, strict=True)))
