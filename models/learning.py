"""The training loop that target and draft share: a time budget, Muon and AdamW, checkpoints."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from corpus import END_OF_TEXT_ID, VOCABULARY_SIZE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from workers import agreed, average_gradients, rank

Batch = TypeVar("Batch")
Forward = Callable[..., Any]  # a model, compiled or not
ATTENTION = "eager"  # compiled, it trains faster on a CPU than torch's own bfloat16 attention
WARM_UP_STEPS = 50
HOLD = 0.4  # of the time; then the rate falls linearly to zero
CHECKPOINT_SECONDS = 300
REPORT_STEPS = 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """Peak learning rates of the matrices (Muon) and of embeddings and norms (AdamW), and the minutes to spend."""

    muon: float
    adam: float
    minutes: float


def llama_config(hidden: int, layers: int, heads: int, intermediate: int) -> LlamaConfig:
    """Describe a Llama with tied embeddings, two key-value heads of 64 and a context of 1,024 tokens."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=intermediate,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation=ATTENTION,  # type: ignore[call-arg]  # which every configuration takes
    )


def optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Give the matrices to Muon (Jordan et al. 2024), embeddings and norms to AdamW."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=recipe.muon, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(step: int, elapsed: float) -> float:
    """Warm up over the first steps, hold, and fall linearly to zero at elapsed = 1, all of the time."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, 1.0 - elapsed) / (1.0 - HOLD))


class Run:
    """A model under training with its optimizers and clock, kept in a checkpoint file that a later run resumes."""

    def __init__(self, model: LlamaForCausalLM, recipe: Recipe, checkpoint: Path) -> None:
        """Resume from the checkpoint where there is one."""
        self.model, self.recipe, self.checkpoint = model, recipe, checkpoint
        self.optimizers = optimizers(model, recipe)
        self.step, spent = 0, 0.0
        if checkpoint.exists():
            spent = self._restore(torch.load(checkpoint))
        self.began = time.monotonic() - spent
        self.saved = time.monotonic()

    @property
    def elapsed(self) -> float:
        """The share of the time budget that is spent."""
        return (time.monotonic() - self.began) / (60 * self.recipe.minutes)

    def update(self, elapsed: float) -> None:
        """Take one step along all processes' gradients, at the learning rates of this share of the time."""
        factor = rate_factor(self.step, elapsed)
        average_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, (self.recipe.muon, self.recipe.adam), strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def report(self, loss: Tensor) -> None:
        """Print the loss now and then, and write the checkpoint when it is due; the first process speaks for all."""
        if rank() > 0:
            return
        if self.step % REPORT_STEPS == 0:
            print(f"step {self.step}, {self.elapsed:.1%} of the time, loss {loss.item():.3f}", flush=True)
        if time.monotonic() - self.saved > CHECKPOINT_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        self.saved = time.monotonic()
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "spent": self.saved - self.began,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def _restore(self, state: dict[str, Any]) -> float:
        """Take over a checkpoint's state and return the seconds it had spent."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        return float(state["spent"])


def train(run: Run, batches: Iterator[Batch], loss_of: Callable[[Forward, Batch, float], Tensor]) -> None:
    """Train on endless batches until the time is spent."""
    forward = torch.compile(run.model, dynamic=False)
    for batch in batches:
        elapsed = agreed(run.elapsed)
        if elapsed >= 1.0:
            break
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(forward, batch, elapsed)
        loss.backward()
        run.update(elapsed)
        run.report(loss)
