"""The kinds of heads that can be trained: how each begins, and in which format it is exported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from models.heads import dflash, draft, eagle3, medusa
from models.heads.objective import Objective
from models.heads.target import TargetParts, readopt
from specdec.heads.formats.dflash import load_dflash, save_dflash
from specdec.heads.formats.eagle3 import load_eagle3, save_eagle3
from specdec.heads.formats.medusa import save_medusa


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of head."""

    begin: Callable[[TargetParts, torch.Tensor], Objective]
    """Makes it untrained, from the target and the tokens of its draft vocabulary."""
    resume: Callable[[Path, TargetParts, torch.Tensor], Objective] | None
    """Makes it from a folder that was exported, with another draft vocabulary of that size; None: not possible."""
    save: Callable[[Any, Path, TargetParts, bool], None]
    """Writes it to a folder; the last argument says whether the target's output layer is written with it."""
    flag: str  # of a draft worker that loads it
    paper: str


def _begin_dflash(target: TargetParts, draft_tokens: torch.Tensor) -> Objective:
    mask = target.config.pad_token_id
    return dflash.DFlashObjective(dflash.new_head(target, draft_tokens, 0 if mask is None else mask), target)


def _save_model(model: Any, folder: Path, target: TargetParts, with_lm_head: bool) -> None:
    """Write a draft model with the target's tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(target.folder).save_pretrained(folder)


KINDS: Mapping[str, Kind] = {
    "eagle3": Kind(
        lambda target, tokens: eagle3.Eagle3Objective(eagle3.new_head(target, tokens), target),
        lambda folder, target, tokens: eagle3.Eagle3Objective(
            readopt(load_eagle3(folder, target.folder), target, tokens), target
        ),
        lambda head, folder, target, whole: save_eagle3(head, folder, target.name, whole),
        "--eagle3-head",
        "EAGLE-3 (Li et al. 2025)",
    ),
    "dflash": Kind(
        _begin_dflash,
        lambda folder, target, tokens: dflash.DFlashObjective(
            readopt(load_dflash(folder, target.folder), target, tokens), target
        ),
        lambda head, folder, target, whole: save_dflash(head, folder, target.name, whole),
        "--dflash-head",
        "DFlash (Chen et al. 2026)",
    ),
    "medusa": Kind(
        lambda target, tokens: medusa.MedusaObjective(medusa.new_head(target, tokens), target),
        None,
        lambda head, folder, target, whole: save_medusa(head, folder, target.name, whole),
        "--medusa-head",
        "Medusa (Cai et al. 2024)",
    ),
    "draft": Kind(
        lambda target, tokens: draft.DraftObjective(draft.new_model(target), target),
        None,
        _save_model,
        "--model",
        "knowledge distillation (Hinton et al. 2015)",
    ),
}
