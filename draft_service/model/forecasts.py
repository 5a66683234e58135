"""What a draft model's distribution says of the draft token that is drawn from it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec.engine.rows import likely_winners
from specdec.exact.race import Race
from specdec.exact.values import SparseDistribution

CONFIDENCE_EXPONENT = 0.35  # fitted on the demo pair, at temperatures 0 and 1: a draft is right more often than it says
SMALLEST = 1e-9


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
    top = logits.topk(min(2, logits.shape[-1]), dim=-1)
    probs = (top.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
    confidence = probs[:, 0] ** CONFIDENCE_EXPONENT
    share = (1 - confidence) * probs[:, -1] / (1 - probs[:, 0]).clamp(min=SMALLEST)
    facts = zip(confidence.tolist(), top.indices.tolist(), share.clamp(max=1.0).tolist(), strict=True)
    return [Forecast(sure, tuple(tokens), rest) for sure, tokens, rest in facts]


def forecast_of_race(distribution: SparseDistribution, race: Race) -> Forecast:
    """Return who most likely wins a race, and what is known of the second one."""
    count = min(2, len(distribution.token_ids))
    rows, names = torch.tensor([distribution.probs]), torch.tensor(distribution.token_ids)
    [tokens], [chances] = likely_winners(rows, [race], count, names)
    return Forecast(chances[0], tuple(tokens), chances[1] if count > 1 else 0.0)
