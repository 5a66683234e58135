"""The acceptance rules: they guarantee that output is distributed exactly as the target model's.

Glossary
  proposal         a tree of N draft tokens, each with the distribution q that it was drawn from; a chain is a tree
  position         where a token can follow: position 0 after the committed tokens, i + 1 after draft token i
  accepted token   a draft token that passed its test; the accepted tokens are a path from the root
  recovered token  drawn from the residual after every child of a position was rejected
  bonus token      drawn from the target's distribution p at a position without children
  tail             the part of the target's distribution outside the supports of a position's children

Distributions are sparse: outside its support q is 0, so there the residual max(0, p - q) is p itself. The target
therefore sends p on the supports, the mass of the rest, and one token drawn from the rest.

The code is plain arithmetic on numbers handed in: floats in service, fractions in the proof (tests/exactness). A rule
also gives the thresholds at which its decisions change, from which the proof enumerates all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms, Verdict
from specdec.types import AcceptanceRuleName, TokenOrigin


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Where the decisions of a rule change, for one proposal and its scores."""

    accept: Sequence[float]  # [N]: draft token i is accepted below this value of its uniform, if it is tested
    close: Sequence[Sequence[float]]  # [N + 1]: where the closing token changes, if the round is closed there


class AcceptanceRule(Protocol):
    """Decides which draft tokens are kept and which token closes the round."""

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the accepted path and the closing token."""
        ...

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return where `accept` changes its decisions."""
        ...


@dataclass(frozen=True, slots=True)
class Remainder:
    """The target's distribution at a position, given that the children tried so far were rejected."""

    token_ids: Sequence[int]  # [S], the union of the children's supports
    weights: Sequence[float]  # [S], probabilities times `total`
    tail_mass: float  # times `total`
    total: float
    tail_token: int

    @classmethod
    def at(cls, token_ids: Sequence[int], target: TargetDistribution) -> "Remainder":
        """Return the target's own distribution, before any child was tried."""
        return cls(token_ids, target.support_probs, target.tail_mass, 1, target.tail_token)

    def threshold(self, token: int, draft: SparseDistribution) -> float:
        """Return p / q of a drafted token, below which its uniform accepts it; 0 where its q is 0."""
        draft_prob = draft.probs[draft.token_ids.index(token)]
        target_prob = self.weights[self.token_ids.index(token)]
        return target_prob / (draft_prob * self.total) if draft_prob > 0 else 0.0

    def accepts(self, token: int, draft: SparseDistribution, uniform: float) -> bool:
        """Return whether u q < p (Leviathan et al. 2023, algorithm 1): strict, and only where q is positive."""
        draft_prob = draft.probs[draft.token_ids.index(token)]
        target_prob = self.weights[self.token_ids.index(token)]
        return draft_prob > 0 and uniform * draft_prob * self.total < target_prob

    def after_rejecting(self, draft: SparseDistribution) -> "Remainder":
        """Return the residual max(0, p - q), normalised (Leviathan et al. 2023, section 2.3; Miao et al. 2024).

        All weights are zero only if p equals q up to rounding; then p itself remains.
        """
        draft_probs = dict(zip(draft.token_ids, draft.probs, strict=True))
        pairs = zip(self.token_ids, self.weights, strict=True)
        weights = [max(0, weight - self.total * draft_probs.get(token, 0)) for token, weight in pairs]
        total = sum(weights) + self.tail_mass
        return Remainder(self.token_ids, weights, self.tail_mass, total, self.tail_token) if total > 0 else self

    def draw(self, uniform: float) -> int:
        """Draw a token."""
        position = choose([*self.weights, self.tail_mass], uniform)
        return self.tail_token if position == len(self.token_ids) else self.token_ids[position]

    def thresholds(self) -> Sequence[float]:
        """Return where `draw` changes its token."""
        return turns([*self.weights, self.tail_mass])


