"""Tiny random heads of every kind for a tiny target, for proofs and tests."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from specdec.heads.dflash import DFlashHead, DFlashShape
from specdec.heads.eagle3 import Eagle3Head, Eagle3Shape
from specdec.heads.formats.dflash import save_dflash
from specdec.heads.formats.eagle3 import save_eagle3
from specdec.heads.formats.medusa import save_medusa
from specdec.heads.formats.target import TargetFolder, target_folder
from specdec.heads.medusa import MedusaHead, MedusaShape

WEIGHT_DEVIATION = 0.4  # far from uniform distributions


def layers_for(target: TargetFolder, model_type: str = "llama", num_layers: int = 1) -> PretrainedConfig:
    """Return the configuration of a tiny head's layers."""
    config: PretrainedConfig = AutoConfig.for_model(
        model_type,
        hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=target.vocab_size,
        num_hidden_layers=num_layers,
    )
    return config


def randomised(head: nn.Module, target: TargetFolder, seed: int = 0) -> nn.Module:
    """Give a head random weights that bfloat16 holds, and the target's embeddings and output rows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            random = torch.randn(parameter.shape, generator=generator) * WEIGHT_DEVIATION
            parameter.copy_((1 + random if "norm" in name else random).bfloat16())
        if isinstance(head, Eagle3Head | DFlashHead):
            head.embed_tokens.weight.copy_(target.embeddings())
            head.lm_head.weight.copy_(target.output_rows(head.vocabulary.target_ids))
        if isinstance(head, MedusaHead) and not head.shape.has_own_lm_heads:
            head.lm_heads[0].load_state_dict({"weight": target.output_rows(head.vocabulary.target_ids)})
    return head.requires_grad_(False)


def eagle3_head(target: TargetFolder, draft_vocab_size: int | None = None, **flags: bool) -> Eagle3Head:
    """Return a random EAGLE-3 head."""
    size = draft_vocab_size or target.vocab_size
    layers = (0, 1, target.num_layers)
    head = Eagle3Head(Eagle3Shape(layers_for(target), size, layers, target.hidden_size, **flags))
    _reduce(head, size)
    assert isinstance(randomised(head, target), Eagle3Head)
    return head


def dflash_head(target: TargetFolder, draft_vocab_size: int | None = None, block_size: int = 4) -> DFlashHead:
    """Return a random DFlash head."""
    size = draft_vocab_size or target.vocab_size
    shape = DFlashShape(
        layers_for(target, "qwen3", 2), size, (1, target.num_layers), target.hidden_size, block_size, mask_token_id=0
    )
    head = DFlashHead(shape)
    _reduce(head, size)
    assert isinstance(randomised(head, target), DFlashHead)
    return head


def medusa_head(target: TargetFolder, draft_vocab_size: int | None = None, *, own: bool = False) -> MedusaHead:
    """Return three random Medusa heads of one layer."""
    size = draft_vocab_size or target.vocab_size
    head = MedusaHead(MedusaShape(target.hidden_size, target.vocab_size, size, 3, 1, has_own_lm_heads=own))
    _reduce(head, size)
    assert isinstance(randomised(head, target), MedusaHead)
    return head


def _reduce(head: Eagle3Head | DFlashHead | MedusaHead, size: int) -> None:
    vocab_size = len(head.vocabulary.t2d)
    if size < vocab_size:
        head.vocabulary.choose(torch.arange(size) * (vocab_size // size))


def save_heads(target: Path, folder: Path, draft_vocab_size: int | None = None) -> dict[str, Path]:
    """Save a head of each kind for a target; return their folders by kind."""
    verifier, folders = target_folder(str(target)), {kind: folder / kind for kind in ("eagle3", "dflash", "medusa")}
    save_eagle3(eagle3_head(verifier, draft_vocab_size), folders["eagle3"], str(target), with_lm_head=False)
    save_dflash(dflash_head(verifier, draft_vocab_size), folders["dflash"], str(target), with_lm_head=False)
    save_medusa(medusa_head(verifier, draft_vocab_size), folders["medusa"], str(target), with_lm_head=False)
    return folders


def resized(head: Eagle3Head, target_hidden_size: int) -> Eagle3Head:
    """Return a head of the same shape that reads states of another size."""
    return Eagle3Head(replace(head.shape, target_hidden_size=target_hidden_size))
