"""Several processes of few threads each, for stages that need little communication.

On a machine with other load they are faster than one process with many threads, where every operation waits for the
thread that was descheduled.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

Stage = Callable[[Path, float], None]


def in_parallel(stage: Stage, work: Path, minutes: float, count: int) -> None:
    """Run a stage in several processes, which rendezvous through a temporary file."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, args=(stage, work, minutes, count, f"file://{folder}/rendezvous"), nprocs=count)


def _work(rank: int, stage: Stage, work: Path, minutes: float, count: int, rendezvous: str) -> None:
    """Run one process of a stage."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=count)
    stage(work, minutes)
    distributed.barrier()
    distributed.destroy_process_group()


def rank() -> int:
    """Return this process's number within its stage, 0 for a single process."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def count() -> int:
    """Return how many processes run this stage."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def average_gradients(model: torch.nn.Module) -> None:
    """Average the gradients over all processes."""
    if count() == 1:
        return
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    parts = (flat / count()).split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def agreed(value: float) -> float:
    """Return the first process's value in every process."""
    if count() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64)
    distributed.broadcast(shared, src=0)
    return shared.item()
