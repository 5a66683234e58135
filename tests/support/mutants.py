"""Planted bugs in chains: each breaks exactness in one way, and test_mutants.py must reject it.

Each is a subclass of Enumeration whose text distribution is exact too, only not the target's. `total_variation` is its
distance from the target's distribution on the pair below (three tokens of a Markov chain over four, K = 2), to four
digits, which the test asserts. A joint chi-square over 20,000 generations detects 0.02 to 0.03 and no less, so only
enumeration detects some of these. block_mutants.py and tree_mutants.py have the bugs of the block rule and of trees,
loop_mutants.py those of the real loop.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from typing import cast

import torch

from specdec.exact.acceptance import AcceptanceRule, Remainder, Thresholds, TokenRule, choose
from specdec.exact.randomness import Purpose
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms, Verdict
from specdec.types import TokenOrigin
from tests.support.enumeration import (
    CLOSE,
    ONE,
    ZERO,
    Dense,
    Draws,
    Enumeration,
    History,
    Interval,
    Pair,
    Use,
    cumulative,
    dense,
    markov_pair,
    one_hot,
    prob_of,
    sparse,
    truncated,
)

TARGETS = [[6, 1, 3, 2], [1, 4, 2, 5], [2, 2, 5, 1], [4, 3, 1, 1]]
DRAFTS = [[2, 4, 3, 1], [4, 2, 1, 3], [1, 5, 2, 2], [3, 1, 1, 5]]


def markov(size: int) -> Pair:
    """Return a Markov pair with supports of `size`."""
    return markov_pair([dense(*weights) for weights in TARGETS], [truncated(weights, size) for weights in DRAFTS])


WHOLE = markov(4)  # supports of the whole vocabulary
SPARSE = markov(3)  # with a tail

FIRST_TEST = Use(Purpose.ACCEPT, 0)


@dataclass(frozen=True)
class Mutant(Enumeration):
    """An enumerated bug."""

    pair: Pair = WHOLE
    total_variation: float = 0.0
    num_draft_tokens: int = 2

    def production(self) -> Enumeration:
        """Return the production code on the same distributions."""
        return Enumeration(self.pair)


# ---- the rule


class AcceptAll:
    """Tests nothing."""

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return all tokens and a bonus."""
        return Verdict(tuple(range(len(proposal))), scores.positions[-1].tail_token, TokenOrigin.BONUS)

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return no thresholds: no uniform is read."""
        return Thresholds([1.0] * len(proposal), [()] * (len(proposal) + 1))


@dataclass(frozen=True)
class AcceptsAll(Mutant):
    """Keeps every draft token (transformers 28508: the number of matches was wrong)."""

    rule: AcceptanceRule = field(default_factory=AcceptAll)
    total_variation: float = 0.5215


Weigh = Callable[[SparseDistribution, TargetDistribution], Dense]


@dataclass(frozen=True)
class CloseBy:
    """The token rule with other weights for the recovered token: those of the support's tokens, then of the tail."""

    weigh: Weigh

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the production verdict with another closing token."""
        verdict = TokenRule().accept(proposal, scores, uniforms)
        if verdict.next_origin is TokenOrigin.BONUS:
            return verdict
        draft, target = proposal.distributions[verdict.num_accepted], scores.positions[verdict.num_accepted]
        index = choose(cast("list[float]", self.weigh(draft, target)), uniforms.close)
        return replace(verdict, next_token=[*draft.token_ids, target.tail_token][index])

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return the production thresholds with other closing ones."""
        pairs = zip(proposal.distributions, scores.positions, strict=False)
        close = [cumulative(self.weigh(draft, target)) for draft, target in pairs]
        accept = TokenRule().thresholds(proposal, scores).accept
        return Thresholds(accept, cast("list[list[float]]", [*close, []]))


def target_weights(draft: SparseDistribution, target: TargetDistribution) -> list[Fraction]:
    """Return p."""
    return [*map(Fraction, target.support_probs), Fraction(target.tail_mass)]


