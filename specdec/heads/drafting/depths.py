"""Ends rounds whose depths were predicted at once: a depth's distribution does not depend on the tokens before it."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.exact.sampling import SamplingContext
from specdec.heads.drafting.predictions import Predictions
from specdec.heads.drafting.rounds import DrawnChain, HeadRound
from specdec.heads.drafting.tree import MAX_CHILDREN, best_paths


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
    contexts = [context for one in rounds for context in _rankings(one, num_depths)]
    races = [one.race(depth) for one in rounds for depth in range(num_depths)]
    tokens, probs = predictions.ranked(logits.flatten(0, 1), contexts, width, races)
    for number, one in enumerate(rounds):
        own = slice(number * num_depths, (number + 1) * num_depths)
        if any(math.isnan(row[0]) for row in probs[own]):
            one.fail_not_finite()
        else:
            request = one.request
            found = best_paths(tokens[own], probs[own], one.num_draft_tokens, request.stop_below, request.guesses)
            one.finish(found)


def _rankings(one: HeadRound, num_depths: int) -> list[SamplingContext]:
    """Return what the ranks at each depth depend on; a grammar is known after the text alone, so at the first one."""
    first = one.ranking()
    return [first, *[replace(first, allowed=None)] * (num_depths - 1)]


def _end_drawn(one: HeadRound, logits: torch.Tensor, predictions: Predictions) -> None:
    """Draw a chain from logits [depths, draft_vocab_size]; penalties count the tokens drawn before."""
    chain = DrawnChain(one.session, one.request)
    logits = logits[: one.num_draft_tokens]
    together = [] if one.depends_on_path else predictions.distributions(logits, [one.context()] * len(logits))
    for depth in range(len(logits)):
        if together:
            distribution = together[depth]
        else:
            (distribution,) = predictions.distributions(logits[depth : depth + 1], [one.context(chain.tokens)])
        if not distribution.token_ids:
            return one.fail_not_finite()
        chain.draw_from(distribution)
    return one.finish(chain.proposal())
