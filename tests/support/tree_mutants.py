"""Planted bugs in trees, enumerated like those of mutants.py: two or more rounds of a small tree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import cast

from specdec.exact.acceptance import AcceptanceRule, Remainder, Thresholds
from specdec.exact.randomness import Purpose
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms, Verdict
from specdec.types import TokenOrigin
from tests.support.enumeration import (
    CLOSE,
    FIRST_TAIL,
    ZERO,
    Draws,
    Enumeration,
    History,
    Pair,
    Use,
    dense,
    markov_pair,
    prob_of,
    truncated,
)
from tests.support.trees import (
    LEAF,
    Candidate,
    Shape,
    Siblings,
    TreeEnumeration,
    from_two_drafters,
    without_replacement,
)

TARGETS = [[1, 5, 3], [4, 1, 4], [5, 3, 2]]  # two tokens have a residual, and of one of them it is less than q
DRAFTS = [[4, 4, 1], [1, 5, 4], [4, 2, 3]]


def markov(size: int) -> Pair:
    """Return a Markov pair over three tokens with supports of `size`."""
    return markov_pair([dense(*weights) for weights in TARGETS], [truncated(weights, size) for weights in DRAFTS])


WHOLE, SPARSE = markov(3), markov(2)
OF_TWO_TOKENS = replace(WHOLE, target=lambda history: dense(*TARGETS[sum(history[-2:]) % 3]), memory=2)
TWO: Shape = (LEAF, LEAF)
THREE: Shape = (LEAF, LEAF, LEAF)
TWO_LEVELS: Shape = ((LEAF,), LEAF)  # two siblings, the first with a child
TWO_CHAINS: Shape = ((LEAF,), (LEAF,))


@dataclass(frozen=True)
class TreeMutant(TreeEnumeration):
    """An enumerated bug."""

    pair: Pair = WHOLE
    shape: Shape = TWO_LEVELS
    total_variation: float = 0.0
    num_draft_tokens: int = 0  # the shape determines it

    def production(self) -> Enumeration:
        """Return the production rule on the same trees."""
        return TreeEnumeration(self.pair, shape=self.shape, siblings=self.siblings)


class TreeByParts:
    """The token rule, in parts that a mutant replaces."""

    def after(self, remainder: Remainder, draft: SparseDistribution) -> Remainder:
        """Return the residual after a rejection."""
        return remainder.after_rejecting(draft)

    def tested(self, remainders: Sequence[Remainder]) -> Remainder:
        """Return the residual that the next sibling is tested against, given all residuals so far."""
        return remainders[-1]

    def closing(self, remainders: Sequence[Remainder]) -> Remainder:
        """Return the residual that the closing token is drawn from."""
        return remainders[-1]

    def closed(self, verdict: Verdict, proposal: Proposal, scores: Scores) -> Verdict:
        """Return the verdict with its closing token."""
        return verdict

    def remainders(self, proposal: Proposal, scores: Scores, position: int) -> list[Remainder]:
        """Return the residual before each child of a position, and after the last one."""
        remainders = [Remainder.at(proposal.unions()[position], scores.positions[position])]
        for child in proposal.children()[position]:
            remainders.append(self.after(remainders[-1], proposal.distributions[child]))
        return remainders

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the accepted path and the closing token."""
        children, path, position = proposal.children(), list[int](), 0
        while children[position]:
            remainders = self.remainders(proposal, scores, position)
            for rank, child in enumerate(children[position]):
                remainder = self.tested(remainders[: rank + 1])
                if remainder.accepts(proposal.tokens[child], proposal.distributions[child], uniforms.accept[child]):
                    path.append(child)
                    position = child + 1
                    break
            else:
                token = self.closing(remainders).draw(uniforms.close)
                return self.closed(Verdict(tuple(path), token, TokenOrigin.RECOVERED), proposal, scores)
        bonus = scores.positions[position].tail_token
        return self.closed(Verdict(tuple(path), bonus, TokenOrigin.BONUS), proposal, scores)

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return where decisions change."""
        accept: list[float] = [0.0] * len(proposal)
        close: list[Sequence[float]] = []
        for position, children in enumerate(proposal.children()):
            remainders = self.remainders(proposal, scores, position)
            for rank, child in enumerate(children):
                remainder = self.tested(remainders[: rank + 1])
                accept[child] = remainder.threshold(proposal.tokens[child], proposal.distributions[child])
            close.append(self.closing(remainders).thresholds() if children else ())
        return Thresholds(accept, close)


@dataclass(frozen=True)
class TreeInParts(TreeMutant):
    """Control, exact: the token rule in parts."""

    rule: AcceptanceRule = field(default_factory=TreeByParts)


# ---- the rule


class TestAgainstTarget(TreeByParts):
    """Tests every sibling against p."""

    __test__ = False  # not a test

    def tested(self, remainders: Sequence[Remainder]) -> Remainder:
        """Return the target's distribution."""
        return remainders[0]


