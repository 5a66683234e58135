"""The acceptance rule: why the text has exactly the target's distribution.

Glossary
  proposal         K draft tokens x_1..x_K, each with the row q_i that it was drawn from
  accepted token   a draft token that passed its test
  recovered token  drawn from the residual at the first rejection
  bonus token      drawn from the target's row K + 1 when all K were accepted
  tail             what the target's distribution holds outside the support of the draft's row

The rule is Leviathan, Kalman and Matias 2023, algorithm 1 (also Chen et al. 2023), on sparse rows: outside the support
q is 0, so there the residual max(0, p - q) is p itself. The target therefore sends p on the support, the mass of the
rest, and one token drawn from the rest; nothing else of its distribution is needed.

The code is plain arithmetic on numbers handed in: floats in service, fractions in the proof (tests/exactness).
"""

from collections.abc import Sequence
from itertools import accumulate

from specdec.exact.values import Proposal, Scores, SparseDistribution, TargetDistribution, Uniforms, Verdict
from specdec.types import TokenOrigin


def accept(proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
    """Accept a prefix of the proposal and draw the token that closes the round."""
    for index, (token, row) in enumerate(zip(proposal.tokens, proposal.rows, strict=True)):
        target = scores.rows[index]
        if not accepts(token, row, target, uniforms.accept[index]):
            return Verdict(index, recover(row, target, uniforms.close), TokenOrigin.RECOVERED)
    return Verdict(len(proposal), scores.rows[len(proposal)].tail_token, TokenOrigin.BONUS)


def accepts(token: int, row: SparseDistribution, target: TargetDistribution, uniform: float) -> bool:
    """Keep the token with probability min(1, p / q): strictly u q < p, and only on the draft's support."""
    position = row.token_ids.index(token)
    draft_prob = row.probs[position]
    return draft_prob > 0 and uniform * draft_prob < target.support_probs[position]


def recover(row: SparseDistribution, target: TargetDistribution, uniform: float) -> int:
    """Draw from the residual max(0, p - q) on the support and all of p outside it (Leviathan et al. 2023, section 2.3).

    All weights can be 0 only by rounding, where p and q are the same distribution; then p itself is drawn from.
    """
    weights = [max(0, p - q) for p, q in zip(target.support_probs, row.probs, strict=True)]
    weights.append(target.tail_mass)
    if not any(weights):
        weights = [*target.support_probs, target.tail_mass]
    position = choose(weights, uniform)
    return target.tail_token if position == len(row.token_ids) else row.token_ids[position]


def choose(weights: Sequence[float], uniform: float) -> int:
    """Return i with probability weights[i] / sum(weights), by inverting the cumulative sum at `uniform` in [0, 1)."""
    cumulative = list(accumulate(weights))
    threshold = uniform * cumulative[-1]
    last = max(index for index, weight in enumerate(weights) if weight > 0)
    return next((index for index, total in enumerate(cumulative) if total > threshold), last)
