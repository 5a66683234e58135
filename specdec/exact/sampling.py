"""Logits to rows: sampling parameters, truncation to a support, and draws; batched over the rows of many sessions.

Order: mask past the vocabulary, grammar, logit_bias, penalties, temperature, top_k, top_p, min_p, renormalise. Both
services run this same code, so that draft and target rows mean the same thing.

Sources: nucleus sampling, Holtzman et al. 2020; min-p, Nguyen et al. 2024; repetition penalty, Keskar et al. 2019.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from specdec.exact.race import MAX_RUNNERS, MIN_CHANCE, NUM_DOUBLINGS, REST, Draw, Race, times
from specdec.exact.token_counts import TokenCounts
from specdec.exact.values import SparseDistribution, TargetDistribution
from specdec.types import SamplingParams

NEUTRAL = SamplingParams()
CHUNK_TOKENS = 128  # divides the vocabularies of large models
DENSE_FRACTION = 16  # where more than one in so many tokens was seen, whole rows are penalised faster
NUCLEUS_TOKENS = 256  # most nuclei are smaller; only the others cost a sort of whole rows


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What one row's distribution depends on besides its logits."""

    sampling: SamplingParams
    prompt: Sequence[int] = ()  # only read where there are penalties
    completion: Sequence[int] = ()  # committed completion, then the draft tokens before this row
    counts: TokenCounts | None = None  # of the text before `completion`, instead of `prompt`
    allowed: np.ndarray | None = None  # bool [vocab_size], the tokens that the session's grammar allows; None: all

    @property
    def changes_logits(self) -> bool:
        """Whether tokens of the target's vocabulary are treated one by one."""
        return bool(self.sampling.logit_bias) or self.sampling.has_penalties or self.allowed is not None


def next_token_distributions(
    logits: torch.Tensor, contexts: Sequence[SamplingContext], vocab_size: int
) -> torch.Tensor:
    """Return next-token distributions after sampling parameters: float32 [N, vocab_size] from float32 logits [N, V].

    A row whose logits hold a NaN or +inf, or nothing finite, comes back with a sum of NaN.
    """
    logits = changed_logits(drop_padding(logits, vocab_size), contexts)
    return _rows(logits, [context.sampling for context in contexts])


def greedy_tokens(logits: torch.Tensor, contexts: Sequence[SamplingContext], vocab_size: int) -> list[int | None]:
    """Return the one token that each row of `next_token_distributions` has at temperature 0; None: no distribution."""
    return _most_probable(changed_logits(drop_padding(logits, vocab_size), contexts))


def _most_probable(logits: torch.Tensor) -> list[int | None]:
    places, maximum = (each.flatten().tolist() for each in on_cpu(*_maxima(logits)))
    return [token if math.isfinite(value) else None for token, value in zip(places, maximum, strict=True)]


def draft_distributions(
    logits: torch.Tensor, contexts: Sequence[SamplingContext], vocab_size: int, support_mass: float, support_max: int
) -> list[SparseDistribution]:
    """Return `sparse_distributions` of `next_token_distributions`; a row that is not a distribution comes back empty.

    One-hot rows need neither a softmax nor a sort, which are most of what a small draft costs.
    """
    logits = drop_padding(logits, vocab_size)
    logits = changed_logits(logits, for_draft(logits, contexts))
    params = [context.sampling for context in contexts]
    if all(param.temperature == 0 for param in params):
        return [
            SparseDistribution((), ()) if token is None else SparseDistribution((token,), (1.0,))
            for token in _most_probable(logits)
        ]
    return sparse_distributions(_rows(logits, params), support_mass, support_max)