def residual_weights(draft: SparseDistribution, target: TargetDistribution) -> list[Fraction]:
    """Return the residual on the support, and the tail mass, which is correct."""
    pairs = zip(map(Fraction, target.support_probs), map(Fraction, draft.probs), strict=True)
    return [*(max(ZERO, target_prob - draft_prob) for target_prob, draft_prob in pairs), Fraction(target.tail_mass)]


def exponential_weights(draft: SparseDistribution, target: TargetDistribution) -> list[Fraction]:
    """Return exp(max(0, p - q))."""
    return [Fraction(math.exp(weight)) for weight in residual_weights(draft, target)]


def weights_without_tail(draft: SparseDistribution, target: TargetDistribution) -> list[Fraction]:
    """Return the residual on the support, or p there if that is empty."""
    inside = residual_weights(draft, target)[:-1]
    return [*(inside if any(inside) else target_weights(draft, target)[:-1]), ZERO]


def weights_with_complement(draft: SparseDistribution, target: TargetDistribution) -> list[Fraction]:
    """Return the residual on the support, and 1 - its sum."""
    inside = residual_weights(draft, target)[:-1]
    return [*inside, 1 - sum(inside, ZERO)]


@dataclass(frozen=True)
class RecoversFromTarget(Mutant):
    """Draws the recovered token from p instead of the residual, so tokens that q favours are too frequent."""

    pair: Pair = SPARSE
    rule: AcceptanceRule = field(default_factory=lambda: CloseBy(target_weights))
    total_variation: float = 0.2311


@dataclass(frozen=True)
class SoftmaxOverResidual(Mutant):
    """Normalises the residual by softmax (transformers 28508): tokens with residual 0 get probability."""

    pair: Pair = SPARSE
    rule: AcceptanceRule = field(default_factory=lambda: CloseBy(exponential_weights))
    total_variation: float = 0.2718


@dataclass(frozen=True)
class ClosesWithoutTail(Mutant):
    """Omits the residual outside the draft's support."""

    pair: Pair = SPARSE
    rule: AcceptanceRule = field(default_factory=lambda: CloseBy(weights_without_tail))
    total_variation: float = 0.3813


@dataclass(frozen=True)
class TailIsOneMinusSum(Mutant):
    """Takes the tail's weight as 1 - sum of max(0, p - q), not as the target's mass."""

    pair: Pair = SPARSE
    rule: AcceptanceRule = field(default_factory=lambda: CloseBy(weights_with_complement))
    total_variation: float = 0.2339


class BonusAfterAnything(TokenRule):
    """Closes every round at position K."""

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Put the bonus token after the accepted ones."""
        verdict = TokenRule().accept(proposal, scores, uniforms)
        return replace(verdict, next_token=scores.positions[-1].tail_token)


@dataclass(frozen=True)
class BonusAlways(Mutant):
    """Closes every round from position K, "whether or not all K were accepted" (a common misstatement)."""

    rule: AcceptanceRule = field(default_factory=BonusAfterAnything)
    total_variation: float = 0.2661


class AcceptOffTheSupport:
    """Takes a token outside the support of its distribution as one with q = 0, which u * 0 < p accepts."""

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the first tokens that are off their supports or pass the test."""
        for index, (token, draft) in enumerate(zip(proposal.tokens, proposal.distributions, strict=True)):
            remainder = Remainder.at(draft.token_ids, scores.positions[index])
            if token in draft.token_ids and not remainder.accepts(token, draft, uniforms.accept[index]):
                recovered = remainder.after_rejecting(draft).draw(uniforms.close)
                return Verdict(tuple(range(index)), recovered, TokenOrigin.RECOVERED)
        return Verdict(tuple(range(len(proposal))), scores.positions[-1].tail_token, TokenOrigin.BONUS)

    def thresholds(self, proposal: Proposal, scores: Scores) -> Thresholds:
        """Return the production thresholds for tokens on their supports."""
        accept: list[float] = []
        close: list[Sequence[float]] = []
        for token, draft, target in zip(proposal.tokens, proposal.distributions, scores.positions, strict=False):
            remainder = Remainder.at(draft.token_ids, target)
            accept.append(remainder.threshold(token, draft) if token in draft.token_ids else 1.0)
            close.append(remainder.after_rejecting(draft).thresholds())
        return Thresholds(accept, [*close, ()])


