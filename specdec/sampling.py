"""Logits to rows: sampling parameters, truncation to a support, and draws; batched over the rows of many sessions.

Order: mask past the vocabulary, logit_bias, penalties, temperature, top_k, top_p, min_p, renormalise. Both services run
this same code, so that draft and target rows mean the same thing.

Sources: nucleus sampling, Holtzman et al. 2020; min-p, Nguyen et al. 2024; repetition penalty, Keskar et al. 2019.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.types import Row, SamplingParams

NEUTRAL = SamplingParams()


@dataclass(frozen=True, slots=True)
class RowContext:
    """What one row's law depends on besides its logits."""

    sampling: SamplingParams
    prompt: Sequence[int] = ()  # only read where there are penalties
    completion: Sequence[int] = ()  # committed completion, then the draft tokens before this row


def next_token_rows(logits: torch.Tensor, contexts: Sequence[RowContext], vocab_size: int) -> torch.Tensor:
    """Return the next-token laws after sampling parameters: float32 [N, V] from float32 logits [N, V].

    A row whose logits hold a NaN or +inf, or nothing finite, comes back as NaN throughout: see `is_finite`.
    """
    logits = mask_padding(logits, vocab_size)
    logits = add_bias_and_penalties(logits, contexts)
    params = [context.sampling for context in contexts]
    rows = scaled_softmax(logits, params)
    if any(param.top_k or param.top_p < 1 or param.min_p > 0 for param in params):
        rows = truncate_rows(rows, params)
    return rows


def is_finite(rows: torch.Tensor) -> list[bool]:
    """Say for each row of [N, V] whether it is a law; one that is not fails its session, never its batch-mates."""
    result: list[bool] = rows.sum(dim=-1).isfinite().tolist()
    return result


def mask_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Rule out ids past the real vocabulary, where models pad their logits."""
    if logits.shape[-1] > vocab_size:
        logits = logits.clone()
        logits[:, vocab_size:] = -torch.inf
    return logits


def add_bias_and_penalties(logits: torch.Tensor, contexts: Sequence[RowContext]) -> torch.Tensor:
    """Change the logits of the few tokens that a session biases or has seen; rows without either are untouched."""
    touched = [index for index, c in enumerate(contexts) if c.sampling.logit_bias or c.sampling.has_penalties]
    if not touched:
        return logits
    logits = logits.clone()
    for index in touched:
        sampling = contexts[index].sampling
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
            logits[index, ids] += torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
        if sampling.has_penalties:
            _penalise(logits[index], contexts[index])
    return logits


def _penalise(logits: torch.Tensor, context: RowContext) -> None:
    """Penalise in place, logits [V]."""
    sampling = context.sampling
    counts = Counter(context.completion)
    seen = torch.tensor(sorted(counts.keys() | set(context.prompt)), dtype=torch.long, device=logits.device)
    values = logits[seen]
    penalty = sampling.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if counts:
        ids = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times


def scaled_softmax(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return softmax(logits / temperature), and the one-hot row of the first maximum where the temperature is 0."""
    temperatures = [param.temperature for param in params]
    if all(temperature == 1 for temperature in temperatures):
        rows = logits.softmax(dim=-1)
    else:
        # dividing distances from the maximum, not the logits, keeps tiny temperatures finite
        scale = torch.tensor([[temperature or 1.0] for temperature in temperatures], device=logits.device)
        rows = ((logits - logits.amax(dim=-1, keepdim=True)) / scale).softmax(dim=-1)
    greedy = [index for index, temperature in enumerate(temperatures) if temperature == 0]
    if greedy:
        rows[greedy] = _one_hot_of_maximum(logits[greedy])
    return rows


def _one_hot_of_maximum(logits: torch.Tensor) -> torch.Tensor:
    """Return one-hot rows [N, V]; a row without a finite maximum stays NaN."""
    maximum, position = logits.max(dim=-1, keepdim=True)
    hot = torch.where(maximum.isfinite(), 1.0, torch.nan)
    return torch.zeros_like(logits).scatter_(-1, position, hot)


def truncate_rows(rows: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply top_k (ties kept), top_p (the smallest set with that mass) and min_p, then renormalise; rows [N, V]."""
    size = rows.shape[-1]
    top_k = torch.tensor([min(param.top_k or size, size) for param in params], device=rows.device)
    top_p = torch.tensor([[param.top_p] for param in params], dtype=torch.float64, device=rows.device)
    min_p = torch.tensor([[param.min_p] for param in params], dtype=rows.dtype, device=rows.device)
    ordered, order = rows.sort(dim=-1, descending=True, stable=True)
    ordered = ordered * (ordered >= ordered.gather(-1, top_k[:, None] - 1))
    mass = ordered.cumsum(dim=-1, dtype=torch.float64)
    before = mass - ordered
    # at top_p = 1 nothing is cut: rounding must not drop the last tokens
    keep = (before < top_p * mass[:, -1:]) | (top_p >= 1)
    keep &= ordered >= min_p * ordered[:, :1]
    kept = torch.zeros_like(rows).scatter_(-1, order, ordered * keep)
    kept = torch.where(rows.sum(dim=-1, keepdim=True).isfinite(), kept, torch.nan)
    return kept / kept.sum(dim=-1, keepdim=True)


def sparse_rows(rows: torch.Tensor, support_mass: float, support_max: int) -> list[Row]:
    """Cut each row of [N, V] to the fewest tokens with `support_mass`, at most `support_max`; renormalise in float32.

    What is returned is float32 numbers in Python floats: draw from it, and ship it.
    """
    probs, ids = rows.topk(min(support_max, rows.shape[-1]), dim=-1)
    before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
    keep = ((before < support_mass) & (probs > 0)).tolist()
    return [
        _renormalised(i[:size], p[:size])
        for i, p, size in zip(ids.cpu().numpy(), probs.cpu().numpy(), map(sum, keep), strict=True)
    ]


def _renormalised(ids: np.ndarray, probs: np.ndarray) -> Row:
    return Row(tuple(ids.tolist()), tuple((probs / probs.sum(dtype=np.float32)).tolist()))


def draw(row: Row, uniform: float) -> int:
    """Draw from a sparse row by inverting its cumulative sum (float64) at `uniform` in [0, 1)."""
    cumulative = np.cumsum(np.asarray(row.probs, dtype=np.float64))
    position = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return row.token_ids[min(position, len(row.token_ids) - 1)]


def draw_dense(weights: torch.Tensor, uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Draw one token a row with probability proportional to weights [N, V]; return tokens [N] and masses [N] (float64).

    A row without mass gives token 0 and mass 0.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    mass = cumulative[:, -1:].contiguous()
    threshold = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None] * mass
    position = torch.searchsorted(cumulative, threshold, right=True)
    # the first index that reaches the full mass is the last token with any: rounding may not step past it
    last = torch.searchsorted(cumulative, mass)
    tokens = torch.minimum(position, last).where(mass > 0, 0)
    return tokens[:, 0].tolist(), mass[:, 0].tolist()