@dataclass(frozen=True)
class AcceptsSiblingsIndependently(TreeMutant):
    """Tests each sibling against p, as if those before it had not been rejected."""

    rule: AcceptanceRule = field(default_factory=TestAgainstTarget)
    total_variation: float = 0.0855


class KeepScale(TreeByParts):
    """Does not divide the residual by its sum."""

    def after(self, remainder: Remainder, draft: SparseDistribution) -> Remainder:
        """Return max(0, P - q) as if it summed to 1."""
        return replace(remainder.after_rejecting(draft), total=1)


@dataclass(frozen=True)
class ForgetsToNormalise(TreeMutant):
    """Tests the next sibling against max(0, P - q), not divided by its sum."""

    rule: AcceptanceRule = field(default_factory=KeepScale)
    total_variation: float = 0.0760


class KeepTail(TreeByParts):
    """Divides the residual on the supports, and not the tail."""

    def after(self, remainder: Remainder, draft: SparseDistribution) -> Remainder:
        """Return P and T of which only P is divided by Z."""
        left = remainder.after_rejecting(draft)
        weights = [weight / left.total for weight in left.weights]
        return replace(left, weights=weights, tail_mass=remainder.tail_mass, total=1)


@dataclass(frozen=True)
class ForgetsToNormaliseTail(TreeMutant):
    """Divides the residual on the supports by Z, and leaves the tail mass as it was."""

    pair: Pair = SPARSE
    rule: AcceptanceRule = field(default_factory=KeepTail)
    total_variation: float = 0.0170


class CloseFromFirst(TreeByParts):
    """Closes from the residual of the first sibling only."""

    def closing(self, remainders: Sequence[Remainder]) -> Remainder:
        """Return the residual after the first rejection."""
        return remainders[min(1, len(remainders) - 1)]


@dataclass(frozen=True)
class ClosesFromFirstResidual(TreeMutant):
    """Closes from max(0, p - q) of the first sibling, although others were rejected as well."""

    rule: AcceptanceRule = field(default_factory=CloseFromFirst)
    total_variation: float = 0.0678


class CloseFromTarget(TreeByParts):
    """Closes from p."""

    def closing(self, remainders: Sequence[Remainder]) -> Remainder:
        """Return the target's distribution."""
        return remainders[0]


@dataclass(frozen=True)
class ClosesFromTarget(TreeMutant):
    """Closes from p where all siblings were rejected."""

    rule: AcceptanceRule = field(default_factory=CloseFromTarget)
    total_variation: float = 0.1795


class BonusOfLastPosition(TreeByParts):
    """Takes the bonus from the last position of the answer."""

    def closed(self, verdict: Verdict, proposal: Proposal, scores: Scores) -> Verdict:
        """Return the verdict with the bonus of position N."""
        is_bonus = verdict.next_origin is TokenOrigin.BONUS
        return replace(verdict, next_token=scores.positions[-1].tail_token) if is_bonus else verdict


@dataclass(frozen=True)
class BonusFromLastPosition(TreeMutant):
    """Takes the bonus from position N, as for a chain, whichever node was accepted last."""

    rule: AcceptanceRule = field(default_factory=BonusOfLastPosition)
    total_variation: float = 0.0333


class BonusOfFirstSibling(TreeByParts):
    """Takes the bonus after the accepted token's first sibling."""

    def closed(self, verdict: Verdict, proposal: Proposal, scores: Scores) -> Verdict:
        """Return the verdict with a sibling's bonus."""
        if verdict.next_origin is TokenOrigin.RECOVERED:
            return verdict
        last = verdict.path[-1]
        first = next(index for index, parent in enumerate(proposal.tree) if parent == proposal.tree[last])
        return replace(verdict, next_token=scores.positions[first + 1].tail_token)


@dataclass(frozen=True)
class BonusFromSibling(TreeMutant):
    """Takes the bonus from the position after the first sibling of the token that was accepted."""

    shape: Shape = TWO
    rule: AcceptanceRule = field(default_factory=BonusOfFirstSibling)
    total_variation: float = 0.0662


class TailByDepth(TreeByParts):
    """Takes the recovered tail token from the position with the number of accepted tokens."""

    def closed(self, verdict: Verdict, proposal: Proposal, scores: Scores) -> Verdict:
        """Return the verdict with another position's tail token."""
        is_tail = verdict.next_origin is TokenOrigin.RECOVERED and verdict.next_token >= FIRST_TAIL
        return replace(verdict, next_token=scores.positions[verdict.num_accepted].tail_token) if is_tail else verdict


@dataclass(frozen=True)
class TailOfWrongPosition(TreeMutant):
    """Takes the tail token of position "number of accepted tokens", as for a chain, instead of the node's."""

    pair: Pair = SPARSE
    shape: Shape = TWO_CHAINS
    rule: AcceptanceRule = field(default_factory=TailByDepth)
    total_variation: float = 0.0247