@dataclass(frozen=True)
class AcceptsOffTheSupport(Mutant):
    """Draws from the whole distribution, ships its support, and accepts tokens outside."""

    pair: Pair = SPARSE
    rule: AcceptanceRule = field(default_factory=AcceptOffTheSupport)
    total_variation: float = 0.1362

    def drawn_from(self, text: History) -> SparseDistribution:
        """Return the distribution before its truncation."""
        return WHOLE.draft(text)

    def shipped(self, text: History, token: int) -> SparseDistribution:
        """Return the truncated distribution."""
        return self.pair.draft(text)


class AcceptInclusively(TokenRule):
    """Tests u q <= p: at u = 0 a token with target probability 0 passes."""

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the tokens that pass, of a chain."""
        for index, (token, draft) in enumerate(zip(proposal.tokens, proposal.distributions, strict=True)):
            remainder = Remainder.at(draft.token_ids, scores.positions[index])
            place = draft.token_ids.index(token)
            if not uniforms.accept[index] * draft.probs[place] <= remainder.weights[place]:
                recovered = remainder.after_rejecting(draft).draw(uniforms.close)
                return Verdict(tuple(range(index)), recovered, TokenOrigin.RECOVERED)
        return Verdict(tuple(range(len(proposal))), scores.positions[-1].tail_token, TokenOrigin.BONUS)


@dataclass(frozen=True)
class AcceptsInclusively(Enumeration):
    """Total variation 0, but wrong at one uniform of 2**53: detected at the ends of the intervals, and at u = 0."""

    rule: AcceptanceRule = field(default_factory=AcceptInclusively)


# ---- uniforms


@dataclass(frozen=True)
class OneUniformForAll(Mutant):
    """Tests all K tokens and closes with the same uniform: an accepted token makes the next acceptance likelier."""

    total_variation: float = 0.1237

    def key(self, use: Use) -> Use:
        """Return the one draw of the round."""
        return CLOSE


@dataclass(frozen=True)
class OneUniformForAllTests(Mutant):
    """Tests all K tokens with the same uniform; the closing token has its own. First tokens keep their distribution."""

    total_variation: float = 0.0567

    def key(self, use: Use) -> Use:
        """Return one draw for the tests, and one for the closing token."""
        return use if use == CLOSE else FIRST_TEST


@dataclass(frozen=True)
class CloseSharesAccept(Mutant):
    """Closes with the uniform that the first token was tested with: two purposes share a key."""

    total_variation: float = 0.0964

    def key(self, use: Use) -> Use:
        """Return the first test's draw for the closing token."""
        return FIRST_TEST if use == CLOSE else use


def drawing_interval(proposal: Proposal, index: int) -> Interval:
    """Return the uniforms that draw a token of the proposal."""
    draft = proposal.distributions[index]
    place = draft.token_ids.index(proposal.tokens[index])
    bounds = [ZERO, *cumulative([Fraction(prob) for prob in draft.probs])]
    return bounds[place], bounds[place + 1]


@dataclass(frozen=True)
class AcceptSharesDraft(Mutant):
    """Tests a token with the uniform that it was drawn with: large ones draw the last tokens and reject them."""

    total_variation: float = 0.2675

    def domain(self, proposal: Proposal, key: Use) -> Interval:
        """Return the uniforms that draw the token."""
        return (ZERO, ONE) if key == CLOSE else drawing_interval(proposal, key.number)


@dataclass(frozen=True)
class CloseSharesDraft(Mutant):
    """Recovers with the first token's draft noise (vLLM 47386)."""

    total_variation: float = 0.1185

    def domain(self, proposal: Proposal, key: Use) -> Interval:
        """Return the uniforms that draw the first token."""
        return drawing_interval(proposal, 0) if key == CLOSE else (ZERO, ONE)


# ---- the drafter


