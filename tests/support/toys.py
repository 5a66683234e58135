"""Toys with known distributions: Markov draft and target over a handful of tokens, driven through the production loop.

They use the production sampling code, rows, keys and supports; only the models are matrices.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch

from coordinator import generation as generation_module
from coordinator.draft import Drafted
from coordinator.draft_length import DraftLength
from coordinator.generation import Generation, Limits, Round
from coordinator.rounds import run_rounds
from coordinator.target import Scored
from specdec.exact import randomness
from specdec.exact.randomness import Key, Purpose
from specdec.exact.sampling import SamplingContext, draw, draw_dense, next_token_distributions, sparse_distributions
from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution
from specdec.types import SamplingParams

VOCAB_SIZE = 5
NUM_TOKENS = 4
MAX_DRAFT_TOKENS = 5  # for automatic K
DRAFT_S, SCORE_S = 0.01, 0.05  # what a draft token and a score are said to cost: K = 3 is best at the prior rate
PROMPT = (0, 1, 4, 2, 1, 3, 0)  # each token has followed another, so that n-gram drafts never run dry

History = tuple[int, ...]
Answer = tuple[
    list[list[float]], torch.Tensor
]  # target probabilities on the supports, distributions outside them [K + 1, V]


def markov_logits(seed: int, size: int = VOCAB_SIZE, scale: float = 1.5) -> torch.Tensor:
    """Return logits [V, V] of a Markov chain: row t is the distribution after token t."""
    return torch.tensor(np.random.default_rng(seed).normal(0, scale, (size, size)), dtype=torch.float32)


@dataclass(slots=True)
class ToyModel:
    """A Markov chain under sampling parameters; a distribution is computed once for each history (for penalties)."""

    logits: torch.Tensor  # [V, V]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    support_mass: float = 1.0
    support_max: int = VOCAB_SIZE
    prompt: History = PROMPT
    _distributions: dict[History, torch.Tensor] = field(default_factory=dict)
    _rows: dict[History, SparseDistribution] = field(default_factory=dict)
    answers: dict[Hashable, Answer] = field(default_factory=dict)

    def distribution(self, history: History) -> torch.Tensor:
        """Return the next-token distribution [V] after a history."""
        if history not in self._distributions:
            num_prompt = len(self.prompt)
            context = SamplingContext(self.sampling, history[:num_prompt], history[num_prompt:])
            logits = self.logits[history[-1]][None]
            self._distributions[history] = next_token_distributions(logits, [context], logits.shape[-1])[0]
        return self._distributions[history]

    def row(self, history: History) -> SparseDistribution:
        """Return the distribution as a draft's row."""
        if history not in self._rows:
            self._rows[history] = sparse_distributions(
                self.distribution(history)[None], self.support_mass, self.support_max
            )[0]
        return self._rows[history]


@dataclass(slots=True)
class ToyDrafter:
    """Drafts from a toy model."""

    model: ToyModel
    seed: int

    async def propose(self, committed: list[int], num_draft_tokens: int) -> Drafted:
        """Return K tokens, each with its row."""
        tokens: History = ()
        rows: tuple[SparseDistribution, ...] = ()
        for position in range(num_draft_tokens):
            row = self.model.row((*committed, *tokens))
            tokens += (self.draw(row, len(committed), position),)
            rows += (row,)
        return Drafted(Proposal(tokens, rows), len(committed), DRAFT_S * num_draft_tokens)

    def draw(self, row: SparseDistribution, committed_length: int, position: int) -> int:
        """Draw a token of the proposal."""
        return draw(row, randomness.uniform(self.seed, Key(committed_length, position, Purpose.DRAFT)))

    def keep(self, num_tokens: int, cached_len: int) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class RepeatingDrafter(ToyDrafter):
    """Drafts as n-gram lookup does: the token that last followed the last one, for certain; else nothing."""

    async def propose(self, committed: list[int], num_draft_tokens: int) -> Drafted:
        """Return at most K tokens with one-hot rows."""
        tokens: History = ()
        while len(tokens) < num_draft_tokens:
            follower = last_follower((*committed, *tokens))
            if follower is None:
                break
            tokens += (follower,)
        return Drafted(
            Proposal(tokens, tuple(SparseDistribution((token,), (1.0,)) for token in tokens)), len(committed), DRAFT_S
        )


def last_follower(history: Sequence[int]) -> int | None:
    """Return the token behind the last earlier occurrence of the history's last token."""
    followers = [after for before, after in pairwise(history) if before == history[-1]]
    return followers[-1] if followers else None


@dataclass(slots=True)
class FlakyDrafter(ToyDrafter):
    """Drafts, but its worker is away at every second call, and at others from the second token on."""

    calls: int = 0

    async def propose(self, committed: list[int], num_draft_tokens: int) -> Drafted:
        """Return a proposal, a short one, or none."""
        self.calls += 1
        if (self.seed + self.calls) % 2:
            return Drafted()
        most = min(num_draft_tokens, 1) if self.seed % 3 == 0 else num_draft_tokens
        return await ToyDrafter.propose(self, committed, most)


