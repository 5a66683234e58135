"""From a head's logits to candidates, or to the distributions that draft tokens are drawn from.

A reduced vocabulary is mapped to the target's. Sampling parameters apply as for every drafter; only where a session has
a grammar, penalties or biases, which name the target's tokens, are its logits scattered to the whole vocabulary first.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.engine.rows import likely_winners
from specdec.exact.race import Race
from specdec.exact.sampling import NEUTRAL, SamplingContext, draft_distributions, for_draft, next_token_distributions
from specdec.exact.values import SparseDistribution
from specdec.heads.vocabulary import DraftVocabulary
from specdec.types import SamplingParams

Ranking = tuple[list[list[int]], list[list[float]]]
"""For each row the most probable tokens, best first, and their probabilities; NaN where logits were not finite."""


class Predictions:
    """Reads a head's logits [N, draft_vocab_size]."""

    def __init__(self, vocabulary: DraftVocabulary, vocab_size: int, support_mass: float, support_max: int) -> None:
        """`vocab_size` is the end of the target's real vocabulary; ids past it are padding."""
        self._target_ids = vocabulary.target_ids if vocabulary.is_reduced else None
        self._vocab_size = vocab_size
        self._support_mass, self._support_max = support_mass, support_max
        is_padding = vocabulary.target_ids >= vocab_size
        self._padding = is_padding if self._target_ids is not None and bool(is_padding.any()) else None
        self._to_target: list[int] | None = None if self._target_ids is None else self._target_ids.tolist()

    def ranked(
        self,
        logits: torch.Tensor,
        contexts: Sequence[SamplingContext],
        num_tokens: int,
        races: Sequence[Race | None],
    ) -> Ranking:
        """Return each row's most probable tokens, in a race those that most likely win it.

        The contexts hold `ranking_params`.
        """
        logits, contexts, is_scattered = self._prepared(logits, contexts)
        if all(context.sampling is NEUTRAL and context.allowed is None for context in contexts):
            rows = logits.softmax(dim=-1)
        else:
            rows = next_token_distributions(logits, for_draft(logits, contexts), logits.shape[-1])
        probs, ids = rows.topk(min(num_tokens, rows.shape[-1]), dim=-1)
        names, chances = [self._named(row, is_scattered) for row in ids.tolist()], probs.tolist()
        if raced := [index for index, race in enumerate(races) if race]:
            own = rows if len(raced) == len(rows) else rows[raced]
            found = likely_winners(
                own, [race for race in races if race], num_tokens, None if is_scattered else self._target_ids
            )
            for index, tokens, their_chances in zip(raced, *found, strict=True):
                names[index], chances[index] = tokens, their_chances
        return names, chances

    def distributions(self, logits: torch.Tensor, contexts: Sequence[SamplingContext]) -> list[SparseDistribution]:
        """Return what to draw each row's token from, and to ship; empty where logits were not finite."""
        logits, contexts, is_scattered = self._prepared(logits, contexts)
        found = draft_distributions(logits, contexts, logits.shape[-1], self._support_mass, self._support_max)
        if is_scattered or self._to_target is None:
            return found
        return [SparseDistribution(tuple(self._named(row.token_ids, False)), row.probs) for row in found]

    def _prepared(
        self, logits: torch.Tensor, contexts: Sequence[SamplingContext]
    ) -> tuple[torch.Tensor, Sequence[SamplingContext], bool]:
        """Return float32 logits without padding; scattered to the target's vocabulary where a session needs that."""
        logits = logits.float()
        if self._target_ids is None:
            return logits[:, : self._vocab_size], contexts, False
        if self._padding is not None:
            logits = logits.masked_fill(self._padding, -torch.inf)
        if not any(context.changes_logits for context in contexts):
            return logits, contexts, False
        size = max(self._vocab_size, int(self._target_ids.max()) + 1)
        whole = logits.new_full((len(logits), size), -torch.inf)
        whole[:, self._target_ids] = logits
        return whole[:, : self._vocab_size], contexts, True

    def _named(self, ids: Sequence[int], is_scattered: bool) -> list[int]:
        if is_scattered or self._to_target is None:
            return list(ids)
        return [self._to_target[token] for token in ids]


def ranking_params(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters by which candidates are ranked; at temperature 0 that is as at temperature 1."""
    plain = replace(
        NEUTRAL,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
    )
    if sampling.temperature:
        plain = replace(
            plain, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
        )
    return NEUTRAL if plain == NEUTRAL else plain