@dataclass(frozen=True)
class ShipsAnotherDistribution(Mutant):
    """Draws at temperature 1/2 and ships the distribution of temperature 1."""

    total_variation: float = 0.1185

    def drawn_from(self, text: History) -> SparseDistribution:
        """Return the sharper distribution."""
        draft = self.pair.draft(text)
        return sparse({token: prob_of(draft, token) ** 2 for token in draft.token_ids})

    def shipped(self, text: History, token: int) -> SparseDistribution:
        """Return the distribution of temperature 1."""
        return self.pair.draft(text)


@dataclass(frozen=True)
class ArgmaxDrafts(ShipsAnotherDistribution):
    """Drafts the most probable token and ships the softmax distribution."""

    total_variation: float = 0.5139

    def drawn_from(self, text: History) -> SparseDistribution:
        """Return the most probable token."""
        return one_hot(self.pair.draft(text).token_ids[0])


@dataclass(frozen=True)
class RoundsAfterDrawing(Mutant):
    """Draws in one number format and ships another, here bfloat16 (DeepSpec 31): too small for any chi-square."""

    total_variation: float = 0.0009

    def shipped(self, text: History, token: int) -> SparseDistribution:
        """Return rounded probabilities."""
        return rounded(self.pair.draft(text), torch.bfloat16)


@dataclass(frozen=True)
class RoundsToHalf(Mutant):
    """Draws, then rounds the distribution to float16."""

    total_variation: float = 0.0001

    def shipped(self, text: History, token: int) -> SparseDistribution:
        """Return rounded probabilities."""
        return rounded(self.pair.draft(text), torch.float16)


def rounded(distribution: SparseDistribution, dtype: torch.dtype) -> SparseDistribution:
    """Return a distribution in another number format, as fractions."""
    probs = torch.tensor([float(prob) for prob in distribution.probs]).to(dtype).double().tolist()
    return SparseDistribution(distribution.token_ids, cast("list[float]", [Fraction(prob) for prob in probs]))


@dataclass(frozen=True)
class LosesMass(Mutant):
    """Ships distributions that lost 1 % of their mass: not renormalised after a truncation."""

    total_variation: float = 0.0044

    def shipped(self, text: History, token: int) -> SparseDistribution:
        """Return probabilities that sum to 0.99."""
        draft = self.pair.draft(text)
        probs = [Fraction(prob) * Fraction(99, 100) for prob in draft.probs]
        return SparseDistribution(draft.token_ids, cast("list[float]", probs))


@dataclass(frozen=True)
class DiscardsUnlikely(Mutant):
    """Draws a token and ends the proposal before it if it is unlikely: the bonus is then drawn from p, wrongly."""

    total_variation: float = 0.1939

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Cut the proposal before the first token of probability below a third."""
        proposal = Enumeration.propose(self, history, num_draft_tokens, draws)
        steps = zip(proposal.tokens, proposal.distributions, strict=True)
        sure = [prob_of(draft, token) >= Fraction(1, 3) for token, draft in steps]
        size = (*sure, False).index(False)
        return Proposal(proposal.tokens[:size], proposal.distributions[:size])


@dataclass(frozen=True)
class StopsBeforeUnsure(Mutant):
    """Control, exact: ends the proposal before *drawing* where the draft is uncertain; unlike the one above."""

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Draw only where some token has a probability of a half or more."""
        tokens: History = ()
        distributions: list[SparseDistribution] = []
        while len(tokens) < num_draft_tokens:
            draft = self.pair.draft((*history, *tokens))
            if max(draft.probs) < Fraction(1, 2):
                break
            distributions.append(draft)
            tokens += (draws.token(draft),)
        return Proposal(tokens, tuple(distributions))


@dataclass(frozen=True)
class DropsDistributions(Mutant):
    """Control, exact: draws a token and ships a one-hot distribution (vLLM 40149); only fewer are accepted."""

    def shipped(self, text: History, token: int) -> SparseDistribution:
        """Return a one-hot distribution."""
        return one_hot(token)


# ---- the target