@dataclass(slots=True)
class ToyScorer:
    """Scores with a toy model."""

    model: ToyModel
    seed: int

    async def score(self, committed: list[int], proposal: Proposal) -> Scored:
        """Return the K + 1 rows."""
        probs, outside = self.answer(tuple(committed), proposal)
        tokens, masses = draw_dense(outside, self.draws(len(committed), len(outside)))
        return Scored(Scores(tuple(map(TargetDistribution, probs, masses, tokens))), len(committed), SCORE_S)

    def answer(self, committed: History, proposal: Proposal) -> Answer:
        """Return what does not depend on the seed; remembered, since generations are many and histories few."""
        key = committed, proposal.tokens, tuple(row.token_ids for row in proposal.rows)
        if key not in self.model.answers:
            distributions = self.distributions(committed, proposal)
            supports = [list(row.token_ids) for row in proposal.rows] + [[]]
            probs = [
                distribution[support].tolist() for distribution, support in zip(distributions, supports, strict=True)
            ]
            self.model.answers[key] = probs, self.tails(distributions, supports)
        return self.model.answers[key]

    def distributions(self, committed: History, proposal: Proposal) -> torch.Tensor:
        """Return the target's distribution at each position [K + 1, V]."""
        ends = range(len(proposal) + 1)
        return torch.stack([self.model.distribution((*committed, *proposal.tokens[:end])) for end in ends])

    def tails(self, distributions: torch.Tensor, supports: list[list[int]]) -> torch.Tensor:
        """Return the distributions outside the supports [K + 1, V]."""
        outside = distributions.clone()
        for index, support in enumerate(supports):
            outside[index, support] = 0
        return outside

    def draws(self, committed_length: int, count: int) -> Sequence[float]:
        """Return the uniforms of the tail tokens."""
        return randomness.uniforms(self.seed, committed_length, count, Purpose.TAIL)

    def keep(self, num_tokens: int, cached_len: int) -> None:
        """Nothing is held."""


class NoText:
    """A detokenizer without text."""

    def push(self, token: int) -> str:
        """Return nothing."""
        return ""


def new_generation(model: ToyModel, seed: int, num_tokens: int) -> Generation:
    """Return a generation of exactly so many tokens."""
    limits = Limits(num_tokens, context_length=1000)
    return Generation(model.prompt, replace(model.sampling, seed=seed), limits, NoText())


class Play(NamedTuple):
    """A whole generation."""

    tokens: History
    num_drafted: int  # in the first round
    num_accepted: int  # in the first round


async def play(drafter: ToyDrafter, scorer: ToyScorer, draft_length: DraftLength, num_tokens: int = NUM_TOKENS) -> Play:
    """Generate through the production loop."""
    generation = new_generation(scorer.model, scorer.seed, num_tokens)
    rounds: list[Round] = []

    async def commit(played: Round) -> None:
        rounds.append(played)

    await run_rounds(generation, drafter, scorer, draft_length, commit)
    first = rounds[0].statistics
    tokens = tuple(entry.token for entry in generation.emitted)
    return Play(tokens, first.num_draft_tokens, first.num_accepted_tokens)


@dataclass
class Ledger:
    """Writes down every draw, under the key that it comes from."""

    draw: Callable[[int, Key], float] = randomness.uniform
    key_of: Callable[[Key], Key] = lambda key: key
    entries: list[tuple[int, Key]] = field(default_factory=list)

    def uniform(self, seed: int, key: Key) -> float:
        """Draw, and note it."""
        key = self.key_of(key)
        self.entries.append((seed, key))
        return self.draw(seed, key)

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> "Ledger":
        """Note every draw of the production code and the toys."""
        for module in (randomness, generation_module):
            monkeypatch.setattr(module, "uniform", self.uniform)
        return self


def random_distributions(num_rows: int, vocab_size: int = 1000) -> list[SparseDistribution]:
    """Return rows of every peakedness, as a draft worker makes them."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-1, 2, num_rows)[:, None]
    logits = torch.randn(num_rows, vocab_size, generator=generator) * scale
    return sparse_distributions(
        next_token_distributions(logits, [SamplingContext(SamplingParams())] * num_rows, vocab_size), 0.999, 64
    )


def num_redrawn(rows: Sequence[SparseDistribution], shipped: Sequence[SparseDistribution]) -> int:
    """Return how many draws come out otherwise when they are repeated from the shipped rows."""
    uniforms = [(row, other, at) for row, other in zip(rows, shipped, strict=True) for at in sharp_uniforms(row)]
    return sum(draw(row, at) != draw(other, at) for row, other, at in uniforms)


def sharp_uniforms(row: SparseDistribution) -> list[float]:
    """Return uniforms at random, and those nearest to where the draw turns."""
    turns = np.cumsum(np.asarray(row.probs, dtype=np.float64)) / np.sum(row.probs)
    near = [np.nextafter(turns, 0), turns, np.nextafter(turns, 1)]
    uniforms = [*np.concatenate(near).tolist(), *randomness.uniforms(3, 9, 5, Purpose.DRAFT)]
    return [at for at in uniforms if 0 <= at < 1]