def _rows(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    rows = scaled_softmax(logits, params)
    params = [param if truncates(param) else NEUTRAL for param in params]
    return rows if all(param is NEUTRAL for param in params) else truncate_rows(rows, params)


def truncates(sampling: SamplingParams) -> bool:
    """Return whether a distribution is cut; a one-hot row has nothing that could be."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def drop_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Leave out ids past the real vocabulary, where models pad their logits; return [N, vocab_size]."""
    return logits[:, :vocab_size]


def changed_logits(logits: torch.Tensor, contexts: Sequence[SamplingContext]) -> torch.Tensor:
    """Change the logits of the tokens that a session forbids, biases or has seen; other rows are untouched."""
    logits = allowed_logits(logits, contexts)
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


def allowed_logits(logits: torch.Tensor, contexts: Sequence[SamplingContext]) -> torch.Tensor:
    """Return logits [N, V] that are -inf where a session's grammar allows no token."""
    if all(context.allowed is None for context in contexts):
        return logits
    logits = logits.clone()
    for row, context in zip(logits, contexts, strict=True):
        if context.allowed is not None:
            row.masked_fill_(torch.from_numpy(~context.allowed).to(row.device), -torch.inf)
    return logits


def for_draft(logits: torch.Tensor, contexts: Sequence[SamplingContext]) -> list[SamplingContext]:
    """Return the contexts of rows [N, V], without grammars that allow only tokens that a draft does not know."""
    return [
        context if context.allowed is None or _knows_any(row, context.allowed) else replace(context, allowed=None)
        for row, context in zip(logits, contexts, strict=True)
    ]


def _knows_any(logits: torch.Tensor, allowed: np.ndarray) -> bool:
    return bool(logits[torch.from_numpy(allowed).to(logits.device)].isfinite().any())


def _penalise(logits: torch.Tensor, context: SamplingContext) -> None:
    """Penalise in place, logits [V]: first by what was counted, then the tokens after that again, from the start."""
    counts, drafted = context.counts, context.completion
    if counts is None:
        text = [*context.prompt, *context.completion]
        counts, drafted = TokenCounts().update(0, text, len(text), len(context.prompt)), ()
    more = Counter(drafted)
    drafted_ids = np.array(list(more), np.int64)
    again = logits[torch.from_numpy(drafted_ids).to(logits.device)]
    if DENSE_FRACTION * counts.num_distinct > len(logits):
        logits.copy_(_penalised(logits, context.sampling, *map(torch.from_numpy, counts.arrays(len(logits)))))
    else:
        ids, *times = map(torch.from_numpy, counts.counted())
        _put(logits, ids, _penalised(logits[ids.to(logits.device)], context.sampling, *times))
    if more:
        added = torch.tensor(list(more.values()))
        times = [torch.from_numpy(each) + added for each in counts.times_of(drafted_ids)]
        _put(logits, torch.from_numpy(drafted_ids), _penalised(again, context.sampling, *times))


def _put(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    logits[ids.to(logits.device)] = values


def _penalised(
    logits: torch.Tensor, sampling: SamplingParams, times: torch.Tensor, completion_times: torch.Tensor
) -> torch.Tensor:
    """Return logits [N] of tokens that were seen so many times [N], and in the completion so many [N]."""
    times, completion_times = times.to(logits.device), completion_times.to(logits.device)
    penalty = sampling.repetition_penalty
    if penalty != 1:
        logits = torch.where(times > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.presence_penalty or sampling.frequency_penalty:
        subtracted = sampling.presence_penalty + sampling.frequency_penalty * completion_times
        logits = logits - torch.where(completion_times > 0, subtracted, 0.0)
    return logits


def scaled_softmax(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return softmax(logits / temperature), and the one-hot row of the first maximum where the temperature is 0."""
    temperatures = [param.temperature for param in params]
    if not any(temperatures):
        return _one_hot_of_maximum(logits)
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
    """Return one-hot rows [N, V]; a row without a finite maximum gets a NaN."""
    places, maximum = _maxima(logits)
    return torch.zeros_like(logits).scatter_(-1, places, torch.where(maximum.isfinite(), 1.0, torch.nan))


def _maxima(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first maximum's place in each row of [N, V], and its value, [N, 1]; NaN is above all.

    On a CPU NumPy finds it five times faster than torch.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        places = torch.from_numpy(logits.numpy().argmax(axis=-1))[:, None]
        return places, logits.gather(-1, places)
    maximum, places = logits.max(dim=-1, keepdim=True)
    return places, maximum


def truncate_rows(rows: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply top_k (ties kept), top_p (the smallest set with that mass) and min_p, then renormalise; rows [N, V]."""
    kept = rows
    if any(param.top_k for param in params):
        kept = _keep_top_k(kept, [param.top_k for param in params])
    if any(param.top_p < 1 for param in params):
        kept = _keep_top_p(kept, [param.top_p for param in params])
    if any(param.min_p > 0 for param in params):
        fractions = torch.tensor([[param.min_p] for param in params], dtype=rows.dtype, device=rows.device)
        kept = kept * (kept >= fractions * kept.amax(dim=-1, keepdim=True))
    kept = torch.where(rows.sum(dim=-1, keepdim=True).isfinite(), kept, torch.nan)
    return kept / kept.sum(dim=-1, keepdim=True)


def _keep_top_k(rows: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """Zero what is less probable than the k-th of [N, V]; 0 keeps all."""
    size = rows.shape[-1]
    places = torch.tensor([[min(k or size, size)] for k in top_k], device=rows.device) - 1
    largest = rows.topk(min(max(top_k), size), dim=-1).values
    least = largest.gather(-1, places.clamp(max=largest.shape[-1] - 1))
    least = least.where(torch.tensor([[k > 0] for k in top_k], device=rows.device), 0.0)
    return rows * (rows >= least)


def _keep_top_p(rows: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    """Zero all of [N, V] but the most probable tokens with a fraction `top_p` of the mass; of equals the first win."""
    fractions = torch.tensor([[p] for p in top_p], dtype=torch.float64, device=rows.device)
    wanted = fractions * rows.sum(dim=-1, keepdim=True, dtype=torch.float64)
    # at top_p = 1 nothing is cut: rounding must not drop the last tokens
    wanted = wanted.where(fractions < 1, 0.0)
    ordered, mass = _largest(rows, wanted)
    num_kept = (mass - ordered < wanted).sum(dim=-1, keepdim=True)  # [N, 1]; 0 at top_p = 1
    least = ordered.gather(-1, (num_kept - 1).clamp(min=0))
    num_equals_kept = num_kept - (ordered > least).sum(dim=-1, keepdim=True)
    equal = rows == least
    keep = (rows > least) | (equal & (equal.cumsum(dim=-1) <= num_equals_kept)) | (fractions >= 1)
    return rows * keep


def _largest(rows: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest values in order, enough for the mass `wanted` [N, 1], and their sums (float64)."""
    ordered = rows.topk(min(NUCLEUS_TOKENS, rows.shape[-1]), dim=-1).values
    mass = ordered.cumsum(dim=-1, dtype=torch.float64)
    if bool((mass[:, -1:] < wanted).any()):
        ordered = _descending(rows)
        mass = ordered.cumsum(dim=-1, dtype=torch.float64)
    return ordered, mass


def _descending(rows: torch.Tensor) -> torch.Tensor:
    """Sort the values of each row [N, V], the largest first; NumPy does it four times faster than torch on a CPU."""
    if rows.device.type != "cpu":
        return rows.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(rows.numpy(), axis=-1)[:, ::-1].copy())


def top_tokens(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the largest entries of rows [N, V], best first, [N, count]; of equal ones any may be left out.

    On a CPU `topk` takes longer than finding the best chunks first, as nothing outside them can be among the largest.
    """
    size = rows.shape[-1]
    if rows.is_cuda or size % CHUNK_TOKENS or size < count * CHUNK_TOKENS:
        return rows.topk(count, dim=-1).indices
    chunks = rows.reshape(len(rows), size // CHUNK_TOKENS, CHUNK_TOKENS)
    best = chunks.amax(dim=-1).topk(count, dim=-1).indices
    candidates = chunks.gather(1, best[:, :, None].expand(-1, -1, CHUNK_TOKENS)).flatten(1)
    places = candidates.topk(count, dim=-1).indices
    return best.gather(1, places // CHUNK_TOKENS) * CHUNK_TOKENS + places % CHUNK_TOKENS


def sparse_distributions(rows: torch.Tensor, support_mass: float, support_max: int) -> list[SparseDistribution]:
    """Cut each row of [N, V] to the fewest tokens with `support_mass`, at most `support_max`; renormalise in float32.

    What is returned is float32 numbers in Python floats: draw from it, and ship it.
    """
    probs, ids = on_cpu(*rows.topk(min(support_max, rows.shape[-1]), dim=-1))
    return [_cut(i, p, support_mass) for i, p in zip(ids.tolist(), probs.numpy(), strict=True)]


def _cut(ids: list[int], probs: np.ndarray, support_mass: float) -> SparseDistribution:
    """Cut descending probabilities at `support_mass` and before the first 0; a row of NaN comes back empty."""
    size, mass = 0, 0.0
    for prob in probs.tolist():
        if not (mass < support_mass and prob > 0):
            break
        size += 1
        mass += prob
    kept = probs[:size]
    return SparseDistribution(tuple(ids[:size]), tuple((kept / kept.sum(dtype=np.float32)).tolist()))


def draw(row: SparseDistribution, uniform: float) -> int:
    """Draw from a sparse row by inverting its cumulative sum (float64) at `uniform` in [0, 1)."""
    cumulative = list(accumulate(row.probs))
    position = bisect_right(cumulative, uniform * cumulative[-1])
    return row.token_ids[min(position, len(row.token_ids) - 1)]


def read_and_draw(
    logits: torch.Tensor,
    contexts: Sequence[SamplingContext],
    unions: Sequence[Sequence[int]],
    draws: Sequence[Draw],
) -> list[TargetDistribution | None]:
    """Read the tokens of a union from each row's distribution, then draw one from the rest; None: there is none.

    Logits are float32 [N, V], of the tokens that exist; one context, union and draw a row. A row with a race has an
    empty union. On a GPU all of this is copied back at once.
    """
    if not any(context.sampling.temperature for context in contexts):
        tokens = greedy_tokens(logits, contexts, logits.shape[-1])
        certain = zip(unions, tokens, strict=True)
        return [None if token is None else _one_hot(union, token) for union, token in certain]
    rows = next_token_distributions(logits, contexts, logits.shape[-1])
    inside = indices(unions, logits.device)
    support_probs = rows[inside]
    rows[inside] = 0
    raced = [index for index, draw in enumerate(draws) if draw.race]
    runners, chances = _runners(rows, raced)
    found, rest_masses = draw_dense(rows, [draw.uniform for draw in draws])
    probs, drawn, masses, runners, chances = on_cpu(support_probs, found, rest_masses, runners, chances)
    winners = _winners([draw.race for draw in draws if draw.race], runners, chances, masses[raced])
    drawn[raced] = torch.where(winners < 0, drawn[raced], winners)
    masses[raced] += chances.sum(dim=-1)
    ends = pairwise(accumulate(map(len, unions), initial=0))
    read = [probs[begin:end].tolist() for begin, end in ends]
    return [
        TargetDistribution(each, mass, token) if math.isfinite(sum(each, mass)) else None
        for each, mass, token in zip(read, masses.float().tolist(), drawn.tolist(), strict=True)
    ]


def _runners(rows: torch.Tensor, raced: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [R, M] of raced rows that run by themselves, and their chances; 0 where one does not.

    In `rows` [N, V] they have no chance from now on.
    """
    chances, runners = rows[raced].topk(min(MAX_RUNNERS + 1, rows.shape[-1]), dim=-1)
    least = torch.full((len(raced), 1), MIN_CHANCE, dtype=rows.dtype, device=rows.device)
    if chances.shape[-1] > MAX_RUNNERS:
        for _ in range(NUM_DOUBLINGS):
            least = torch.where(chances[:, MAX_RUNNERS:] >= least, 2 * least, least)
    if raced:
        rows[raced] = rows[raced].where(~(rows[raced] >= least), 0.0)  # NaN stays
    return runners, chances.double().where(chances >= least, 0.0)


def _winners(
    races: Sequence[Race], runners: torch.Tensor, chances: torch.Tensor, rest_masses: torch.Tensor
) -> torch.Tensor:
    """Return who wins each race, int64 [R]; -1: one of the rest."""
    rest = torch.full((len(races), 1), REST)
    tokens = torch.cat((runners, rest), dim=-1)
    weights = torch.cat((chances, rest_masses[:, None]), dim=-1)
    over = torch.from_numpy(times(races, tokens.numpy())) / weights
    won = tokens.gather(-1, over.argmin(dim=-1, keepdim=True))[:, 0]
    return torch.where(won == REST, -1, won)


def _one_hot(union: Sequence[int], token: int) -> TargetDistribution:
    """Return a distribution in which one token is certain."""
    if token in union:
        return TargetDistribution([float(each == token) for each in union], 0.0, 0)
    return TargetDistribution([0.0] * len(union), 1.0, token)


def indices(token_lists: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, token) index pairs of one list of tokens a row, each [sum of lengths]."""
    row = [index for index, tokens in enumerate(token_lists) for _ in tokens]
    column = [token for tokens in token_lists for token in tokens]
    pairs = torch.tensor([row, column], dtype=torch.long, device=device)
    return pairs[0], pairs[1]


def draw_dense(weights: torch.Tensor, uniforms: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row with probability proportional to weights [N, V]; return tokens [N] and masses [N] (float64).

    A row without mass gives token 0 and mass 0. Sums are float64: of chunks first, then within the one that is drawn.
    """
    size = weights.shape[-1]
    length = 1 if size % CHUNK_TOKENS else CHUNK_TOKENS
    chunks = weights.reshape(len(weights), size // length, length)
    cumulative = chunks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [N, V / length]
    mass = cumulative[:, -1:]
    threshold = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None] * mass
    chunk = _first_above(cumulative, threshold)
    before = cumulative.gather(1, (chunk - 1).clamp(min=0)).where(chunk > 0, 0.0)
    drawn = chunks.gather(1, chunk[:, :, None].expand(-1, -1, length))[:, 0]
    within = before + drawn.cumsum(dim=-1, dtype=torch.float64)  # [N, length]
    tokens = (chunk * length + _first_above(within, threshold)).where(mass > 0, 0)
    return tokens[:, 0], mass[:, 0]


def _first_above(cumulative: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Return the first place of each row of [N, C] with a sum above its threshold, [N, 1]."""
    position = torch.searchsorted(cumulative, threshold, right=True)
    # the first sum that reaches the last one has the last weight: rounding may not step past it
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(position, last).clamp(max=cumulative.shape[-1] - 1)  # a row of NaN has neither


def on_cpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors on the CPU; from a GPU they come in one copy, as each copy waits for all that was asked before."""
    return list(tensors) if tensors[0].device.type == "cpu" else in_one_copy(tensors)


def in_one_copy(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the CPU side by side: float64 holds every float32, token id and truth value as it is."""
    together = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu()
    parts = torch.split(together, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
