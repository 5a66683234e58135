"""The training loop of a head: Muon and AdamW, a time budget, checkpoints, and what is printed on the way."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from models.heads.batches import Batch, Samples
from models.heads.objective import Agreement, Objective, total

MATRICES_RATE, OTHERS_RATE = 0.02, 0.004  # peak learning rates: of Muon, and of AdamW
WARM_UP_STEPS = 10
HOLD = 0.3  # part of the budget; then the rates fall linearly to zero
BATCH_TOKENS = {"cpu": 4096, "cuda": 32_768}  # prompts included
HELD_OUT_TOKENS = 20_000  # of each temperature, to measure on
EVALUATION_S = 300.0


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train."""

    minutes: float


class Run:
    """A head under training with its optimizers and clock, kept in a checkpoint file that a later run resumes."""

    def __init__(self, objective: Objective, samples: Samples, budget: Budget, checkpoint: Path) -> None:
        """Resume from the checkpoint if there is one."""
        self.objective, self._samples, self._budget, self._checkpoint = objective, samples, budget, checkpoint
        self.optimizers = optimizers(objective.head)
        self.step, self.spent_s = 0, 0.0
        self._device = next(objective.head.parameters()).device
        if checkpoint.exists():
            self._restore(torch.load(checkpoint, map_location="cpu", weights_only=True))

    @property
    def elapsed(self) -> float:
        """The part of the budget that is spent."""
        return self.spent_s / (60 * self._budget.minutes)

    def train(self, report: Callable[[str], None]) -> None:
        """Train until the budget is spent; report how held-out drafts would fare now and then, and at the end."""
        evaluated_s = self.spent_s
        batches = self._samples.endless(BATCH_TOKENS[self._device.type], seed=self.step)
        with tqdm(total=round(60 * self._budget.minutes), initial=round(self.spent_s), unit="s") as bar:
            while self.elapsed < 1:
                began_s = time.monotonic()
                loss = self._update(next(batches))
                seconds = time.monotonic() - began_s
                self.spent_s += seconds
                bar.update(min(seconds, bar.total - bar.n))
                bar.set_postfix(step=self.step, loss=f"{loss:.3f}")
                if self.spent_s - evaluated_s > EVALUATION_S:
                    evaluated_s = self.spent_s
                    self._save()
                    report(self.evaluation())
        self._save()

    def _update(self, batch: Batch) -> float:
        with autocast(self._device):
            loss = self.objective.loss(batch)
        loss.backward()
        factor = rate_factor(self.step, self.elapsed)
        torch.nn.utils.clip_grad_norm_(self.objective.head.parameters(), 1.0)
        for optimizer, rate in zip(self.optimizers, (MATRICES_RATE, OTHERS_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def evaluation(self) -> str:
        """Return how drafts of held-out samples would fare, by depth, a line a temperature."""
        lines = [f"step {self.step}, {60 * self._budget.minutes - self.spent_s:.0f} s left"]
        for temperature in (0.0, 1.0):
            agreements = list(self._agreements(temperature))
            if agreements:
                lines.append(f"  held out, temperature {temperature:g}: {total(agreements)}")
        return "\n".join(lines)

    def _agreements(self, temperature: float) -> Iterator[Agreement]:
        num_tokens = 0
        for batch in self._samples.of_held_out(BATCH_TOKENS["cpu"], temperature):
            with autocast(self._device):
                yield self.objective.agreement(batch)
            num_tokens += batch.num_answer_tokens
            if num_tokens > HELD_OUT_TOKENS:
                return

    def _save(self) -> None:
        """Write the checkpoint atomically."""
        trained = {name for name, weight in self.objective.head.named_parameters() if weight.requires_grad}
        state = {
            "head": {name: value for name, value in self.objective.head.state_dict().items() if name in trained},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "spent_s": self.spent_s,
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def _restore(self, state: dict[str, Any]) -> None:
        self.objective.head.load_state_dict(state["head"], strict=False)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.spent_s = state["step"], state["spent_s"]


def optimizers(head: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices (Jordan et al. 2024), and AdamW for everything else that is trained."""
    trained = [(name, weight) for name, weight in head.named_parameters() if weight.requires_grad]
    matrices = [weight for name, weight in trained if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in trained if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRICES_RATE, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=OTHERS_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(step: int, elapsed: float) -> float:
    """Warm up over the first steps, hold, and fall linearly to zero at the end of the budget."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, 1.0 - elapsed) / (1.0 - HOLD))


def autocast(device: torch.device) -> Any:
    """Return a context that computes products in bfloat16 where the device has such instructions."""
    has_bfloat16 = device.type == "cuda" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.autocast(device.type, torch.bfloat16) if has_bfloat16 else nullcontext()
