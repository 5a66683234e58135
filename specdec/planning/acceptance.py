"""How probably the target accepts a draft token, by its depth and its rank among its siblings."""

import math
from dataclasses import dataclass

RANKS, DEPTHS = ",", "/"  # what separates them in text
FORM = "give probabilities from 0 to 1, such as 0.8, by depth 0.8/0.7, by rank 0.6,0.2, or both"
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Probabilities of ranks, by depth; deeper tokens are like the last depth. At most one sibling is accepted."""

    by_depth: tuple[tuple[float, ...], ...]

    def ranks(self, depth: int) -> tuple[float, ...]:
        """Return the probabilities of the ranks at a depth, 1 for the first draft token."""
        return self.by_depth[min(depth, len(self.by_depth)) - 1]


def parse_acceptance(text: str) -> Acceptance:
    """Return the acceptance that a text gives. Raises ValueError with a sentence."""
    by_depth = tuple(_ranks(depth, text) for depth in text.split(DEPTHS))
    return Acceptance(by_depth)


def _ranks(depth: str, text: str) -> tuple[float, ...]:
    try:
        ranks = tuple(float(word) for word in depth.split(RANKS))
    except ValueError:
        raise ValueError(f"is {text!r}; {FORM}") from None
    if not all(math.isfinite(rank) and 0 <= rank <= 1 for rank in ranks):
        raise ValueError(f"is {text!r}; {FORM}")
    if sum(ranks) > 1 + ROUNDING:
        raise ValueError(
            f"is {text!r}; {depth} add up to {sum(ranks):.4g}, but at most one of the siblings is accepted"
        )
    if list(ranks) != sorted(ranks, reverse=True):
        raise ValueError(f"is {text!r}; give the most probable rank first")
    return ranks