@dataclass(frozen=True)
class BonusFromPositionBefore(Mutant):
    """Draws the bonus at position K - 1: off by one where the last draft token was read."""

    total_variation: float = 0.1043

    def target_distribution(self, history: History, proposal: Proposal, position: int) -> Dense:
        """Return the distribution one position too early, for the bonus only."""
        is_bonus = 0 < position == len(proposal)
        return Enumeration.target_distribution(self, history, proposal, position - 1 if is_bonus else position)


@dataclass(frozen=True)
class TailFromWholeDistribution(Mutant):
    """Draws the tail token from the whole distribution instead of the complement of the support."""

    pair: Pair = SPARSE
    total_variation: float = 0.3036

    def tail_distribution(self, history: History, proposal: Proposal, position: int) -> Mapping[int, Fraction]:
        """Return the whole distribution."""
        return dict(enumerate(self.target_distribution(history, proposal, position)))


def tempered(distribution: Dense) -> Dense:
    """Return a distribution at temperature 1/2."""
    return dense(*(prob**2 for prob in distribution))


def nucleus(distribution: Dense) -> Dense:
    """Return a distribution at top_p 3/4."""
    order = sorted(range(len(distribution)), key=lambda token: -distribution[token])
    before = dict(zip(order, accumulate((distribution[token] for token in order), initial=ZERO), strict=False))
    return dense(*(prob if before[token] < Fraction(3, 4) else 0 for token, prob in enumerate(distribution)))


def above_min_p(distribution: Dense) -> Dense:
    """Return a distribution at min_p 3/10."""
    return dense(*(prob if prob >= Fraction(3, 10) * max(distribution) else 0 for prob in distribution))


def with_parameter(shape: Callable[[Dense], Dense]) -> Pair:
    """Return the pair whose target has the sampling parameter applied, as the request says."""
    return replace(WHOLE, target=lambda history: shape(WHOLE.target(history)))


PEAKED, CUT, SHARPENED = with_parameter(above_min_p), with_parameter(nucleus), with_parameter(tempered)


@dataclass(frozen=True)
class ParameterOnBonusOnly(Mutant):
    """Applies min_p to the bonus and not where drafts are tested (vLLM 42744)."""

    pair: Pair = PEAKED
    total_variation: float = 0.2432

    def target_distribution(self, history: History, proposal: Proposal, position: int) -> Dense:
        """Return the distribution without the parameter where it is omitted."""
        pair = WHOLE if self.omits(position, proposal) else self.pair
        return pair.target((*history, *proposal.tokens[:position]))

    def omits(self, position: int, proposal: Proposal) -> bool:
        """Return whether the parameter is omitted at a position."""
        return position < len(proposal)


@dataclass(frozen=True)
class NucleusOnBonusOnly(ParameterOnBonusOnly):
    """Applies top_p to the bonus only."""

    pair: Pair = CUT
    total_variation: float = 0.4738


@dataclass(frozen=True)
class TemperatureOnBonusOnly(ParameterOnBonusOnly):
    """Applies the temperature to the bonus only."""

    pair: Pair = SHARPENED
    total_variation: float = 0.3204


@dataclass(frozen=True)
class TemperatureNotOnBonus(TemperatureOnBonusOnly):
    """Applies the temperature everywhere but to the bonus."""

    total_variation: float = 0.0459

    def omits(self, position: int, proposal: Proposal) -> bool:
        """Return whether the parameter is omitted at a position."""
        return position == len(proposal)


def penalised_target(text: History, last: int) -> Dense:
    """Return the target's distribution after a token; the more often the text has a token, the less probable it is."""
    return dense(*(Fraction(weight, 1 + text.count(token)) for token, weight in enumerate(TARGETS[last])))


PENALISED = replace(WHOLE, target=lambda history: penalised_target(history, history[-1]), memory=None)


@dataclass(frozen=True)
class PenaltiesBlindToDrafts(Mutant):
    """Counts only committed tokens: after a draft token the penalties are those of a text without it."""

    pair: Pair = PENALISED
    total_variation: float = 0.1260

    def target_distribution(self, history: History, proposal: Proposal, position: int) -> Dense:
        """Return the distribution with the penalties of the committed text."""
        return penalised_target(history, (*history, *proposal.tokens[:position])[-1])
