"""What a draft model's distribution says of the draft token that is drawn from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.rows import likely_winners
from specdec.exact.race import Race
from specdec.exact.sampling import in_one_copy
from specdec.exact.values import SparseDistribution

CONFIDENCE_EXPONENT = 0.35  # fitted on the demo pair, at temperatures 0 and 1: a draft is right more often than it says


class Rival(NamedTuple):
    """The token that most likely closes a round in which a draft token is the first to be rejected."""

    token: int
    share: float  # of the rounds that reach the draft token: those in which it is rejected and this one closes


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a draft's distribution says of a draft token that is drawn from it."""

    confidence: float  # the chance that the token is accepted
    tokens: tuple[int, ...]  # the likeliest two, best first
    share: float  # the chance that the second one closes the round instead of the first one

    def rival(self, token: int) -> Rival:
        """Return which token most likely takes the place of a drawn one."""
        return Rival(next((other for other in self.tokens if other != token), token), self.share)


def forecasts_of(logits: torch.Tensor) -> list[Forecast]:
    """Return what to expect of the next draft tokens, from logits [N, V] of tokens that are allowed.

    A draft's largest probability tells how sure it is, also where temperature 0 leaves its distribution one-hot (Li et
    al. 2024, "EAGLE-2", section 4: confidence and acceptance go together). Where the likeliest token is rejected, the
    second one takes its place as often as its part of the rest says.
    """
    logits = logits.float()
    norms = logits.logsumexp(dim=-1, keepdim=True)
    if logits.is_cuda:
        values, ids = logits.topk(min(2, logits.shape[-1]), dim=-1)
        logs, found = (part.tolist() for part in in_one_copy([values - norms, ids]))
        return [_forecast(tokens, row) for tokens, row in zip(found, logs, strict=True)]
    rows = zip(logits.numpy(), norms[:, 0].tolist(), strict=True)
    best = ((_best_two(row), row, norm) for row, norm in rows)
    return [_forecast(tokens, [float(row[token]) - norm for token in tokens]) for tokens, row, norm in best]


def _best_two(row: npt.NDArray[np.float32]) -> list[int]:
    """Return the places of the largest numbers; numpy's argmax takes a tenth of the time of torch's topk."""
    first = int(row.argmax())
    rest = [
        begin + int(part.argmax()) for begin, part in ((0, row[:first]), (first + 1, row[first + 1 :])) if len(part)
    ]
    return [first, max(rest, key=row.__getitem__)] if rest else [first]


def _forecast(tokens: Sequence[int], logs: Sequence[float]) -> Forecast:
    """Return what the largest log-probabilities say."""
    first, second = math.exp(logs[0]), math.exp(logs[-1])
    confidence = first**CONFIDENCE_EXPONENT
    share = (1 - confidence) * min(1.0, second / (1 - first)) if len(tokens) > 1 and first < 1 else 0.0
    return Forecast(confidence, tuple(tokens), share)


def forecast_of_race(distribution: SparseDistribution, race: Race) -> Forecast:
    """Return who most likely wins a race, and what is known of the second one."""
    count = min(2, len(distribution.token_ids))
    rows, names = torch.tensor([distribution.probs]), torch.tensor(distribution.token_ids)
    [tokens], [chances] = likely_winners(rows, [race], count, names)
    return Forecast(chances[0], tuple(tokens), chances[1] if count > 1 else 0.0)
