"""Makes `fixtures/`: tiny random heads, written and run by the package `speculators` itself.

    PYTHONPATH=FOLDER_WITH_SPECULATORS:. python -m tests.heads.make_fixtures

The package (0.9.0 when the fixtures were made; `pip install --no-deps --target FOLDER speculators` is enough) is not
needed by the tests. Packages that only its training half imports are replaced by empty ones.
"""

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config

FOLDER = Path(__file__).parent / "fixtures"
OUTPUTS = "outputs.st"  # not one of the head's own files
VOCAB_SIZE, REDUCED = 48, 20
NUM_TOKENS, NUM_STEPS, BLOCK_SIZE = 10, 4, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EAGLE3: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "eagle3_llama": (LlamaConfig(num_hidden_layers=1, **SIZES), {"draft_vocab_size": REDUCED}),
    "eagle3_llama_norms": (
        LlamaConfig(num_hidden_layers=1, attention_bias=True, mlp_bias=True, **SIZES),
        {"draft_vocab_size": VOCAB_SIZE, "norm_before_residual": True, "norm_before_fc": True},
    ),
    "eagle3_qwen3": (
        Qwen3Config(num_hidden_layers=1, attention_bias=True, rope_parameters=LLAMA3_ROPE, **SIZES),
        {"draft_vocab_size": REDUCED, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    ),
}
DFLASH: dict[str, int] = {"dflash": VOCAB_SIZE, "dflash_reduced": REDUCED}


def imported(name: str) -> ModuleType:
    """Import a module of the package, with empty ones in the place of those that are not installed."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or error.name.startswith("speculators"):
                raise
            sys.modules[error.name] = MagicMock()


def save_target() -> Path:
    """Save a target that has embeddings and an output layer of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=4, initializer_range=0.3, **{**SIZES, "bos_token_id": None})
    LlamaForCausalLM(config).save_pretrained(FOLDER / "target")
    return FOLDER / "target"


def speculators_config(kind: str, target: Path) -> Any:
    """Return what the package wants to know about drafting and target."""
    package, proposals = imported("speculators.config"), imported("speculators.proposals.greedy")
    return package.SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[proposals.GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=package.VerifierConfig.from_pretrained(str(target)),
    )


def prepared(model: Any, draft_vocab_size: int) -> Any:
    """Give a model random weights, a vocabulary, and what is the target's."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + ("norm" in name))
        for frozen in (model.embed_tokens, model.lm_head):
            frozen.weight.fill_(torch.nan)  # so that the package loads the target's
    if draft_vocab_size < VOCAB_SIZE:
        ids = torch.randperm(VOCAB_SIZE, generator=generator)[:draft_vocab_size].sort().values
        t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        t2d[ids] = True
        model.load_vocab_mappings(t2d, ids - torch.arange(draft_vocab_size))
    imported("speculators.utils.loading")  # which the package imports when it is first needed
    model.load_verifier_weights()
    return model.eval()


def save(model: Any, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Save a head as the package does, and what it was given and computed."""
    model.config.speculators_config.verifier.name_or_path = "target"  # not where it lay on this machine
    model.save_pretrained(FOLDER / name)
    for code in (FOLDER / name).glob("*.py"):  # its own, which nobody needs to read a head
        code.unlink()
    save_file({key: value.contiguous() for key, value in tensors.items()}, FOLDER / name / OUTPUTS)
    print(name, {key: list(value.shape) for key, value in tensors.items()})


@torch.no_grad()
def make_eagle3(name: str, target: Path) -> None:
    """Save a head, its inputs and the logits [steps, tokens, draft vocabulary] of several steps."""
    config, flags = EAGLE3[name]
    config._attn_implementation = "eager"
    package = imported("speculators.models.eagle3")
    model = prepared(
        package.Eagle3DraftModel(
            package.Eagle3SpeculatorConfig(
                transformer_layer_config=config,
                eagle_aux_hidden_state_layer_ids=[1, 2, 4],
                speculators_config=speculators_config("eagle3", target),
                **flags,
            )
        ),
        flags["draft_vocab_size"],
    )
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(1, NUM_TOKENS, 3 * config.hidden_size, generator=generator)
    tokens = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS), generator=generator)
    model(states, tokens, document_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.long), ttt_steps=NUM_STEPS)
    save(model, name, {"states": states[0], "tokens": tokens[0], "logits": torch.stack(logits)})


@torch.no_grad()
def make_dflash(name: str, target: Path) -> None:
    """Save a head, its inputs, the anchors, and the logits [anchors, block, draft vocabulary] of their blocks."""
    config = Qwen3Config(num_hidden_layers=2, **SIZES)
    config._attn_implementation = "eager"
    package = imported("speculators.models.dflash")
    model = prepared(
        package.DFlashDraftModel(
            package.DFlashSpeculatorConfig(
                transformer_layer_config=config,
                draft_vocab_size=DFLASH[name],
                block_size=BLOCK_SIZE,
                aux_hidden_state_layer_ids=[1, 3],
                mask_token_id=7,
                speculators_config=speculators_config("dflash", target),
            )
        ),
        DFLASH[name],
    )
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(1, NUM_TOKENS, 2 * config.hidden_size, generator=generator)
    tokens = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS), generator=generator)
    _, logits, _, _, indices = model._backbone_forward(
        states,
        tokens,
        loss_mask=torch.ones(1, NUM_TOKENS),
        verifier_last_hidden_states=states[..., : config.hidden_size],
        document_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.long),
        max_anchors=4,
    )
    blocks = logits.reshape(-1, BLOCK_SIZE, logits.shape[-1])
    save(model, name, {"states": states[0], "tokens": tokens[0], "logits": blocks, "anchors": indices[::BLOCK_SIZE]})


def main() -> None:
    """Make all fixtures again."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    target = save_target()
    for name in EAGLE3:
        make_eagle3(name, target)
    for name in DFLASH:
        make_dflash(name, target)


if __name__ == "__main__":
    main()
