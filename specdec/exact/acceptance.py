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

from specdec.exact.tree import children_of
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

    def residual(self, draft: SparseDistribution, weight: float = 1) -> "Remainder":
        """Return max(0, w p - q), where p is this distribution; its total may be 0."""
        total, draft_probs = self.total, draft.probs
        if self.token_ids is not draft.token_ids:  # else the position has one child, whose support it is
            by_token = dict(zip(draft.token_ids, draft.probs, strict=True))
            draft_probs = [by_token.get(token, 0) for token in self.token_ids]
        pairs = zip(self.weights, draft_probs, strict=True)
        weights = [rest if (rest := weight * value - total * prob) > 0 else 0 for value, prob in pairs]
        tail_mass = weight * self.tail_mass
        return Remainder(self.token_ids, weights, tail_mass, sum(weights) + tail_mass, self.tail_token)

    def after_rejecting(self, draft: SparseDistribution) -> "Remainder":
        """Return the residual max(0, p - q), normalised (Leviathan et al. 2023, section 2.3; Miao et al. 2024).

        All weights are zero only if p equals q up to rounding; then p itself remains.
        """
        residual = self.residual(draft)
        return residual if residual.total > 0 else self

    def draw(self, uniform: float) -> int:
        """Draw a token."""
        position = choose([*self.weights, self.tail_mass], uniform)
        return self.tail_token if position == len(self.token_ids) else self.token_ids[position]

    def thresholds(self) -> Sequence[float]:
        """Return where `draw` changes its token."""
        return turns([*self.weights, self.tail_mass])


def first_accepted(
    children: Sequence[int], remainder: Remainder, proposal: Proposal, uniforms: Uniforms
) -> tuple[int | None, Remainder]:
    """Return the first child that passes its test, if any, and the residual after the rejections before it."""
    for child in children:
        draft = proposal.distributions[child]
        if remainder.accepts(proposal.tokens[child], draft, uniforms.accept[child]):
            return child, remainder
        remainder = remainder.after_rejecting(draft)
    return None, remainder