# ---- uniforms


@dataclass(frozen=True)
class OneUniformForSiblings(TreeMutant):
    """Tests all siblings with the same uniform."""

    shape: Shape = THREE
    total_variation: float = 0.0171

    def key(self, use: Use) -> Use:
        """Return the first sibling's draw; all are children of the root."""
        return use if use == CLOSE else Use(Purpose.ACCEPT, 0)


# ---- the drafter


@dataclass(frozen=True)
class SortsDrawnSiblings(TreeMutant):
    """Sorts siblings by probability after drawing them: which comes first then depends on what was drawn."""

    total_variation: float = 0.0804

    def kept(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates, most probable first."""
        return sorted(candidates, key=lambda candidate: -prob_of(candidate.distribution, candidate.token))


@dataclass(frozen=True)
class DiscardsUnlikelySiblings(TreeMutant):
    """Draws siblings, and leaves out those that are unlikely."""

    total_variation: float = 0.1358

    def kept(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates of probability a third or more."""
        return [each for each in candidates if prob_of(each.distribution, each.token) >= Fraction(1, 3)]


@dataclass(frozen=True)
class MergesEqualSiblings(TreeMutant):
    """Draws siblings independently, and leaves out those that repeat an earlier one."""

    total_variation: float = 0.0539

    def kept(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the first of each token."""
        return list({candidate.token: candidate for candidate in reversed(candidates)}.values())[::-1]


def shipped_whole(draft: SparseDistribution, elder: Sequence[Candidate], draws: Draws) -> Candidate | None:
    """Draw without replacement, and ship the distribution with replacement."""
    left = draft
    for candidate in elder:
        left = truncated_without(left, candidate.token)
    return Candidate(draws.token(left), draft)


def truncated_without(draft: SparseDistribution, token: int) -> SparseDistribution:
    """Return a distribution over the tokens but one, renormalised."""
    probs = [ZERO if each == token else prob_of(draft, each) for each in range(max(draft.token_ids) + 1)]
    return truncated(probs)


@dataclass(frozen=True)
class ShipsDistributionWithReplacement(TreeMutant):
    """Draws siblings without replacement, and ships the same distribution with all of them."""

    siblings: Siblings = shipped_whole
    total_variation: float = 0.0985

    def production(self) -> Enumeration:
        """Return the production rule on trees that ship the distributions without replacement."""
        return TreeEnumeration(self.pair, shape=self.shape, siblings=without_replacement)


# ---- the target


@dataclass(frozen=True)
class TailOutsideFirstSupport(TreeMutant):
    """Sums the tail outside the first child's support only, so a later child's tokens count twice."""

    pair: Pair = SPARSE
    siblings: Siblings = from_two_drafters
    total_variation: float = 0.0279

    def target_answer(self, history: History, proposal: Proposal, position: int) -> TargetDistribution:
        """Return the answer with the wrong tail mass."""
        answer = TreeEnumeration.target_answer(self, history, proposal, position)
        outside = self.outside_first(history, proposal, position)
        return replace(answer, tail_mass=cast(float, sum(outside.values(), ZERO)))

    def tail_distribution(self, history: History, proposal: Proposal, position: int) -> Mapping[int, Fraction]:
        """Return the target's distribution outside the first child's support."""
        outside = self.outside_first(history, proposal, position)
        return {token: prob / sum(outside.values()) for token, prob in outside.items()}

    def outside_first(self, history: History, proposal: Proposal, position: int) -> Mapping[int, Fraction]:
        """Return the target's probabilities outside the first child's support."""
        children = proposal.children()[position]
        support = proposal.distributions[children[0]].token_ids if children else ()
        distribution = self.target_distribution(history, proposal, position)
        return {token: prob for token, prob in enumerate(distribution) if token not in support and prob}


@dataclass(frozen=True)
class ReadsTreeAsChain(TreeMutant):
    """Computes each node's distribution after all tokens before it in the proposal, not after its ancestors."""

    pair: Pair = OF_TWO_TOKENS
    total_variation: float = 0.0886

    def target_distribution(self, history: History, proposal: Proposal, position: int) -> Sequence[Fraction]:
        """Return the distribution after the tokens with smaller indices: an attention mask without a tree."""
        return self.pair.target((*history, *proposal.tokens[:position]))


@dataclass(frozen=True)
class SeesSiblings(TreeMutant):
    """Lets a node's distribution depend on an earlier sibling: a position by index instead of by depth."""

    total_variation: float = 0.0662

    def target_distribution(self, history: History, proposal: Proposal, position: int) -> Sequence[Fraction]:
        """Return the distribution after the first child of the node's parent."""
        parent = proposal.tree[position - 1] if position else 0
        first = proposal.children()[parent][0] + 1 if position else 0
        return TreeEnumeration.target_distribution(self, history, proposal, first)
