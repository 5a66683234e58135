"""Plans: how many draft tokens in which shape, and what a round of them commits and costs."""

from collections.abc import Iterator
from dataclasses import dataclass

from specdec.planning.acceptance import Acceptance
from specdec.planning.costs import Costs
from specdec.planning.simulation import Simulated, simulate
from specdec.planning.trees import Tree, best_tree, chain, depth_of, tokens_per_round, widths


@dataclass(frozen=True, slots=True)
class Plan:
    """A shape of drafts, and what it is worth."""

    num_draft_tokens: int
    widths: tuple[int, ...]  # draft tokens at each depth
    tokens_per_round: float
    simulated: Simulated
    cost: float  # of a round
    speed_up: float  # over plain decoding; of a chain (1 - a^(K+1)) / ((1 - a)(1 + K c)), Leviathan et al., theorem 3.8


@dataclass(frozen=True, slots=True)
class Planner:
    """Values shapes of drafts by formula, and plays them."""

    acceptance: Acceptance
    costs: Costs
    num_rounds: int  # that the simulation plays
    seed: int

    def chains(self, max_draft_tokens: int) -> Iterator[Plan]:
        """Yield the plans of chains, from none on."""
        for num_tokens in range(max_draft_tokens + 1):
            yield self._plan(chain(self.acceptance, num_tokens))

    def trees(self, max_draft_tokens: int) -> Iterator[Plan]:
        """Yield the fastest optimal tree of each number of nodes, from none on."""
        by_depth = [best_tree(self.acceptance, max_draft_tokens, depth) for depth in range(1, max_draft_tokens + 1)]
        for num_nodes in range(max_draft_tokens + 1):
            trees = [tree[:num_nodes] for tree in by_depth if len(tree) >= num_nodes]
            yield self._plan(max(trees, key=self._speed_up, default=()))

    def _plan(self, tree: Tree) -> Plan:
        return Plan(
            len(tree),
            tuple(widths(tree)),
            tokens_per_round(tree),
            simulate(tree, self.acceptance, self.num_rounds, self.seed),
            self._cost(tree),
            self._speed_up(tree),
        )

    def _cost(self, tree: Tree) -> float:
        return self.costs.round(len(tree), depth_of(tree))

    def _speed_up(self, tree: Tree) -> float:
        return tokens_per_round(tree) * self.costs.plain / self._cost(tree)