class TokenRule:
    """Walks the tree from the root, and tests a position's children in the order in which they were drawn.

    On a chain this is Leviathan, Kalman and Matias 2023, algorithm 1; siblings are tested against the residual that the
    rejections before them left (SpecInfer, Miao et al. 2024, section 4.3).
    """

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the accepted path and the closing token."""
        children = proposal.children()
        path: list[int] = []
        position = 0
        while children[position]:
            remainder = Remainder.at(proposal.union_at(children[position]), scores.positions[position])
            child, remainder = first_accepted(children[position], remainder, proposal, uniforms)
            if child is None:
                return Verdict(tuple(path), remainder.draw(uniforms.close), TokenOrigin.RECOVERED)
            path.append(child)
            position = child + 1
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


@dataclass(frozen=True, slots=True)
class Block:
    """The first children x_1 to x_K from a position down to a leaf, tested together (Sun et al. 2024, algorithm 2).

    With p_i and q_i the distributions of x_i: w_0 = 1, w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i)), and r_i is the sum of
    max(0, w_i p_(i+1) - q_(i+1)), tail included. Then h_i = r_i / (r_i + 1 - w_i) for i < K, and h_K = w_K.
    """

    tokens: Sequence[int]  # [K], indices into the proposal
    drafts: Sequence[SparseDistribution]  # [K], q_1 to q_K
    targets: Sequence[Remainder]  # [K], p_1 to p_K
    weights: Sequence[float]  # [K + 1], w_0 to w_K

    @classmethod
    def at(cls, position: int, proposal: Proposal, scores: Scores, children: Sequence[Sequence[int]]) -> "Block":
        """Return the block that begins at a position; `children` are those of all positions."""
        tokens: list[int] = []
        drafts: list[SparseDistribution] = []
        targets: list[Remainder] = []
        weights: list[float] = [1]
        while siblings := children[position]:
            token = siblings[0]
            draft = proposal.distributions[token]
            target = Remainder.at(proposal.union_at(siblings), scores.positions[position])
            weights.append(min(1, weights[-1] * target.threshold(proposal.tokens[token], draft)))
            tokens.append(token)
            drafts.append(draft)
            targets.append(target)
            position = token + 1
        return cls(tokens, drafts, targets, weights)

    def end(self, uniforms: Uniforms) -> tuple[int, Remainder | None]:
        """Return the length of the longest prefix that passes, and what remains at its end; None: all of it passed.

        The longest one is tested first: a residual takes the time of a whole support, and h_K needs none.
        """
        if uniforms.accept[self.tokens[-1]] < self.weights[-1]:
            return len(self.tokens), None
        for length in range(len(self.tokens) - 1, 0, -1):
            threshold, remainder = self.before(length)
            if uniforms.accept[self.tokens[length - 1]] < threshold:
                return length, remainder
        return 0, self.before(0)[1]

    def before(self, index: int) -> tuple[float, Remainder]:
        """Return h_i, for i < K, and the residual at the position of x_(i+1) if the block ends before it."""
        target, weight = self.targets[index], self.weights[index]
        residual = target.residual(self.drafts[index], weight)
        total = residual.total + (1 - weight)
        threshold = residual.total / total if total > 0 else 0.0
        return threshold, residual if residual.total > 0 else target  # 0 only by rounding

    def thresholds(self) -> list[float]:
        """Return h_1 to h_K."""
        return [*(self.before(index)[0] for index in range(1, len(self.tokens))), self.weights[-1]]


class BlockRule:
    """Tests first children as a block; then the siblings of the first rejected one, as the token rule does.

    On a chain this is Sun et al. 2024, algorithm 2. An accepted sibling begins another block.
    """

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the accepted path and the closing token."""
        children = proposal.children()
        path: list[int] = []
        position = 0
        while children[position]:
            block = Block.at(position, proposal, scores, children)
            num_accepted, rest = block.end(uniforms)
            path += block.tokens[:num_accepted]
            position = path[-1] + 1 if path else 0
            if rest is not None:
                child, remainder = first_accepted(children[position][1:], rest, proposal, uniforms)
                if child is None:
                    return Verdict(tuple(path), remainder.draw(uniforms.close), TokenOrigin.RECOVERED)
                path.append(child)
                position = child + 1
        return Verdict(tuple(path), scores.positions[position].tail_token, TokenOrigin.BONUS)

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return where `accept` changes its decisions."""
        children = proposal.children()
        accept: list[float] = [0.0] * len(proposal)
        close: list[Sequence[float]] = [()] * (len(proposal) + 1)
        begins = [0, *(child + 1 for siblings in children for child in siblings[1:])]
        for block in (Block.at(begin, proposal, scores, children) for begin in begins if children[begin]):
            for index, (token, threshold) in enumerate(zip(block.tokens, block.thresholds(), strict=True)):
                accept[token] = threshold
                remainder, position = block.before(index)[1], proposal.tree[token]
                for child in children[position][1:]:
                    accept[child] = remainder.threshold(proposal.tokens[child], proposal.distributions[child])
                    remainder = remainder.after_rejecting(proposal.distributions[child])
                close[position] = remainder.thresholds()
        return Thresholds(accept, close)


def matched(tokens: Sequence[int], parents: Sequence[int], scores: Scores) -> Verdict:
    """Return the path of the chosen draft tokens [N] that the target has drawn as well, and what it drew after them.

    This is "naive sampling" (Miao et al. 2024). At each position the target has drawn one token from its whole
    distribution. A chosen token is the same one with its probability p there, and one of several siblings with the sum
    of theirs: for tokens that had the chance 1 in the draft no rule accepts more. What is committed is what the target
    has drawn, so that with draws that belong to places in the text no draft changes a token. Tokens that were drawn
    from a draft's distribution would be accepted less often than by a rule; where all of a session is matched, drafters
    guess the target's draws instead (`race.py`).
    """
    children = children_of(parents)
    path: list[int] = []
    position = 0
    while True:
        drawn = scores.positions[position].tail_token
        child = next((child for child in children[position] if tokens[child] == drawn), None)
        if child is None:
            origin = TokenOrigin.RECOVERED if children[position] else TokenOrigin.BONUS
            return Verdict(tuple(path), drawn, origin)
        path.append(child)
        position = child + 1


RULES: Mapping[AcceptanceRuleName, AcceptanceRule] = {
    AcceptanceRuleName.TOKEN: TokenRule(),
    AcceptanceRuleName.BLOCK: BlockRule(),
}

# on chains never worse than the token rule (enumerated: 612 of 612), on merged trees neither (456 of 456); of 450
# enumerated trees with drawn siblings 92 are better, and one is worse, by 0.1 %
DEFAULT_RULE = AcceptanceRuleName.BLOCK


def choose(weights: Sequence[float], uniform: float) -> int:
    """Return i with probability weights[i] / sum(weights), by inverting the cumulative sum at `uniform` in [0, 1)."""
    cumulative = list(accumulate(weights))
    threshold = uniform * cumulative[-1]
    last = max(index for index, weight in enumerate(weights) if weight > 0)
    return next((index for index, total in enumerate(cumulative) if total > threshold), last)


def turns(weights: Sequence[float]) -> list[float]:
    """Return where a draw by these weights changes: their normalised cumulative sums."""
    cumulative = list(accumulate(weights))
    return [value / cumulative[-1] for value in cumulative] if cumulative and cumulative[-1] else []
