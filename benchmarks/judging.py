"""Distributions of models and of samples, in floats; enumeration.py has the exact ones.

Nothing here calls the production sampling code: the reference must be independent of it.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.types import SamplingParams

History = tuple[int, ...]
Floats = npt.NDArray[np.float64]

LETTERS = "abcdef"  # the tokens of the models that are judged
MATCHED_LETTERS = 6

# ---- distributions of models, in floats


def reference_distribution(
    logits: npt.NDArray[Any], sampling: SamplingParams, prompt: History, completion: History
) -> Floats:
    """Return a next-token distribution [V] in float64: the sampling parameters, written once more token by token."""
    scores = [float(logit) for logit in logits]
    scores = [score + sampling.logit_bias.get(token, 0.0) for token, score in enumerate(scores)]
    scores = [penalised(score, token, sampling, prompt, completion) for token, score in enumerate(scores)]
    # after a text that has probability 0 any distribution is right
    if sampling.regex and (allowed := letters_after(sampling.regex, completion)):
        scores = [score if token in allowed else -np.inf for token, score in enumerate(scores)]
    if sampling.temperature == 0:
        greedy: Floats = np.eye(len(scores))[scores.index(max(scores))]
        return greedy
    weights = np.exp((np.array(scores) - max(scores)) / sampling.temperature)
    kept = np.where(survivors(weights / weights.sum(), sampling), weights, 0.0)
    distribution: Floats = kept / kept.sum()
    return distribution


def penalised(score: float, token: int, sampling: SamplingParams, prompt: History, completion: History) -> float:
    """Apply the repetition penalty to tokens seen at all, the other two to tokens of the completion."""
    if token in prompt or token in completion:
        score = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
    count = completion.count(token)
    return score - sampling.frequency_penalty * count - (sampling.presence_penalty if count else 0.0)


@cache
def letters_after(regex: str, completion: History) -> frozenset[int]:
    """Return which letters, a token each, may follow in a text of MATCHED_LETTERS letters that matches."""
    place = len(completion)
    return frozenset(text[place] for text in matching_texts(regex) if text[:place] == completion)


@cache
def matching_texts(regex: str) -> list[History]:
    """Return the texts of MATCHED_LETTERS letters that a regular expression matches, by Python's own engine."""
    texts = product(range(len(LETTERS)), repeat=MATCHED_LETTERS)
    return [text for text in texts if re.fullmatch(regex, "".join(LETTERS[letter] for letter in text))]


def survivors(probs: Floats, sampling: SamplingParams) -> Floats:
    """Say which tokens top_k, then top_p, then min_p leave [V]."""
    order = [int(token) for token in np.argsort(-probs, kind="stable")]
    if sampling.top_k:
        order = [token for token in order if probs[token] >= probs[order[: sampling.top_k][-1]]]
    total = sum(probs[token] for token in order)
    before = [sum(probs[earlier] for earlier in order[:rank]) for rank in range(len(order))]
    nucleus = [token for token, mass in zip(order, before, strict=True) if mass < sampling.top_p * total]
    left = {token for token in nucleus if probs[token] >= sampling.min_p * probs[order[0]]}
    return np.array([token in left for token in range(len(probs))])


def joint_distribution(distribution_after: Callable[[History], Floats], num_tokens: int) -> Floats:
    """Return the distribution of the first tokens as an array [V] * num_tokens, from next-token distributions."""

    def continuation(text: History) -> Floats:
        distribution = np.asarray(distribution_after(text), dtype=np.float64)
        if len(text) == num_tokens - 1:
            return distribution
        rest = [continuation((*text, token)) for token in range(len(distribution))]
        return np.stack(
            [prob * distribution_of_rest for prob, distribution_of_rest in zip(distribution, rest, strict=True)]
        )

    return continuation(())


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


def agreement(texts: Sequence[History], distribution: Floats) -> Agreement:
    """Test that texts are drawn from a joint distribution [V] * num_tokens."""
    counts = Counter(texts)
    observed = np.array([counts[text] for text in np.ndindex(distribution.shape)], dtype=np.float64)
    if observed.sum() != len(texts):
        return Agreement(np.inf, observed.size, 0.0)  # a text of another length, or with a token out of range
    return agreement_of_counts(observed.reshape(distribution.shape), distribution)


def agreement_of_counts(counts: Floats, distribution: Floats) -> Agreement:
    """Test how often each text was seen, both [V] * num_tokens.

    Given what another distribution expects instead of counts, it says how surely the test would reject that one.
    """
    observed, expected = counts.ravel(), distribution.ravel() * counts.sum()
    if observed[expected == 0].any():
        return Agreement(np.inf, len(expected), 0.0)  # a text that the distribution rules out
    observed, expected = pooled(observed, expected)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return Agreement(statistic, len(expected), p_value_of(statistic, max(len(expected) - 1, 1)))


def p_value_of(statistic: float, num_degrees: int) -> float:
    """Return how likely a chi-square statistic of so many degrees of freedom is at least so large."""
    half, value = torch.tensor([num_degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half, value))


def pooled(observed: Floats, expected: Floats) -> tuple[Floats, Floats]:
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
