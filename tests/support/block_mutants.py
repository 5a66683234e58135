"""Planted bugs in the block rule, enumerated like those of mutants.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import cast

from specdec.exact.acceptance import (
    AcceptanceRule,
    Block,
    BlockRule,
    Remainder,
    Thresholds,
    TokenRule,
    first_accepted,
)
from specdec.exact.values import Proposal, Scores, Uniforms, Verdict
from specdec.types import TokenOrigin
from tests.support.enumeration import ONE, Draws, Enumeration, History, Pair, Use
from tests.support.mutants import FIRST_TEST, SPARSE, Mutant
from tests.support.trees import Candidate, GrowingTree


def prefix_weights(proposal: Proposal, scores: Scores) -> list[float]:
    """Return w_0 to w_K of a chain."""
    weights: list[float] = [1]
    for token, draft, target in zip(proposal.tokens, proposal.distributions, scores.positions, strict=False):
        ratio = Remainder.at(draft.token_ids, target).threshold(token, draft)
        weights.append(min(1, weights[-1] * ratio))
    return weights


def residual_at(proposal: Proposal, scores: Scores, position: int, weight: float) -> Remainder:
    """Return max(0, w p - q) at a position of a chain."""
    draft = proposal.distributions[position]
    return Remainder.at(draft.token_ids, scores.positions[position]).residual(draft, weight)


def closing_at(proposal: Proposal, scores: Scores, position: int, weight: float) -> Remainder:
    """Return what closes the round at a position of a chain."""
    residual, draft = residual_at(proposal, scores, position, weight), proposal.distributions[position]
    return residual if residual.total > 0 else Remainder.at(draft.token_ids, scores.positions[position])


class BlockByParts:
    """The block rule for chains, in parts that a mutant replaces."""

    def weights(self, proposal: Proposal, scores: Scores) -> list[float]:
        """Return w_0 to w_K."""
        return prefix_weights(proposal, scores)

    def last_threshold(self, proposal: Proposal, scores: Scores, weights: list[float]) -> float:
        """Return h_K."""
        return weights[-1]

    def num_accepted(self, passed: Sequence[bool]) -> int:
        """Return the length of the accepted prefix: up to the last test that was passed."""
        return max((index + 1 for index, is_passed in enumerate(passed) if is_passed), default=0)

    def closing(self, proposal: Proposal, scores: Scores, position: int, weight: float) -> Remainder:
        """Return what closes the round at a position."""
        return closing_at(proposal, scores, position, weight)

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the accepted prefix and the closing token."""
        weights, limits = self.weights(proposal, scores), self.thresholds(proposal, scores).accept
        count = self.num_accepted([uniforms.accept[index] < limit for index, limit in enumerate(limits)])
        path = tuple(range(count))
        if count == len(proposal):
            return Verdict(path, scores.positions[-1].tail_token, TokenOrigin.BONUS)
        token = self.closing(proposal, scores, count, weights[count]).draw(uniforms.close)
        return Verdict(path, token, TokenOrigin.RECOVERED)

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return where decisions change."""
        weights, positions = self.weights(proposal, scores), range(len(proposal))
        inner = [threshold(proposal, scores, position, weights[position]) for position in positions[1:]]
        close = [self.closing(proposal, scores, position, weights[position]).thresholds() for position in positions]
        last = [self.last_threshold(proposal, scores, weights)] if len(proposal) else []
        return Thresholds([*inner, *last], [*close, ()])


def threshold(proposal: Proposal, scores: Scores, position: int, weight: float) -> float:
    """Return r / (r + 1 - w)."""
    residual = residual_at(proposal, scores, position, weight).total
    total = residual + 1 - weight
    return residual / total if total > 0 else 0.0


@dataclass(frozen=True)
class BlockMutant(Mutant):
    """An enumerated bug in the block rule."""

    pair: Pair = SPARSE
    rule: AcceptanceRule = field(default_factory=BlockByParts)

    def production(self) -> Enumeration:
        """Return the production rule."""
        return Enumeration(self.pair, BlockRule())


@dataclass(frozen=True)
class BlockInParts(BlockMutant):
    """Control, exact: the block rule in parts."""


class CloseWithWeightOne(BlockByParts):
    """Closes from max(0, p - q)."""

    def closing(self, proposal: Proposal, scores: Scores, position: int, weight: float) -> Remainder:
        """Return the token rule's residual."""
        return closing_at(proposal, scores, position, cast(float, ONE))


