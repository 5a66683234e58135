"""Planted mistakes: each does one thing that breaks exactness, and tests/test_mutants.py must reject it.

Most are enumerated: a subclass of Enumeration whose text distribution is exact too, only not the target's.
`total_variation` is how far off it is on the pair below (three tokens of a Markov chain over four, K = 2), to four
digits; the test holds it to that. A joint chi-square over 20,000 generations sees 0.02 to 0.03 and no less, so some of
these only enumeration sees. The others live in the real loop: keys, rows and what is shipped.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, chain, product

import numpy as np
import torch

from coordinator.acceptance import accept, accepts, choose, recover
from coordinator.draft import Drafted
from coordinator.draft_length import Costs, DraftLength
from specdec.exact import randomness
from specdec.exact.randomness import Key, Purpose
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms, Verdict
from specdec.types import TokenOrigin
from tests.support.distributions import Enumeration, History, Pair, midpoints, turns
from tests.support.toys import DRAFT_S, ToyDrafter, ToyScorer

Dense = Sequence[Fraction]

TARGETS = [[6, 1, 3, 2], [1, 4, 2, 5], [2, 2, 5, 1], [4, 3, 1, 1]]
DRAFTS = [[2, 4, 3, 1], [4, 2, 1, 3], [1, 5, 2, 2], [3, 1, 1, 5]]


def distribution(weights: Sequence[Fraction | int]) -> Dense:
    """Return weights over their sum."""
    return [Fraction(weight) / sum(weights) for weight in weights]


def row_of(weights: Sequence[int], size: int) -> SparseDistribution:
    """Return a distribution's `size` most probable tokens as a row."""
    ids = sorted(range(len(weights)), key=lambda token: -weights[token])[:size]
    return SparseDistribution(tuple(ids), tuple(distribution([weights[token] for token in ids])))


def markov(targets: Sequence[Sequence[int]], size: int) -> Pair:
    """Return a Markov pair with supports of `size`."""
    rows = [row_of(weights, size) for weights in DRAFTS]
    return Pair(lambda history: distribution(targets[history[-1]]), lambda history: rows[history[-1]])


WHOLE = markov(TARGETS, 4)  # supports of the whole vocabulary
SPARSE = markov(TARGETS, 3)  # with a tail


@dataclass(frozen=True)
class Mutant(Enumeration):
    """An enumerated mistake."""

    pair: Pair = WHOLE
    total_variation: float = 0.0


# ---- the rule


