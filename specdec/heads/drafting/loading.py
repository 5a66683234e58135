"""Loads heads of every kind, and checks that they fit their target."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specdec.engine import Quantization
from specdec.heads.drafting.dflash import DFlashRunner
from specdec.heads.drafting.eagle3 import Eagle3Runner
from specdec.heads.drafting.medusa import MedusaRunner
from specdec.heads.drafting.predictions import Predictions
from specdec.heads.drafting.runner import Runner
from specdec.heads.formats.dflash import load_dflash
from specdec.heads.formats.eagle3 import load_eagle3
from specdec.heads.formats.medusa import load_medusa
from specdec.heads.formats.target import TargetFolder
from specdec.heads.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class HeadParts:
    """What a head is loaded from, and how it is run."""

    folder: str  # or hub id
    target: TargetFolder
    vocab_size: int  # the end of the target's real vocabulary
    device: torch.device
    dtype: torch.dtype
    max_bytes: int  # of what all sessions hold together
    draws: bool = False  # chains of drawn tokens, not trees of chosen ones
    support_mass: float = 0.99  # of the distributions that are drawn from
    support_max: int = 64
    quantization: Quantization | None = None  # of its weights, on a CPU

    def predictions(self, vocabulary: DraftVocabulary) -> Predictions:
        """Return what reads the head's logits."""
        return Predictions(vocabulary, self.vocab_size, self.support_mass, self.support_max)


def _eagle3(parts: HeadParts) -> Eagle3Runner:
    head = load_eagle3(parts.folder, parts.target.folder, parts.dtype).to(parts.device)
    return Eagle3Runner(head, parts.predictions(head.vocabulary), parts.draws, parts.max_bytes, parts.quantization)


def _dflash(parts: HeadParts) -> DFlashRunner:
    head = load_dflash(parts.folder, parts.target.folder, parts.dtype).to(parts.device)
    return DFlashRunner(head, parts.predictions(head.vocabulary), parts.draws, parts.max_bytes, parts.quantization)


def _medusa(parts: HeadParts) -> MedusaRunner:
    head = load_medusa(parts.folder, parts.target.folder, parts.dtype).to(parts.device)
    predictions, num_layers = parts.predictions(head.vocabulary), parts.target.num_layers
    return MedusaRunner(head, num_layers, predictions, parts.draws, parts.max_bytes, parts.quantization)


LOADERS: Mapping[str, Callable[[HeadParts], Runner[Any]]] = {"eagle3": _eagle3, "dflash": _dflash, "medusa": _medusa}


def load_runner(kind: str, parts: HeadParts) -> Runner[Any]:
    """Return what runs a head of a kind, one of `LOADERS`. Raises HeadRefused."""
    return LOADERS[kind](parts)