class TokenRule:
    """Walks the tree from the root, and tests a position's children in the order in which they were drawn.

    On a chain this is Leviathan, Kalman and Matias 2023, algorithm 1; siblings are tested against the residual that the
    rejections before them left (SpecInfer, Miao et al. 2024, section 4.3).
    """

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the accepted path and the closing token."""
        return self.accept_after((), proposal, scores, uniforms)

    def accept_after(self, prefix: Sequence[int], proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the accepted path and the closing token, given that a path from the root is accepted already."""
        children, unions = proposal.children(), proposal.unions()
        path = list(prefix)
        position = path[-1] + 1 if path else 0
        while children[position]:
            remainder = Remainder.at(unions[position], scores.positions[position])
            for child in children[position]:
                draft = proposal.distributions[child]
                if remainder.accepts(proposal.tokens[child], draft, uniforms.accept[child]):
                    path.append(child)
                    position = child + 1
                    break
                remainder = remainder.after_rejecting(draft)
            else:
                return Verdict(tuple(path), remainder.draw(uniforms.close), TokenOrigin.RECOVERED)
        return Verdict(tuple(path), scores.positions[position].tail_token, TokenOrigin.BONUS)

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return where `accept` changes its decisions."""
        accept: list[float] = [0.0] * len(proposal)
        close: list[Sequence[float]] = []
        for children, token_ids, target in zip(proposal.children(), proposal.unions(), scores.positions, strict=True):
            remainder = Remainder.at(token_ids, target)
            for child in children:
                accept[child] = remainder.threshold(proposal.tokens[child], proposal.distributions[child])
                remainder = remainder.after_rejecting(proposal.distributions[child])
            close.append(remainder.thresholds() if children else ())
        return Thresholds(accept, close)


class BlockRule:
    """Tests a chain as a block: keeps the longest prefix that passes (Sun et al. 2024, algorithm 2).

    Of a tree, the chain that it begins with is the block; from the first position with several children on, the token
    rule decides. A drafter may end the chain or branch depending on the tokens drawn so far. But it must settle whether
    a position has one child or several before it draws the first of them: otherwise the rule is not exact.
    """

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the accepted path and the closing token."""
        weights = prefix_weights(proposal, scores)
        thresholds = self._accept_thresholds(proposal, scores, weights)
        num_accepted = max((i + 1 for i, h in enumerate(thresholds) if uniforms.accept[i] < h), default=0)
        path = tuple(range(num_accepted))
        if num_accepted == len(thresholds):
            return TokenRule().accept_after(path, proposal, scores, uniforms)
        remainder = block_closing(proposal, scores, num_accepted, weights[num_accepted])
        return Verdict(path, remainder.draw(uniforms.close), TokenOrigin.RECOVERED)

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return where `accept` changes its decisions."""
        weights = prefix_weights(proposal, scores)
        accept = self._accept_thresholds(proposal, scores, weights)
        close = [
            block_closing(proposal, scores, position, weights[position]).thresholds() for position in range(len(accept))
        ]
        after = TokenRule().thresholds(proposal, scores)
        return Thresholds([*accept, *after.accept[len(accept) :]], [*close, *after.close[len(accept) :]])

    @staticmethod
    def _accept_thresholds(proposal: Proposal, scores: Scores, weights: Sequence[float]) -> list[float]:
        """Return h_1 to h_K: with r the residual mass after a prefix of weight w, h = r / (r + 1 - w); h_K is w_K."""
        thresholds = []
        for position in range(1, len(weights) - 1):
            residual = block_residual(proposal, scores, position, weights[position]).total
            total = residual + (1 - weights[position])
            thresholds.append(residual / total if total > 0 else 0.0)
        return [*thresholds, weights[-1]][: len(weights) - 1]


def first_chain(proposal: Proposal) -> int:
    """Return the length K of the chain that a proposal begins with, up to the first position without a single child."""
    return next(position for position, children in enumerate(proposal.children()) if children != [position])


def prefix_weights(proposal: Proposal, scores: Scores) -> list[float]:
    """Return w_0 to w_K of the first chain: w_0 = 1, w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i))."""
    weights: list[float] = [1]
    for position in range(first_chain(proposal)):
        token, draft, target = proposal.tokens[position], proposal.distributions[position], scores.positions[position]
        index = draft.token_ids.index(token)
        draft_prob = draft.probs[index]
        weights.append(min(1, weights[-1] * target.support_probs[index] / draft_prob) if draft_prob > 0 else 0)
    return weights


def block_residual(proposal: Proposal, scores: Scores, position: int, weight: float) -> Remainder:
    """Return max(0, w p - q) at a position of a chain, with w times the tail; `total` is its mass, which may be 0."""
    draft, target = proposal.distributions[position], scores.positions[position]
    pairs = zip(target.support_probs, draft.probs, strict=True)
    weights = [max(0, weight * target_prob - draft_prob) for target_prob, draft_prob in pairs]
    tail_mass = weight * target.tail_mass
    total = sum(weights) + tail_mass
    return Remainder(draft.token_ids, weights, tail_mass, total, target.tail_token)


def block_closing(proposal: Proposal, scores: Scores, position: int, weight: float) -> Remainder:
    """Return what closes the round at a position of a chain: the residual, or p where rounding left no residual."""
    residual = block_residual(proposal, scores, position, weight)
    return residual if residual.total > 0 else Remainder.at(residual.token_ids, scores.positions[position])


RULES: Mapping[AcceptanceRuleName, AcceptanceRule] = {
    AcceptanceRuleName.TOKEN: TokenRule(),
    AcceptanceRuleName.BLOCK: BlockRule(),
}


def choose(weights: Sequence[float], uniform: float) -> int:
    """Return i with probability weights[i] / sum(weights), by inverting the cumulative sum at `uniform` in [0, 1)."""
    cumulative = list(accumulate(weights))
    threshold = uniform * cumulative[-1]
    last = max(index for index, weight in enumerate(weights) if weight > 0)
    return next((index for index, total in enumerate(cumulative) if total > threshold), last)


def turns(weights: Sequence[float]) -> list[float]:
    """Return where a draw by these weights changes: their cumulative sums over the whole."""
    cumulative = list(accumulate(weights))
    return [value / cumulative[-1] for value in cumulative] if cumulative and cumulative[-1] else []
