"""What a round costs, in any unit: drafting forwards, scoring some positions, and what else a drafted round needs."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

FORM = "give the cost of scoring one position, such as 30, or costs by positions, such as 1:30,5:33,9:38"


@dataclass(frozen=True, slots=True)
class ScoreCosts:
    """Measured costs of scoring, by the number of positions, rising; between them and beyond, straight lines."""

    points: tuple[tuple[int, float], ...]

    def __call__(self, num_positions: int) -> float:
        """Return the cost of scoring so many positions in one forward."""
        if len(self.points) == 1:
            return self.points[0][1]
        right = min(max(bisect_left(self.points, (num_positions,)), 1), len(self.points) - 1)
        (low, low_cost), (high, high_cost) = self.points[right - 1 : right + 1]
        slope = (high_cost - low_cost) / (high - low)
        return low_cost + slope * (num_positions - low)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a round, all in the same unit."""

    draft: float  # of one forward of the draft: a chain needs one a token, a tree one a level
    score: ScoreCosts
    drafted_round: float = 0.0  # of a round that drafts, besides: a hop, a block drafter's single forward

    @property
    def plain(self) -> float:
        """The cost of a token without drafts."""
        return self.score(1)

    def round(self, num_nodes: int, depth: int) -> float:
        """Return the cost of a round that drafts a tree of so many tokens."""
        drafting = self.drafted_round + depth * self.draft if num_nodes else 0.0
        return drafting + self.score(num_nodes + 1)


def parse_score_costs(text: str) -> ScoreCosts:
    """Return the costs that a text gives. Raises ValueError with a sentence."""
    try:
        points = tuple(_point(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"is {text!r}; {FORM}") from None
    if not all(math.isfinite(cost) and cost > 0 for _, cost in points):
        raise ValueError(f"is {text!r}; costs of scoring are above 0")
    if problem := _problem([count for count, _ in points], [cost for _, cost in points]):
        raise ValueError(f"is {text!r}; {problem}")
    return ScoreCosts(points)


def _point(word: str) -> tuple[int, float]:
    positions, _, cost = word.rpartition(":")
    return int(positions or 1), float(cost)


def _problem(positions: Sequence[int], costs: Sequence[float]) -> str | None:
    if positions[0] != 1:
        return "begin with 1 position, which is plain decoding"
    if sorted(set(positions)) != list(positions):
        return "give each number of positions once, rising"
    if len(costs) > 1 and costs[-1] < costs[-2]:
        return "it falls at its end, and some number of positions would cost nothing"
    return None
