"""Trees of candidates by a head's own probabilities, as EAGLE-2 grows them (Li et al. 2024, "EAGLE-2", section 4).

The value of a candidate is the product of the probabilities on its path, an estimate of the chance that it is accepted.
A tree takes the K candidates of the highest value, which hold the parent of each of them. No candidate is drawn, so
each has a one-hot distribution: shape and order depend on the text, and in a matched session on the races that the
target runs, where a candidate's probability is its chance to win. What else is guessed of the text, such as what
followed its end before, joins the tree with its own chances; a candidate that both name has the larger one.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, nlargest

from specdec.drafting.candidate_tree import Guesses
from specdec.exact.tree import path_to
from specdec.exact.values import Proposal, one_hot

MIN_VALUE = 0.01  # a candidate below is not worth its place in the target's forward
MIN_GAIN = 0.1  # accepted tokens that one more level may add at most, below which it is not worth its forward
MAX_EXPANDED = 8  # of one level
MAX_CHILDREN = 8


class Candidates:
    """All candidates found so far; a level at a time is expanded, while that may change the best K."""

    def __init__(self, num_tokens: int, stop_below: float = 0.0, guesses: Guesses = Guesses()) -> None:  # noqa: B008  # immutable
        """`stop_below`: candidates of a lower value are not worth their place."""
        self.num_tokens = num_tokens
        self.tokens: list[int] = []
        self.parents: list[int] = []  # positions, see specdec/exact/tree.py
        self.values: list[float] = []
        self.depths: list[int] = []
        self._min_value = max(MIN_VALUE, stop_below)
        self._found: dict[tuple[int, int], int] = {}  # positions by parent and token
        self._expanded = {0}  # positions of the level before
        self._num_levels = 0
        places = [0]
        for token, parent, chance in zip(*guesses, strict=True):
            if chance < self._min_value:
                break
            places.append(self.put(places[parent], token, chance))

    def add(self, position: int, tokens: Iterable[int], probs: Iterable[float]) -> None:
        """Add the candidates after a position, best first; 0 is the root."""
        value = self.values[position - 1] if position else 1.0
        for token, prob in zip(tokens, probs, strict=True):
            if not value * prob >= self._min_value:
                break
            self.put(position, token, value * prob)

    def put(self, parent: int, token: int, value: float) -> int:
        """Add a candidate, or raise the value of the same one; return its position."""
        position = self._found.get((parent, token))
        if position is not None:
            self.values[position - 1] = max(self.values[position - 1], value)
            return position
        self.tokens.append(token)
        self.parents.append(parent)
        self.values.append(value)
        self.depths.append(self.depths[parent - 1] + 1 if parent else 1)
        self._found[parent, token] = len(self.tokens)
        return len(self.tokens)

    def next_level(self) -> list[int]:
        """Return the positions to expand next, best first: candidates of the last level that are among the best K.

        None once they cannot add enough: a child is worth no more than its parent.
        """
        self._num_levels += 1
        threshold = self._threshold()
        level = (index for index, depth in enumerate(self.depths) if depth == self._num_levels)
        promising = [i for i in level if self.values[i] > threshold and self.parents[i] in self._expanded]
        promising = sorted(promising, key=self._order)[:MAX_EXPANDED]
        if sum(self.values[index] - threshold for index in promising) < MIN_GAIN:
            return []
        positions = [index + 1 for index in promising]
        self._expanded = set(positions)
        return positions

    def path(self, position: int) -> list[int]:
        """Return the tokens from the root to a position."""
        return [self.tokens[index] for index in path_to(position, self.parents)]

    def _threshold(self) -> float:
        """Return what a further candidate must be worth to be among the best K."""
        if len(self.values) < self.num_tokens:
            return 0.0
        return nlargest(self.num_tokens, self.values)[-1]

    def _order(self, index: int) -> tuple[float, int]:
        return -self.values[index], index

    def proposal(self) -> Proposal:
        """Return the tree of the best K, best first; a parent is worth no less than its children, and comes first."""
        chosen = sorted(range(len(self.tokens)), key=self._order)[: self.num_tokens]
        position = {0: 0} | {index + 1: place for place, index in enumerate(chosen, start=1)}
        tokens = tuple(self.tokens[index] for index in chosen)
        parents = tuple(position[self.parents[index]] for index in chosen)
        return Proposal(tokens, tuple(map(one_hot, tokens)), parents)


def best_paths(
    tokens: Sequence[Sequence[int]],
    probs: Sequence[Sequence[float]],
    num_tokens: int,
    stop_below: float = 0.0,
    guesses: Guesses = Guesses(),  # noqa: B008  # immutable
) -> Proposal:
    """Return the tree of the K candidates of the highest value, best first, where depths do not depend on one another.

    `tokens` and `probs` hold the candidates of each depth, best first; what is worth less than `stop_below` is out.
    """
    candidates = Candidates(num_tokens, stop_below, guesses)
    min_value = max(MIN_VALUE, stop_below)
    waiting: list[tuple[float, int, int, int, int, float]] = []  # -value, order of arrival, depth, rank, parent, above
    num_found = num_taken = 0

    def find(depth: int, rank: int, parent: int, above: float) -> None:
        nonlocal num_found
        if depth < len(probs) and rank < len(probs[depth]) and above * probs[depth][rank] >= min_value:
            heappush(waiting, (-above * probs[depth][rank], num_found, depth, rank, parent, above))
            num_found += 1

    find(0, 0, 0, 1.0)
    while waiting and num_taken < num_tokens:
        negative, _, depth, rank, parent, above = heappop(waiting)
        num_taken += 1
        find(depth + 1, 0, candidates.put(parent, tokens[depth][rank], -negative), -negative)
        find(depth, rank + 1, parent, above)
    return candidates.proposal()