@dataclass(frozen=True)
class AcceptsAll(Mutant):
    """Keeps every draft token (transformers 28508: a faulty count of the matches)."""

    total_variation: float = 0.5215

    def rule(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Test nothing."""
        return Verdict(len(proposal), scores.rows[-1].tail_token, TokenOrigin.BONUS)


@dataclass(frozen=True)
class RecoversFromTarget(Mutant):
    """Draws the recovered token from p instead of the residual, so what q favours comes twice."""

    pair: Pair = SPARSE
    total_variation: float = 0.2311

    def rule(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Close with other weights."""
        return close_with(self.closing_weights, proposal, scores, uniforms)

    def closing_weights(self, row: SparseDistribution, target: TargetDistribution) -> Dense:
        """Return p."""
        return [*target.support_probs, target.tail_mass]


@dataclass(frozen=True)
class SoftmaxOverResidual(RecoversFromTarget):
    """Normalises the residual by softmax (transformers 28508): tokens that are owed nothing come back."""

    total_variation: float = 0.2718

    def closing_weights(self, row: SparseDistribution, target: TargetDistribution) -> Dense:
        """Return exp(max(0, p - q))."""
        return [Fraction(math.exp(weight)) for weight in Enumeration.closing_weights(self, row, target)]


@dataclass(frozen=True)
class ClosesWithoutTail(RecoversFromTarget):
    """Forgets that the residual has weight outside the draft's support."""

    total_variation: float = 0.3813

    def closing_weights(self, row: SparseDistribution, target: TargetDistribution) -> Dense:
        """Return the residual on the support, or p there if that is empty."""
        inside = Enumeration.closing_weights(self, row, target)[:-1]
        return [*(inside if any(inside) else target.support_probs), Fraction(0)]


@dataclass(frozen=True)
class TailIsOneMinusSum(RecoversFromTarget):
    """Takes the tail's weight as what the draft's residual left, 1 - sum of max(0, p - q), not as the target's mass."""

    total_variation: float = 0.2339

    def closing_weights(self, row: SparseDistribution, target: TargetDistribution) -> Dense:
        """Return the residual on the support, and the wrong tail."""
        inside = Enumeration.closing_weights(self, row, target)[:-1]
        return [*inside, 1 - sum(inside, Fraction(0))]


def close_with(
    weigh: Callable[[SparseDistribution, TargetDistribution], Dense],
    proposal: Proposal,
    scores: Scores,
    uniforms: Uniforms,
) -> Verdict:
    """Play the production rule, but draw a recovered token by other weights."""
    verdict = accept(proposal, scores, uniforms)
    if verdict.next_origin is TokenOrigin.BONUS:
        return verdict
    row, target = proposal.rows[verdict.num_accepted], scores.rows[verdict.num_accepted]
    position = choose(weigh(row, target), uniforms.close)
    return replace(verdict, next_token=[*row.token_ids, target.tail_token][position])


@dataclass(frozen=True)
class BonusAlways(Mutant):
    """Closes every round from row K, "whether or not all K were accepted" (a common misprint)."""

    total_variation: float = 0.2661

    def rule(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Put the bonus token behind whatever was accepted."""
        verdict = accept(proposal, scores, uniforms)
        return replace(verdict, next_token=scores.rows[-1].tail_token)


@dataclass(frozen=True)
class AcceptsOffTheSupport(Mutant):
    """Draws from the whole row, ships its support, and accepts what lies outside because u * 0 < p."""

    pair: Pair = SPARSE
    total_variation: float = 0.1362

    def proposals(self, history: History, num_draft_tokens: int) -> Iterator[tuple[Proposal, Fraction]]:
        """Draw from the row that was not truncated."""
        for proposal, chance in Enumeration(WHOLE).proposals(history, num_draft_tokens):
            yield Proposal(proposal.tokens, shipped(self.pair, history, proposal)), chance

    def acceptance_turns(self, proposal: Proposal, scores: Scores, index: int) -> list[Fraction]:
        """Off the support nothing turns."""
        inside = proposal.tokens[index] in proposal.rows[index].token_ids
        return super().acceptance_turns(proposal, scores, index) if inside else []

    def rule(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Take a token that its row does not know as one with q = 0."""
        for index, (token, row) in enumerate(zip(proposal.tokens, proposal.rows, strict=True)):
            target = scores.rows[index]
            if token in row.token_ids and not accepts(token, row, target, uniforms.accept[index]):
                return Verdict(index, recover(row, target, uniforms.close), TokenOrigin.RECOVERED)
        return Verdict(len(proposal), scores.rows[-1].tail_token, TokenOrigin.BONUS)


def shipped(pair: Pair, history: History, proposal: Proposal) -> tuple[SparseDistribution, ...]:
    """Return the pair's own rows along a proposal."""
    return tuple(pair.draft((*history, *proposal.tokens[:index])) for index in range(len(proposal)))


def accept_inclusively(proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
    """Test u q <= p: at u = 0 a token that the target rules out passes. Total variation 0, and one token in 2**53."""
    for index, (token, row) in enumerate(zip(proposal.tokens, proposal.rows, strict=True)):
        target, position = scores.rows[index], row.token_ids.index(token)
        if not uniforms.accept[index] * row.probs[position] <= target.support_probs[position]:
            return Verdict(index, recover(row, target, uniforms.close), TokenOrigin.RECOVERED)
    return Verdict(len(proposal), scores.rows[-1].tail_token, TokenOrigin.BONUS)


# ---- uniforms and keys


@dataclass(frozen=True)
class OneUniformForAll(Mutant):
    """Tests all K tokens and closes with the same uniform: what survived one test is likelier to survive the next."""

    total_variation: float = 0.1237

    def uniforms(self, proposal: Proposal, scores: Scores) -> Iterator[tuple[Uniforms, Fraction]]:
        """Yield the one uniform of the round."""
        all_turns = [self.acceptance_turns(proposal, scores, index) for index in range(len(proposal))]
        for uniform, length in midpoints([*chain(*all_turns), *self.closing_turns(proposal, scores)]):
            yield Uniforms((uniform,) * len(proposal), uniform), length


@dataclass(frozen=True)
class OneUniformForAllTests(Mutant):
    """Tests all K tokens with the same uniform; the closing token has its own. First tokens keep their distribution."""

    total_variation: float = 0.0567

    def uniforms(self, proposal: Proposal, scores: Scores) -> Iterator[tuple[Uniforms, Fraction]]:
        """Yield a uniform for the tests, and one for the close."""
        all_turns = [self.acceptance_turns(proposal, scores, index) for index in range(len(proposal))]
        closes = midpoints(self.closing_turns(proposal, scores))
        for (uniform, length), (close, weight) in product(midpoints([*chain(*all_turns)]), closes):
            yield Uniforms((uniform,) * len(proposal), close), length * weight


@dataclass(frozen=True)
class CloseSharesAccept(Mutant):
    """Closes with the uniform that the first token was tested with: two purposes share a key."""

    total_variation: float = 0.0964

    def uniforms(self, proposal: Proposal, scores: Scores) -> Iterator[tuple[Uniforms, Fraction]]:
        """Yield the tests' uniforms; the first also closes."""
        all_turns = [self.acceptance_turns(proposal, scores, index) for index in range(len(proposal))]
        all_turns[0] = [*all_turns[0], *self.closing_turns(proposal, scores)]
        for choice in product(*map(midpoints, all_turns)):
            uniforms = tuple(uniform for uniform, _ in choice)
            yield Uniforms(uniforms, uniforms[0]), math.prod(length for _, length in choice)


@dataclass(frozen=True)
class AcceptSharesDraft(Mutant):
    """Tests a token with the uniform that it was drawn with: large ones draw the row's last tokens and reject them."""

    total_variation: float = 0.2675

    def plays(self, history: History, num_draft_tokens: int) -> Iterator[tuple[Proposal, Scores, Uniforms, Fraction]]:
        """Yield, for each proposal, uniforms only from the stretches that draw it."""
        for proposal, _ in self.proposals(history, num_draft_tokens):
            scores = self.scores(history, proposal)
            stretches = [self.stretch(proposal, scores, index) for index in range(len(proposal))]
            for *tests, (close, weight) in product(*stretches, midpoints(self.closing_turns(proposal, scores))):
                uniforms = Uniforms(tuple(uniform for uniform, _ in tests), close)
                yield proposal, scores, uniforms, weight * math.prod(length for _, length in tests)

    def stretch(self, proposal: Proposal, scores: Scores, index: int) -> list[tuple[Fraction, Fraction]]:
        """Return the parts of [0, 1) that draw the token."""
        row, token = proposal.rows[index], proposal.tokens[index]
        parts = midpoints([*turns(row.probs), *self.acceptance_turns(proposal, scores, index)])
        return [(uniform, length) for uniform, length in parts if row.token_ids[choose(row.probs, uniform)] == token]


@dataclass(frozen=True)
class CloseSharesDraft(AcceptSharesDraft):
    """Recovers with the first token's draft noise (vLLM 47386)."""

    total_variation: float = 0.1185

    def plays(self, history: History, num_draft_tokens: int) -> Iterator[tuple[Proposal, Scores, Uniforms, Fraction]]:
        """Yield, for each proposal, closing uniforms only from the stretch that draws its first token."""
        for proposal, chance in self.proposals(history, num_draft_tokens):
            scores, row = self.scores(history, proposal), proposal.rows[0]
            first_token = row.probs[row.token_ids.index(proposal.tokens[0])]
            tests = [midpoints(self.acceptance_turns(proposal, scores, index)) for index in range(len(proposal))]
            for *choice, (close, length) in product(*tests, self.stretch(proposal, scores, 0)):
                weight = math.prod((part for _, part in choice), start=chance * length / first_token)
                yield proposal, scores, Uniforms(tuple(uniform for uniform, _ in choice), close), weight

    def acceptance_turns(self, proposal: Proposal, scores: Scores, index: int) -> list[Fraction]:
        """Turn for the closing token as well."""
        return [*super().acceptance_turns(proposal, scores, index), *self.closing_turns(proposal, scores)]


# ---- the drafter


@dataclass(frozen=True)
class ShipsAnotherRow(Mutant):
    """Draws at temperature 1/2 and ships the row of temperature 1."""

    total_variation: float = 0.1185

    def proposals(self, history: History, num_draft_tokens: int) -> Iterator[tuple[Proposal, Fraction]]:
        """Draw from another row."""
        pair = replace(self.pair, draft=lambda text: self.drawn_from(self.pair.draft(text)))
        for proposal, chance in Enumeration(pair).proposals(history, num_draft_tokens):
            yield Proposal(proposal.tokens, shipped(self.pair, history, proposal)), chance

    def drawn_from(self, row: SparseDistribution) -> SparseDistribution:
        """Return the row that is drawn from."""
        return SparseDistribution(row.token_ids, distribution([prob**2 for prob in row.probs]))


@dataclass(frozen=True)
class ArgmaxDrafts(ShipsAnotherRow):
    """Drafts the most probable token and ships the softmax row."""

    total_variation: float = 0.5139

    def drawn_from(self, row: SparseDistribution) -> SparseDistribution:
        """Return the most probable token."""
        best = row.probs.index(max(row.probs))
        return SparseDistribution(row.token_ids, [Fraction(int(index == best)) for index in range(len(row.probs))])


@dataclass(frozen=True)
class RoundsAfterDrawing(ShipsAnotherRow):
    """Draws in one number format and ships another, here bfloat16 (DeepSpec 31): too little for any chi-square."""

    total_variation: float = 0.0009

    def proposals(self, history: History, num_draft_tokens: int) -> Iterator[tuple[Proposal, Fraction]]:
        """Ship the rounded rows."""
        for proposal, chance in Enumeration(self.pair).proposals(history, num_draft_tokens):
            yield Proposal(proposal.tokens, tuple(map(self.ship, proposal.rows))), chance

    def ship(self, row: SparseDistribution) -> SparseDistribution:
        """Return the row that is shipped."""
        return rounded(row, torch.bfloat16)


@dataclass(frozen=True)
class RoundsToHalf(RoundsAfterDrawing):
    """Draws, and then rounds the row to float16."""

    total_variation: float = 0.0001

    def ship(self, row: SparseDistribution) -> SparseDistribution:
        """Return the row that is shipped."""
        return rounded(row, torch.float16)


def rounded(row: SparseDistribution, dtype: torch.dtype) -> SparseDistribution:
    """Return a row in another number format."""
    probs = torch.tensor([float(prob) for prob in row.probs]).to(dtype).double()
    return SparseDistribution(row.token_ids, tuple(map(Fraction, probs.tolist())))


@dataclass(frozen=True)
class LosesMass(RoundsAfterDrawing):
    """Ships rows that lost 1 % of their mass, for want of renormalising after a truncation."""

    total_variation: float = 0.0044

    def ship(self, row: SparseDistribution) -> SparseDistribution:
        """Return the row that is shipped."""
        return SparseDistribution(row.token_ids, tuple(prob * Fraction(99, 100) for prob in row.probs))


@dataclass(frozen=True)
class DiscardsUnlikely(Mutant):
    """Draws a token, sees that it is unlikely, and ends the proposal before it: the bonus is p where it must not be."""

    total_variation: float = 0.1939

    def proposals(self, history: History, num_draft_tokens: int) -> Iterator[tuple[Proposal, Fraction]]:
        """Cut proposals before the first token of probability below a third."""
        for proposal, chance in Enumeration(self.pair).proposals(history, num_draft_tokens):
            steps = zip(proposal.tokens, proposal.rows, strict=True)
            sure = [row.probs[row.token_ids.index(token)] >= Fraction(1, 3) for token, row in steps]
            size = (*sure, False).index(False)
            yield Proposal(proposal.tokens[:size], proposal.rows[:size]), chance


@dataclass(frozen=True)
class StopsBeforeUnsure(Mutant):
    """No mistake: ends the proposal before *drawing* from a row that is unsure. Must pass where the one above fails."""

    def proposals(self, history: History, num_draft_tokens: int) -> Iterator[tuple[Proposal, Fraction]]:
        """Draw only from rows with a token of more than a half."""
        sure = max(self.pair.draft(history).probs) >= Fraction(1, 2)
        if not sure or not num_draft_tokens:
            yield Proposal(), Fraction(1)
            return
        row = self.pair.draft(history)
        for token, chance in zip(row.token_ids, row.probs, strict=True):
            for rest, weight in self.proposals((*history, token), num_draft_tokens - 1):
                yield Proposal((token, *rest.tokens), (row, *rest.rows)), chance * weight


@dataclass(frozen=True)
class DropsRows(Mutant):
    """No mistake: draws from a row and ships the token as certain (vLLM 40149). Exact, only fewer are accepted."""

    def proposals(self, history: History, num_draft_tokens: int) -> Iterator[tuple[Proposal, Fraction]]:
        """Ship one-hot rows."""
        for proposal, chance in Enumeration(self.pair).proposals(history, num_draft_tokens):
            yield (
                Proposal(
                    proposal.tokens, tuple(SparseDistribution((token,), (Fraction(1),)) for token in proposal.tokens)
                ),
                chance,
            )


# ---- the scorer


@dataclass(frozen=True)
class BonusFromRowBefore(Mutant):
    """Draws the bonus from row K - 1: off by one where the last draft token was read."""

    total_variation: float = 0.1043

    def target_distribution(self, history: History, proposal: Proposal, index: int) -> Dense:
        """Return the distribution one position too early, for the bonus only."""
        return super().target_distribution(history, proposal, index - 1 if 0 < index == len(proposal) else index)


@dataclass(frozen=True)
class TailFromWholeRow(Mutant):
    """Draws the tail token from the whole row instead of the complement of the support."""

    pair: Pair = SPARSE
    total_variation: float = 0.3036

    def tail_distribution(self, history: History, proposal: Proposal, index: int) -> dict[int, Fraction]:
        """Return the whole row."""
        return dict(enumerate(self.target_distribution(history, proposal, index)))


def tempered(dense: Dense) -> Dense:
    """Return a distribution at temperature 1/2."""
    return distribution([prob**2 for prob in dense])


def nucleus(dense: Dense) -> Dense:
    """Return a distribution at top_p 3/4."""
    order = sorted(range(len(dense)), key=lambda token: -dense[token])
    before = dict(zip(order, accumulate((dense[token] for token in order), initial=Fraction(0)), strict=False))
    return distribution([prob if before[token] < Fraction(3, 4) else 0 for token, prob in enumerate(dense)])


def above_min_p(dense: Dense) -> Dense:
    """Return a distribution at min_p 3/10."""
    return distribution([prob if prob >= Fraction(3, 10) * max(dense) else 0 for prob in dense])


def asked(shape: Callable[[Dense], Dense]) -> Pair:
    """Return the pair whose target has the sampling parameter applied, as the user asked."""
    return replace(WHOLE, target=lambda history: shape(WHOLE.target(history)))


PEAKED, CUT, SHARPENED = asked(above_min_p), asked(nucleus), asked(tempered)


@dataclass(frozen=True)
class ParameterOnBonusOnly(Mutant):
    """Applies min_p to the bonus row and not to the rows that drafts are tested with (vLLM 42744)."""

    pair: Pair = PEAKED
    total_variation: float = 0.2432

    def target_distribution(self, history: History, proposal: Proposal, index: int) -> Dense:
        """Return the model's own distribution where the parameter is forgotten."""
        pair = WHOLE if self.forgets(index, proposal) else self.pair
        return pair.target((*history, *proposal.tokens[:index]))

    def forgets(self, index: int, proposal: Proposal) -> bool:
        """Say where."""
        return index < len(proposal)


@dataclass(frozen=True)
class NucleusOnBonusOnly(ParameterOnBonusOnly):
    """Applies top_p to the bonus row only."""

    pair: Pair = CUT
    total_variation: float = 0.4738


@dataclass(frozen=True)
class TemperatureOnBonusOnly(ParameterOnBonusOnly):
    """Applies the temperature to the bonus row only."""

    pair: Pair = SHARPENED
    total_variation: float = 0.3204


@dataclass(frozen=True)
class TemperatureNotOnBonus(TemperatureOnBonusOnly):
    """Applies the temperature to all rows but the bonus."""

    total_variation: float = 0.0459

    def forgets(self, index: int, proposal: Proposal) -> bool:
        """Say where."""
        return index == len(proposal)


def penalised_target(text: History, last: int) -> Dense:
    """Return the target's distribution behind a token, tokens of the text made rarer the oftener they came."""
    return distribution([Fraction(weight, 1 + text.count(token)) for token, weight in enumerate(TARGETS[last])])


PENALISED = replace(WHOLE, target=lambda history: penalised_target(history, history[-1]))


@dataclass(frozen=True)
class PenaltiesBlindToDrafts(Mutant):
    """Counts only committed tokens: behind a draft token the penalties are those of a text without it."""

    pair: Pair = PENALISED
    total_variation: float = 0.1260

    def target_distribution(self, history: History, proposal: Proposal, index: int) -> Dense:
        """Return the distribution with the penalties of the committed text."""
        return penalised_target(history, (*history, *proposal.tokens[:index])[-1])


# ---- the real loop


@dataclass(slots=True)
class AcceptKeyDrafter(ToyDrafter):
    """Draws with the keys of the tests (purposes DRAFT and ACCEPT share)."""

    def draw(self, row: SparseDistribution, committed_length: int, position: int) -> int:
        """Draw with the wrong purpose."""
        uniform = randomness.uniform(self.seed, Key(committed_length, position, Purpose.ACCEPT))
        return row.token_ids[choose(row.probs, uniform)]


@dataclass(slots=True)
class CloseKeyScorer(ToyScorer):
    """Draws tail tokens with the closing key (purposes CLOSE and TAIL share)."""

    def draws(self, committed_length: int, count: int) -> Sequence[float]:
        """Draw with the wrong purpose."""
        return randomness.uniforms(self.seed, committed_length, count, Purpose.CLOSE)


@dataclass(slots=True)
class ArgmaxDrafter(ToyDrafter):
    """Drafts the most probable token with its softmax row."""

    def draw(self, row: SparseDistribution, committed_length: int, position: int) -> int:
        """Draw nothing."""
        return row.token_ids[int(np.argmax(row.probs))]


@dataclass(slots=True)
class DiscardingDrafter(ToyDrafter):
    """Ends the proposal before a token that came out unlikely."""

    async def propose(self, committed: list[int], num_draft_tokens: int) -> Drafted:
        """Return fewer than were drawn."""
        proposal = (await ToyDrafter.propose(self, committed, num_draft_tokens)).proposal
        steps = zip(proposal.tokens, proposal.rows, strict=True)
        sure = [row.probs[row.token_ids.index(token)] >= 0.25 for token, row in steps]
        size = (*sure, False).index(False)
        return Drafted(Proposal(proposal.tokens[:size], proposal.rows[:size]), len(committed), DRAFT_S)


@dataclass(slots=True)
class EarlyBonusScorer(ToyScorer):
    """Answers the bonus from the row before."""

    def distributions(self, committed: History, proposal: Proposal) -> torch.Tensor:
        """Return K + 1 distributions, the last one position too early."""
        distributions = ToyScorer.distributions(self, committed, proposal)
        return torch.cat([distributions[:-1], distributions[-2:-1]]) if len(proposal) else distributions


@dataclass(slots=True)
class WholeTailScorer(ToyScorer):
    """Draws tail tokens from the whole row."""

    def tails(self, distributions: torch.Tensor, supports: list[list[int]]) -> torch.Tensor:
        """Return the whole distributions."""
        return distributions


def by_position(key: Key) -> Key:
    """Return the key of an absolute position: what a rejected draft was drawn with comes again.

    Looks natural, and is exact as long as nothing depends on rejected tokens; see LengthFromRejected.
    """
    return Key(0, key.committed_length + key.position, key.purpose)


@dataclass(slots=True)
class LengthFromRejected(DraftLength):
    """Chooses K from the tokens of the last proposal, rejected ones too. Exact, unless keys come again."""

    last: Proposal = field(default_factory=Proposal)

    def choose(self, room: int) -> int:
        """Return K: none behind a proposal whose second token came out unlikely."""
        steps = list(zip(self.last.tokens, self.last.rows, strict=True))
        unlikely = any(row.probs[row.token_ids.index(token)] < 0.4 for token, row in steps[1:2])
        return min(0 if unlikely else 3, max(room - 1, 0))


@dataclass(slots=True)
class RememberingDrafter(ToyDrafter):
    """Tells LengthFromRejected what it drafted."""

    draft_length: LengthFromRejected = field(default_factory=lambda: LengthFromRejected(Costs(), 3))

    async def propose(self, committed: list[int], num_draft_tokens: int) -> Drafted:
        """Draft, and tell."""
        drafted = await ToyDrafter.propose(self, committed, num_draft_tokens)
        self.draft_length.last = drafted.proposal
        return drafted