@dataclass(frozen=True)
class ClosesWithWeightOne(BlockMutant):
    """Closes as the token rule does, from max(0, p - q) instead of max(0, w p - q)."""

    rule: AcceptanceRule = field(default_factory=CloseWithWeightOne)
    total_variation: float = 0.0210


class LastFromResidual(BlockByParts):
    """Takes h_K from the formula of the inner positions."""

    def last_threshold(self, proposal: Proposal, scores: Scores, weights: list[float]) -> float:
        """Return r / (r + 1 - w) with the residual of the last draft token's own position."""
        return threshold(proposal, scores, len(proposal) - 1, weights[-1])


@dataclass(frozen=True)
class LastThresholdFromResidual(BlockMutant):
    """Computes h_K like the others, r / (r + 1 - w_K), where position K has no draft distribution to subtract."""

    rule: AcceptanceRule = field(default_factory=LastFromResidual)
    total_variation: float = 0.2022


class LastFromToken(BlockByParts):
    """Tests the last token by itself."""

    def last_threshold(self, proposal: Proposal, scores: Scores, weights: list[float]) -> float:
        """Return min(1, p / q) of the last token."""
        last = len(proposal) - 1
        remainder = Remainder.at(proposal.distributions[last].token_ids, scores.positions[last])
        return min(1, remainder.threshold(proposal.tokens[last], proposal.distributions[last]))


@dataclass(frozen=True)
class LastThresholdOfToken(BlockMutant):
    """Takes h_K as the token rule's min(1, p / q)."""

    rule: AcceptanceRule = field(default_factory=LastFromToken)
    total_variation: float = 0.3024


class AcceptFirstPassed(BlockByParts):
    """Accepts up to the first test that was passed."""

    def num_accepted(self, passed: Sequence[bool]) -> int:
        """Return the shortest prefix that passed."""
        return next((index + 1 for index, is_passed in enumerate(passed) if is_passed), 0)


@dataclass(frozen=True)
class AcceptsFirstPassed(BlockMutant):
    """Accepts up to the first i with u_i < h_i instead of the last."""

    rule: AcceptanceRule = field(default_factory=AcceptFirstPassed)
    total_variation: float = 0.1536


class StopAtFailure(BlockByParts):
    """Accepts as long as the tests are passed."""

    def num_accepted(self, passed: Sequence[bool]) -> int:
        """Return the number of tests before the first that failed."""
        return [*passed, False].index(False)


@dataclass(frozen=True)
class StopsAtFirstFailure(BlockMutant):
    """Stops at the first i with u_i >= h_i, as the token rule does."""

    rule: AcceptanceRule = field(default_factory=StopAtFailure)
    total_variation: float = 0.2052


class UnclippedProduct(BlockByParts):
    """Multiplies p / q along the prefix."""

    def weights(self, proposal: Proposal, scores: Scores) -> list[float]:
        """Return the products without min(1, .)."""
        weights = [ONE]
        for token, draft, target in zip(proposal.tokens, proposal.distributions, scores.positions, strict=False):
            place = draft.token_ids.index(token)
            weights.append(weights[-1] * Fraction(target.support_probs[place]) / Fraction(draft.probs[place]))
        return cast("list[float]", weights)


@dataclass(frozen=True)
class MultipliesWithoutLimit(BlockMutant):
    """Lets the weight of a prefix grow past 1: the product of all p / q instead of min(1, .) at each step."""

    rule: AcceptanceRule = field(default_factory=UnclippedProduct)
    total_variation: float = 0.0644


class ClippedOnlyAtLast(UnclippedProduct):
    """Limits the product only where it is used."""

    def weights(self, proposal: Proposal, scores: Scores) -> list[float]:
        """Return min(1, product)."""
        return [min(1, weight) for weight in UnclippedProduct.weights(self, proposal, scores)]


@dataclass(frozen=True)
class LimitsOnlyTheProduct(BlockMutant):
    """Takes w_i = min(1, product of p / q), not min(1, w_(i-1) p / q): an early surplus offsets a later deficit."""

    rule: AcceptanceRule = field(default_factory=ClippedOnlyAtLast)
    total_variation: float = 0.0552


@dataclass(frozen=True)
class OneUniformForTheBlock(BlockMutant):
    """Tests all prefixes with the same uniform."""

    rule: AcceptanceRule = field(default_factory=BlockRule)
    total_variation: float = 0.0587

    def key(self, use: Use) -> Use:
        """Return one draw for all tests."""
        return FIRST_TEST if use.purpose is FIRST_TEST.purpose else use


