"""Ends rounds whose depths were predicted at once: a depth's distribution does not depend on the tokens before it."""

import math
from collections.abc import Sequence

import torch

from draft_service.heads.drafting.predictions import Predictions
from draft_service.heads.drafting.rounds import DrawnChain, HeadRound
from draft_service.heads.drafting.tree import MAX_CHILDREN, best_paths


def end_rounds(rounds: Sequence[HeadRound], logits: torch.Tensor, predictions: Predictions, draws: bool) -> None:
    """End each round from its logits [rounds, depths, draft_vocab_size]: with a drawn chain, or a chosen tree."""
    if draws:
        for one, rows in zip(rounds, logits.unbind(), strict=True):
            _end_drawn(one, rows, predictions)
    else:
        _end_chosen(rounds, logits, predictions)


def _end_chosen(rounds: Sequence[HeadRound], logits: torch.Tensor, predictions: Predictions) -> None:
    num_depths = logits.shape[1]
    width = min(MAX_CHILDREN, max(one.num_draft_tokens for one in rounds))
    contexts = [one.ranking() for one in rounds for _ in range(num_depths)]
    tokens, probs = predictions.ranked(logits.flatten(0, 1), contexts, width)
    for number, one in enumerate(rounds):
        own = slice(number * num_depths, (number + 1) * num_depths)
        if any(math.isnan(row[0]) for row in probs[own]):
            one.fail_not_finite()
        else:
            one.finish(best_paths(tokens[own], probs[own], one.num_draft_tokens))


def _end_drawn(one: HeadRound, logits: torch.Tensor, predictions: Predictions) -> None:
    """Draw a chain from logits [depths, draft_vocab_size]; penalties count the tokens drawn before."""
    chain = DrawnChain(one.session, one.request)
    logits = logits[: one.num_draft_tokens]
    together = [] if one.has_penalties else predictions.distributions(logits, [one.context()] * len(logits))
    for depth in range(len(logits)):
        if together:
            distribution = together[depth]
        else:
            (distribution,) = predictions.distributions(logits[depth : depth + 1], [one.context(chain.tokens)])
        if not distribution.token_ids:
            return one.fail_not_finite()
        chain.draw_from(distribution)
    return one.finish(chain.proposal())
