"""A tiny target and a draft that resembles it, with room for long texts."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer

CONTEXT_LENGTH = 2048
NOISE = 0.02  # of weights with a deviation of 0.25: about half of the draft tokens are accepted


def save_models(folder: Path) -> tuple[Path, Path, Path]:
    """Save a target, its draft, and another target for mistakes; return their folders."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    target, other = (_long(build("llama", folder / name, seed=seed)) for name, seed in (("target", 0), ("other", 7)))
    draft = folder / "draft"
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    model.save_pretrained(draft)
    for each in (target, draft, other):
        save_tokenizer(each, VOCAB_SIZE)
    return target, draft, other


def _long(folder: Path) -> Path:
    """Let a model with rotary positions read longer texts."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_LENGTH}))
    return folder
