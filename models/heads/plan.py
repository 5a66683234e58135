"""What a run of `python -m models.train_head` is to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

SEED = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train, on what."""

    target: Path
    name: str  # of the target, as written into the head's configuration
    kind: str
    out: Path
    work: Path
    num_tokens: int
    minutes: float
    draft_vocab_size: int
    texts: Sequence[str]
    own: float
    further: Path | None
    num_at_once: int | None  # answers under way; None: as many as suit what samples them
    max_new_tokens: int
    num_threads: int
    with_lm_head: bool
    device: torch.device
    sampling_minutes: float
    computes_states: bool  # of the target, for each batch, instead of keeping them
