"""Rounds played with random numbers, which know nothing of the formulas."""

import math
import random
from dataclasses import dataclass

from specdec.planning.acceptance import Acceptance
from specdec.planning.trees import Tree


@dataclass(frozen=True, slots=True)
class Simulated:
    """The mean tokens of some rounds, and its standard error."""

    tokens_per_round: float
    standard_error: float


def simulate(tree: Tree, acceptance: Acceptance, num_rounds: int, seed: int) -> Simulated:
    """Play rounds: walk down while the target accepts a rank that the tree has."""
    generator = random.Random(seed)
    paths = {node.path for node in tree}
    counts = [_committed(paths, acceptance, generator) for _ in range(num_rounds)]
    mean = sum(counts) / num_rounds
    variance = sum((count - mean) ** 2 for count in counts) / max(num_rounds - 1, 1)
    return Simulated(mean, math.sqrt(variance / num_rounds))


def _committed(paths: set[tuple[int, ...]], acceptance: Acceptance, generator: random.Random) -> int:
    """Return the tokens that one round commits."""
    path: tuple[int, ...] = ()
    while True:
        rank = _accepted_rank(acceptance.ranks(len(path) + 1), generator.random())
        if rank is None or (*path, rank) not in paths:
            return len(path) + 1
        path = (*path, rank)


def _accepted_rank(ranks: tuple[float, ...], uniform: float) -> int | None:
    """Return the rank that the target's token has among the siblings, or None."""
    for rank, probability in enumerate(ranks):
        uniform -= probability
        if uniform < 0:
            return rank
    return None
