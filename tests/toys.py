"""Toys with known laws: Markov draft and target over a handful of tokens, driven through the production loop.

They use the production sampling code, rows, keys and supports; only the models are matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from coordinator.workers import Drafted, Scored
from specdec.randomness import Key, Purpose, uniform, uniforms
from specdec.sampling import RowContext, draw, draw_dense, next_token_rows, sparse_rows
from specdec.types import Proposal, Row, SamplingParams, Scores, TargetRow

VOCAB_SIZE = 5


def markov_logits(seed: int, size: int = VOCAB_SIZE, scale: float = 1.5) -> torch.Tensor:
    """Return logits [V, V] of a Markov chain: row t is the law after token t."""
    return torch.tensor(np.random.default_rng(seed).normal(0, scale, (size, size)), dtype=torch.float32)


def law_after(logits: torch.Tensor, history: Sequence[int], sampling: SamplingParams, num_prompt: int) -> torch.Tensor:
    """Return the next-token law [V] after a history, sampling parameters applied."""
    context = RowContext(sampling, history[:num_prompt], history[num_prompt:])
    return next_token_rows(logits[history[-1]][None], [context], logits.shape[-1])[0]


@dataclass(slots=True)
class ToyDrafter:
    """Drafts from a Markov chain."""

    logits: torch.Tensor
    sampling: SamplingParams
    num_prompt: int = 1
    support_mass: float = 1.0
    support_max: int = VOCAB_SIZE

    async def propose(self, committed: list[int], num_draft_tokens: int) -> Drafted:
        """Return K tokens, each with its row."""
        tokens: list[int] = []
        rows: list[Row] = []
        for position in range(num_draft_tokens):
            law = law_after(self.logits, [*committed, *tokens], self.sampling, self.num_prompt)
            row = sparse_rows(law[None], self.support_mass, self.support_max)[0]
            rows.append(row)
            tokens.append(draw(row, self._uniform(len(committed), position)))
        return Drafted(Proposal(tuple(tokens), tuple(rows)), len(committed))

    def keep(self, num_tokens: int, cached_len: int) -> None:
        """Nothing is held."""

    def _uniform(self, length: int, position: int) -> float:
        return uniform(self.sampling.seed or 0, Key(length, position, Purpose.DRAFT))


@dataclass(slots=True)
class ToyScorer:
    """Scores with a Markov chain."""

    logits: torch.Tensor
    sampling: SamplingParams
    num_prompt: int = 1

    async def score(self, committed: list[int], proposal: Proposal) -> Scored:
        """Return the K + 1 rows."""
        histories = [[*committed, *proposal.tokens[:index]] for index in range(len(proposal) + 1)]
        laws = torch.stack([law_after(self.logits, h, self.sampling, self.num_prompt) for h in histories])
        supports = [list(row.token_ids) for row in proposal.rows] + [[]]
        tails = laws.clone()
        for index, support in enumerate(supports):
            tails[index, support] = 0
        draws = uniforms(self.sampling.seed or 0, len(committed), len(supports), Purpose.TAIL)
        tokens, masses = draw_dense(tails, draws)
        rows = [
            TargetRow(law[support].tolist(), mass, token)
            for law, support, mass, token in zip(laws, supports, masses, tokens, strict=True)
        ]
        return Scored(Scores(tuple(rows)), len(committed), 0.0)

    def keep(self, num_tokens: int, cached_len: int) -> None:
        """Nothing is held."""


class NoText:
    """A detokenizer without text."""

    def push(self, token: int) -> str:
        """Return nothing."""
        return ""