class TokenRuleForTrees(BlockRule):
    """Tests a chain as a block, and any other tree by the token rule."""

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the accepted path and the closing token."""
        return (BlockRule() if proposal.is_chain else TokenRule()).accept(proposal, scores, uniforms)

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return where decisions change."""
        return (BlockRule() if proposal.is_chain else TokenRule()).thresholds(proposal, scores)


@dataclass(frozen=True)
class LeavesTreesToTokenRule(BlockMutant):
    """Uses the block rule for chains and the token rule for trees, where the shape depends on the drawn tokens."""

    rule: AcceptanceRule = field(default_factory=TokenRuleForTrees)
    num_draft_tokens: int = 3
    total_variation: float = 0.0351

    def production(self) -> Enumeration:
        """Return the block rule on the same trees."""
        return replace(self, rule=BlockRule())

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Draft a chain; after two tokens of which the second is 0, draft two siblings."""
        tree, text, position = GrowingTree(), history, 0
        for index in range(num_draft_tokens):
            draft = self.pair.draft(text)
            count = 2 if index == 2 and text[-1] == 0 else 1
            candidates = [Candidate(draws.token(draft), draft) for _ in range(count)]
            positions = [tree.add(candidate, position) for candidate in candidates]
            position = positions[0]
            text = (*text, candidates[0].token)
        return tree.proposal()


@dataclass(frozen=True)
class BranchesAfterDrawing(BlockMutant):
    """Control, exact: adds a sibling depending on the token that was drawn first."""

    rule: AcceptanceRule = field(default_factory=BlockRule)
    num_draft_tokens: int = 3

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Draft a chain; where its second token is 0, add a sibling of it."""
        tree, text, position = GrowingTree(), history, 0
        for _ in range(num_draft_tokens):
            draft = self.pair.draft(text)
            parent, token = position, draws.token(draft)
            position = tree.add(Candidate(token, draft), parent)
            if len(text) == len(history) + 1 and token == 0:
                tree.add(Candidate(draws.token(draft), draft), parent)
            text = (*text, token)
        return tree.proposal()


class ForgetWeight:
    """Tests first children as a block, and siblings against the residual of the token rule."""

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the accepted path and the closing token, of a tree that branches once."""
        block = Block.at(0, proposal, scores, proposal.children())
        num_accepted, _ = block.end(uniforms)
        path = list(block.tokens[:num_accepted])
        position = path[-1] + 1 if path else 0
        if num_accepted < len(block.tokens):
            first, *siblings = proposal.children()[position]
            left = self.remainder(proposal, scores, position).after_rejecting(proposal.distributions[first])
            child, left = first_accepted(siblings, left, proposal, uniforms)
            if child is None:
                return Verdict(tuple(path), left.draw(uniforms.close), TokenOrigin.RECOVERED)
            path.append(child)
        return Verdict(tuple(path), scores.positions[path[-1] + 1].tail_token, TokenOrigin.BONUS)

    def remainder(self, proposal: Proposal, scores: Scores, position: int) -> Remainder:
        """Return the target's distribution at a position."""
        return Remainder.at(proposal.unions()[position], scores.positions[position])

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return the block's thresholds for first children, the token rule's for the others."""
        block, by_token = Block.at(0, proposal, scores, proposal.children()), TokenRule().thresholds(proposal, scores)
        of_block = dict(zip(block.tokens, block.thresholds(), strict=True))
        return Thresholds([of_block.get(index, value) for index, value in enumerate(by_token.accept)], by_token.close)


@dataclass(frozen=True)
class SiblingsForgetTheWeight(BlockMutant):
    """Tries siblings from max(0, p - q) where the block ended with a weight below 1."""

    rule: AcceptanceRule = field(default_factory=ForgetWeight)
    total_variation: float = 0.0210

    def production(self) -> Enumeration:
        """Return the block rule on the same trees."""
        return replace(self, rule=BlockRule())

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Draft one token, then two siblings."""
        first = self.pair.draft(history)
        tree, token = GrowingTree(), draws.token(first)
        position, draft = tree.add(Candidate(token, first), 0), self.pair.draft((*history, token))
        for _ in range(2):
            tree.add(Candidate(draws.token(draft), draft), position)
        return tree.proposal()
