"""The training loop of target and draft: a time budget, Muon and AdamW, checkpoints."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from models.corpus import END_OF_TEXT_ID, VOCABULARY_SIZE
from models.workers import agreed, average_gradients, rank

Batch = TypeVar("Batch")
Forward = Callable[..., Any]  # a model, compiled or not
ATTENTION = "eager"  # when compiled, faster on a CPU than torch's bfloat16 attention kernel
WARM_UP_STEPS = 50
HOLD = 0.4  # fraction of the time; then the rate falls linearly to zero
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
        attn_implementation=ATTENTION,  # type: ignore[call-arg]  # every configuration takes it
    )


def optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices (Jordan et al. 2024), and AdamW for embeddings and norms."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=recipe.muon, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(step: int, elapsed: float) -> float:
    """Warm up over the first steps, hold, and fall linearly to zero at elapsed = 1, the end of the time."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, 1.0 - elapsed) / (1.0 - HOLD))


class Run:
    """A model under training with its optimizers and clock, kept in a checkpoint file that a later run resumes."""

    def __init__(self, model: LlamaForCausalLM, recipe: Recipe, checkpoint: Path) -> None:
        """Resume from the checkpoint if there is one."""
        self.model, self.recipe, self.checkpoint = model, recipe, checkpoint
        self.optimizers = optimizers(model, recipe)
        self.step, spent = 0, 0.0
        if checkpoint.exists():
            spent = self._restore(torch.load(checkpoint))
        self.began = time.monotonic() - spent
        self.saved = time.monotonic()

    @property
    def elapsed(self) -> float:
        """The fraction of the time budget that is spent."""
        return (time.monotonic() - self.began) / (60 * self.recipe.minutes)

    def update(self, elapsed: float) -> None:
        """Take one step with the gradients averaged over processes, at the current learning rates."""
        factor = rate_factor(self.step, elapsed)
        average_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, (self.recipe.muon, self.recipe.adam), strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def report(self, loss: Tensor) -> None:
        """Print the loss and write the checkpoint when they are due; only the first process does."""
        if rank() > 0:
            return
        if self.step % REPORT_STEPS == 0:
            print(f"step {self.step}, {self.elapsed:.1%} of the time, loss {loss.item():.3f}", flush=True)
        if time.monotonic() - self.saved > CHECKPOINT_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the checkpoint atomically."""
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
        """Load a checkpoint's state and return the seconds that it had spent."""
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
