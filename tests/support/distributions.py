"""Distributions, exact and sampled: the target's, the enumerated one of the production rule, and tests of samples.

Nothing here calls the production sampling code: a distribution that is to judge it must come from elsewhere.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, product
from math import prod

import numpy as np
import scipy.stats

from coordinator.acceptance import accept
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms, Verdict
from specdec.types import SamplingParams

History = tuple[int, ...]
Distribution = Mapping[History, Fraction]  # of texts


# ---- distributions by enumeration, in fractions


@dataclass(frozen=True, slots=True)
class Tail:
    """Stands for the tail token of a position; the production code passes it through, its distribution is filled in."""

    index: int


@dataclass(frozen=True)
class Pair:
    """A draft and a target with rational next-token distributions; the draft's are sparse."""

    target: Callable[[History], Sequence[Fraction]]  # dense, [V]
    draft: Callable[[History], SparseDistribution]


@dataclass(frozen=True)
class Enumeration:
    """One round of the design, enumerated over every draw; a mutant overrides the one thing that it gets wrong."""

    pair: Pair

    def rule(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Apply the production rule."""
        return accept(proposal, scores, uniforms)

    def plays(self, history: History, num_draft_tokens: int) -> Iterator[tuple[Proposal, Scores, Uniforms, Fraction]]:
        """Yield all that a round may draw, with its probability; together they are 1."""
        for proposal, chance in self.proposals(history, num_draft_tokens):
            scores = self.scores(history, proposal)
            for uniforms, weight in self.uniforms(proposal, scores):
                yield proposal, scores, uniforms, chance * weight

    def proposals(self, history: History, num_draft_tokens: int) -> Iterator[tuple[Proposal, Fraction]]:
        """Yield every proposal with its probability."""
        if not num_draft_tokens:
            yield Proposal(), Fraction(1)
            return
        row = self.pair.draft(history)
        for token, chance in zip(row.token_ids, row.probs, strict=True):
            for rest, weight in self.proposals((*history, token), num_draft_tokens - 1):
                yield Proposal((token, *rest.tokens), (row, *rest.rows)), chance * weight

    def scores(self, history: History, proposal: Proposal) -> Scores:
        """Return what the target says of a proposal, tail tokens as markers."""
        supports = [row.token_ids for row in proposal.rows] + [()]
        return Scores(tuple(self.scored(history, proposal, i, support) for i, support in enumerate(supports)))

    def scored(self, history: History, proposal: Proposal, index: int, support: Sequence[int]) -> TargetDistribution:
        """Return one row of the scores."""
        distribution = self.target_distribution(history, proposal, index)
        outside = sum(prob for token, prob in enumerate(distribution) if token not in support)
        return TargetDistribution([distribution[token] for token in support], outside, Tail(index))

    def target_distribution(self, history: History, proposal: Proposal, index: int) -> Sequence[Fraction]:
        """Return the target's distribution [V] at a position of the proposal."""
        return self.pair.target((*history, *proposal.tokens[:index]))

    def tail_distribution(self, history: History, proposal: Proposal, index: int) -> Distribution:
        """Return the distribution of a row's tail token: the target's, outside the draft's support."""
        support = proposal.rows[index].token_ids if index < len(proposal) else ()
        return normalised({
            token: prob
            for token, prob in enumerate(self.target_distribution(history, proposal, index))
            if token not in support and prob
        })  # fmt: skip

    def uniforms(self, proposal: Proposal, scores: Scores) -> Iterator[tuple[Uniforms, Fraction]]:
        """Yield a uniform for every stretch on which no decision changes, with the stretch's probability."""
        accepts = [midpoints(self.acceptance_turns(proposal, scores, index)) for index in range(len(proposal))]
        closes = midpoints(self.closing_turns(proposal, scores))
        for *accepting, (close, length) in product(*accepts, closes):
            weight = length * prod((size for _, size in accepting), start=Fraction(1))
            yield Uniforms(tuple(uniform for uniform, _ in accepting), close), weight

    def acceptance_turns(self, proposal: Proposal, scores: Scores, index: int) -> list[Fraction]:
        """Return where the verdict on a draft token turns: p / q."""
        row = proposal.rows[index]
        position = row.token_ids.index(proposal.tokens[index])
        return [Fraction(scores.rows[index].support_probs[position]) / row.probs[position]]

    def closing_turns(self, proposal: Proposal, scores: Scores) -> list[Fraction]:
        """Return where the recovered token turns, whichever position was rejected."""
        pairs = zip(proposal.rows, scores.rows, strict=False)
        return [turn for row, target in pairs for turn in turns(self.closing_weights(row, target))]

    def closing_weights(self, row: SparseDistribution, target: TargetDistribution) -> Sequence[Fraction]:
        """Return the residual on the support, and the tail."""
        probs = zip(target.support_probs, row.probs, strict=True)
        return [*(max(Fraction(0), target_prob - prob) for target_prob, prob in probs), target.tail_mass]

    def round_distribution(self, history: History, num_draft_tokens: int) -> Distribution:
        """Return the distribution of the text behind one round."""
        distribution: dict[History, Fraction] = defaultdict(Fraction)
        for proposal, scores, uniforms, chance in self.plays(history, num_draft_tokens):
            verdict = self.rule(proposal, scores, uniforms)
            accepted = (*history, *proposal.tokens[: verdict.num_accepted])
            for token, prob in self.closing(history, proposal, verdict).items():
                distribution[*accepted, token] += chance * prob
        return distribution

    def closing(self, history: History, proposal: Proposal, verdict: Verdict) -> Mapping[int, Fraction]:
        """Return the distribution of the token that closes a round."""
        token = verdict.next_token
        return (
            self.tail_distribution(history, proposal, token.index) if isinstance(token, Tail) else {token: Fraction(1)}
        )

    def text_distribution(
        self, prompt: History, num_tokens: int, num_draft_tokens: Callable[[History], int]
    ) -> Distribution:
        """Return the distribution of the first `num_tokens` tokens after the prompt, over as many rounds as needed."""
        rounds: dict[History, Distribution] = {}
        open_texts: dict[History, Fraction] = {prompt: Fraction(1)}
        distribution: dict[History, Fraction] = defaultdict(Fraction)
        while open_texts:
            history, chance = open_texts.popitem()
            if history not in rounds:
                rounds[history] = self.round_distribution(history, num_draft_tokens(history))
            for text, prob in rounds[history].items():
                whole = len(text) >= len(prompt) + num_tokens
                into, key = (distribution, text[len(prompt) :][:num_tokens]) if whole else (open_texts, text)
                into[key] = into.get(key, Fraction(0)) + chance * prob
        return {text: prob for text, prob in distribution.items() if prob}


EXTRA_EDGES = (Fraction(5, 8),)  # where nothing should change


def turns(weights: Sequence[Fraction]) -> list[Fraction]:
    """Return where a draw by these weights turns: their cumulative sums over the whole."""
    total = sum(weights)
    return [Fraction(at) / total for at in accumulate(weights)] if total else []


def midpoints(edges: Sequence[Fraction]) -> list[tuple[Fraction, Fraction]]:
    """Return the middle and the length of each stretch that edges leave of [0, 1)."""
    inside = {at for at in (*edges, *EXTRA_EDGES) if 0 < at < 1}
    bounds = sorted(inside | {Fraction(0), Fraction(1)})
    return [((low + high) / 2, high - low) for low, high in pairwise(bounds)]


def normalised(weights: Mapping[int, Fraction]) -> Mapping[int, Fraction]:
    """Divide by the sum."""
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def target_text_distribution(pair: Pair, prompt: History, num_tokens: int) -> Distribution:
    """Return the distribution that the text must have: plain decoding of the target."""
    distribution = {(): Fraction(1)}
    for _ in range(num_tokens):
        distribution = {
            (*text, token): chance * prob
            for text, chance in distribution.items()
            for token, prob in enumerate(pair.target((*prompt, *text)))
            if prob
        }
    return distribution


def total_variation(one: Distribution, other: Distribution) -> Fraction:
    """Return half the sum of the differences."""
    return sum((abs(one.get(text, 0) - other.get(text, 0)) for text in one.keys() | other.keys()), Fraction(0)) / 2


# ---- distributions of models, in floats


def reference_distribution(
    logits: np.ndarray, sampling: SamplingParams, prompt: History, completion: History
) -> np.ndarray:
    """Return a next-token distribution [V] in float64: the sampling parameters, written once more token by token."""
    scores = [float(logit) for logit in logits]
    scores = [score + sampling.logit_bias.get(token, 0.0) for token, score in enumerate(scores)]
    scores = [penalised(score, token, sampling, prompt, completion) for token, score in enumerate(scores)]
    if sampling.temperature == 0:
        return np.eye(len(scores))[scores.index(max(scores))]
    weights = np.exp((np.array(scores) - max(scores)) / sampling.temperature)
    kept = np.where(survivors(weights / weights.sum(), sampling), weights, 0.0)
    return kept / kept.sum()


def penalised(score: float, token: int, sampling: SamplingParams, prompt: History, completion: History) -> float:
    """Apply the repetition penalty to tokens seen at all, the other two to tokens of the completion."""
    if token in prompt or token in completion:
        score = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
    count = completion.count(token)
    return score - sampling.frequency_penalty * count - (sampling.presence_penalty if count else 0.0)


def survivors(probs: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Say which tokens top_k, then top_p, then min_p leave [V]."""
    order = [int(token) for token in np.argsort(-probs, kind="stable")]
    if sampling.top_k:
        order = [token for token in order if probs[token] >= probs[order[: sampling.top_k][-1]]]
    total = sum(probs[token] for token in order)
    before = [sum(probs[earlier] for earlier in order[:rank]) for rank in range(len(order))]
    nucleus = [token for token, mass in zip(order, before, strict=True) if mass < sampling.top_p * total]
    left = {token for token in nucleus if probs[token] >= sampling.min_p * probs[order[0]]}
    return np.array([token in left for token in range(len(probs))])


def joint_distribution(distribution_after: Callable[[History], np.ndarray], num_tokens: int) -> np.ndarray:
    """Return the distribution of the first tokens as an array [V] * num_tokens, from next-token distributions."""

    def distribution_behind(text: History) -> np.ndarray:
        distribution = np.asarray(distribution_after(text), dtype=np.float64)
        if len(text) == num_tokens - 1:
            return distribution
        rest = [distribution_behind((*text, token)) for token in range(len(distribution))]
        return np.stack(
            [prob * distribution_of_rest for prob, distribution_of_rest in zip(distribution, rest, strict=True)]
        )

    return distribution_behind(())


# ---- samples against distributions


@dataclass(frozen=True, slots=True)
class Agreement:
    """A joint chi-square test."""

    statistic: float
    num_cells: int  # after pooling
    p_value: float

    def __str__(self) -> str:
        return f"chi-square {self.statistic:.1f} over {self.num_cells} cells, p = {self.p_value:.2g}"


MIN_EXPECTED = 5.0  # Cochran's rule: rarer cells are pooled


def agreement(texts: Sequence[History], distribution: np.ndarray) -> Agreement:
    """Test that texts are drawn from a joint distribution [V] * num_tokens."""
    counts = Counter(texts)
    observed = np.array([counts[text] for text in np.ndindex(distribution.shape)], dtype=np.float64)
    expected = distribution.ravel() * len(texts)
    if observed[expected == 0].any() or observed.sum() != len(texts):
        return Agreement(np.inf, len(expected), 0.0)  # a text that the distribution rules out
    observed, expected = pooled(observed, expected)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return Agreement(statistic, len(expected), float(scipy.stats.chi2.sf(statistic, max(len(expected) - 1, 1))))


def pooled(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join the rarest cells until each expects enough."""
    order = np.argsort(expected)
    num_rare = int((expected < MIN_EXPECTED).sum())
    while num_rare and expected[order[:num_rare]].sum() < MIN_EXPECTED:
        num_rare += 1
    rare, rest = order[:num_rare], order[num_rare:]
    if not num_rare:
        return observed, expected
    return np.append(observed[rest], observed[rare].sum()), np.append(expected[rest], expected[rare].sum())


def standard_deviations(num_successes: int, num_trials: int, probability: float) -> float:
    """Return how far a count is from its mean, in its standard deviations."""
    spread = (num_trials * probability * (1 - probability)) ** 0.5
    distance = abs(num_successes - num_trials * probability)
    return distance / spread if spread else (0.0 if distance < 1e-6 * num_trials else np.inf)
