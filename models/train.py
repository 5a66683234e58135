"""Train the demo pair on the sources of the Python standard library: `python -m models.train`.

The stages run in order: `prepare` (tokenizer, token streams, held-out files), `target`, `rows` (the target's
continuations with its distributions), `draft` (distilled on them), `export` (bfloat16 weights into this folder). Each
keeps its results in the work folder; an interrupted stage resumes there, a complete one is skipped. With `--further`,
both models and the tokenizer start from the published ones instead of from scratch.
"""

import argparse
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.corpus import END_OF_TEXT, copy_held_out, epoch, prepare
from models.distil import distillation_loss, embed_like, row_batches
from models.learning import ATTENTION, Forward, Recipe, Run, llama_config, train
from models.rows import write_rows
from models.workers import count, in_parallel, rank

FOLDER = Path(__file__).parent
TARGET_MINUTES, ROWS_MINUTES, DRAFT_MINUTES = 60.0, 18.0, 22.0
TARGET_BATCH, DRAFT_BATCH = 6, 12  # sequences
SHORT_WINDOWS = 0.6  # fraction of the target's time: attention costs less, and long ranges can be learnt later


def corpus_batches(work: Path, run: Run) -> Iterator[Tensor]:
    """Yield shuffled batches of texts, endlessly: [TARGET_BATCH, WINDOW + 1], at first halved."""
    random = np.random.default_rng(run.step)
    for number in itertools.count():
        texts = torch.from_numpy(epoch(work, number, random).astype(np.int64))
        for batch in texts.split(TARGET_BATCH)[:-1]:
            yield halves(batch) if run.elapsed < SHORT_WINDOWS else batch


def halves(batch: Tensor) -> Tensor:
    """Cut windows in two that overlap by one token: [n, 2 m + 1] to [2 n, m + 1]."""
    middle = batch.shape[1] // 2
    return torch.cat([batch[:, : middle + 1], batch[:, middle:]])


def next_token_loss(model: Forward, batch: Tensor, _: float = 0.0) -> Tensor:
    """Return the mean cross-entropy, in nats per token, of a batch [sequences, WINDOW + 1]."""
    logits = model(batch[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def start_from_published(work: Path) -> None:
    """Copy the published models and their tokenizer to where the stages look for initial weights."""
    for name in ("target", "draft"):
        shutil.copytree(FOLDER / name, work / "start" / name)
    shutil.copyfile(FOLDER / "target" / "tokenizer.json", work / "start" / "tokenizer.json")


def published(work: Path, name: str) -> LlamaForCausalLM | None:
    """Return the published model to start from, with `--further`."""
    folder = work / "start" / name
    if not folder.exists():
        return None
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION)


def train_target(work: Path, minutes: float) -> None:
    """Train the target on the texts: 20M parameters."""
    torch.manual_seed(0)
    config = llama_config(hidden=384, layers=12, heads=6, intermediate=1024)
    model = published(work, "target") or LlamaForCausalLM(config)
    run = Run(model, Recipe(muon=0.02, adam=0.003, minutes=minutes), work / "target.pt")
    train(run, corpus_batches(work, run), next_token_loss)
    model.bfloat16().save_pretrained(work / "target")


def sample_target(work: Path, minutes: float) -> None:
    """Write the target's rows, computed with the weights that are published."""
    model = LlamaForCausalLM.from_pretrained(work / "target", dtype=torch.bfloat16).eval()
    write_rows(model, work, minutes)


def train_draft(work: Path, minutes: float) -> None:
    """Distil the draft from the rows: 2.6M parameters in two layers, the minimum for copying from a prompt."""
    torch.manual_seed(0)
    model = published(work, "draft")
    if model is None:
        model = LlamaForCausalLM(llama_config(hidden=256, layers=2, heads=4, intermediate=768))
        embed_like(LlamaForCausalLM.from_pretrained(work / "target"), model)
    run = Run(model, Recipe(muon=0.02, adam=0.005, minutes=minutes), work / "draft.pt")
    batches = row_batches(work, DRAFT_BATCH // count(), seed=run.step + rank())
    train(run, batches, distillation_loss)
    if rank() == 0:
        model.bfloat16().save_pretrained(work / "draft")


def export(work: Path) -> None:
    """Publish both models with their common tokenizer, and the held-out files."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(work / "tokenizer.json"), eos_token=END_OF_TEXT)
    for name in ("target", "draft"):
        model = LlamaForCausalLM.from_pretrained(work / name, dtype=torch.bfloat16)
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "model.safetensors").chmod(0o644)  # safetensors makes files readable for their owner only
        tokenizer.save_pretrained(FOLDER / name)
    copy_held_out(FOLDER / "heldout")


def stages(work: Path, scale: float, workers: int) -> dict[str, tuple[Path, Callable[[], None]]]:
    """Return each stage with the file that marks it complete; `scale` multiplies the time budgets."""
    rows_minutes, draft_minutes = scale * ROWS_MINUTES, scale * DRAFT_MINUTES
    return {
        "prepare": (work / "tokenizer.json", lambda: prepare(work)),
        "target": (work / "target" / "model.safetensors", lambda: train_target(work, scale * TARGET_MINUTES)),
        "rows": (work / "rows" / "complete", lambda: in_parallel(sample_target, work, rows_minutes, workers)),
        "draft": (
            work / "draft" / "model.safetensors",
            lambda: in_parallel(train_draft, work, draft_minutes, workers),
        ),
        "export": (work / "exported", lambda: export(work)),
    }


def main() -> None:
    """Run the incomplete stages, or one of them."""
    total = TARGET_MINUTES + ROWS_MINUTES + DRAFT_MINUTES
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=FOLDER / "work", help="where checkpoints are kept")
    parser.add_argument("--minutes", type=float, default=total, help="the time budget of all stages together")
    parser.add_argument("--further", action="store_true", help="start from the published models")
    parser.add_argument("--workers", type=int, default=2, help="processes that sample, and that train the draft")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.further and not (arguments.work / "start").exists():
        start_from_published(arguments.work)
    for name, (complete, stage) in stages(arguments.work, arguments.minutes / total, arguments.workers).items():
        if not complete.exists():
            print(f"stage {name}", flush=True)
            stage()
            complete.touch()


if __name__ == "__main__":
    main()
