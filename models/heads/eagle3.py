"""Training an EAGLE-3 head: on its own outputs, for several tokens ahead (Li et al. 2025, section 3.2).

Pair j is the target's states at token j with token j + 1, and predicts token j + 2. Step s replaces the states by the
head's own output of step s - 1; here that is pair j, moved on by s tokens: its query sees what the target's states
offer up to pair j, then the head's own outputs of the steps before. Steps after the first are computed for a
part of the pairs, a random one in each batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from models.heads.batches import Batch
from models.heads.objective import Agreement, DepthCounter, soft_cross_entropy
from models.heads.target import TargetParts, adopt, transformer_config
from specdec.heads.eagle3 import Eagle3Head, Eagle3Shape
from specdec.heads.layers import Projected

STEP_WEIGHT = 0.8  # of the loss of a step, relative to the step before
NUM_STEPS = 5
LATER_PART = 0.4  # of the pairs take part in the steps after the first


def new_head(target: TargetParts, draft_tokens: torch.Tensor) -> Eagle3Head:
    """Return an untrained head over a draft vocabulary. It begins as the target's own head on its last state."""
    shape = Eagle3Shape(
        transformer=transformer_config(target, "llama", 1, target.config.intermediate_size),
        draft_vocab_size=len(draft_tokens),
        aux_layers=tuple(target.layers[:-1]),
        target_hidden_size=target.hidden_size,
        fc_norm=True,
    )
    head = Eagle3Head(shape)
    head.vocabulary.choose(draft_tokens)
    adopt(head, target)
    nn.init.zeros_(head.layer.self_attn.o_proj.weight)
    nn.init.zeros_(head.layer.mlp.down_proj.weight)
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -target.hidden_size :].copy_(torch.eye(target.hidden_size))
    return head


@dataclass(frozen=True, slots=True)
class Pairs:
    """Some pairs of each sample, padded."""

    places: torch.Tensor  # int64 [N, M]: j
    count: torch.Tensor  # bool [N, M]: no padding, and token j + 2 is the target's own

    def subset(self, part: float, generator: torch.Generator) -> tuple["Pairs", torch.Tensor]:
        """Return a random part of the pairs, and where they were [N, m]."""
        num_kept = max(1, int(part * self.places.shape[1]))
        order = torch.rand(self.places.shape, generator=generator, device=self.places.device) + self.count
        kept = order.topk(num_kept, dim=1).indices
        return Pairs(self.places.gather(1, kept), self.count.gather(1, kept)), kept


class Eagle3Objective:
    """An EAGLE-3 head under training."""

    def __init__(self, head: Eagle3Head, target: TargetParts) -> None:
        self.head = head
        self._target = target
        self._random = torch.Generator(target.device).manual_seed(0)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss over pairs and steps, later steps weighing less."""
        total = torch.zeros((), device=batch.tokens.device)
        finals = batch.states[..., -1, :].flatten(0, 1)
        for step, (logits, rows, counts) in enumerate(self._steps(batch)):
            with torch.no_grad():
                wanted = self.head.lm_head(finals[rows[counts]])
            total = total + STEP_WEIGHT**step * soft_cross_entropy(logits[counts], wanted).mean()
        return total

    def agreement(self, batch: Batch) -> Agreement:
        """Return how each depth's choices fare where all before it are the target's."""
        counter = DepthCounter(self.head.vocabulary.target_ids)
        finals, tokens = batch.states[..., -1, :].flatten(0, 1), batch.tokens.flatten()
        for logits, rows, counts in self._steps(batch):
            last = rows[counts]
            counter.add(logits[counts], finals[last].float() @ self._target.head.T, tokens[last + 1])
        return counter.agreement

    def _steps(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield for each step logits [R, D], the token after which they predict [R], and whether that counts [R].

        Tokens are indices into the flattened batch.
        """
        num_samples, length = batch.tokens.shape
        device = batch.tokens.device
        begins = torch.arange(num_samples, device=device)[:, None] * length
        embedded = self.head.embed_tokens(batch.tokens[:, 1:])
        joined = self.head.joined(batch.states[:, :-1, :-1])
        angles = self.head.rotary(torch.arange(1, length, device=device).expand(num_samples, -1))
        context, residual = self.head.layer.project_pair(embedded, joined, angles)

        pairs = _answer_pairs(batch)
        attended = _attended(taken(context.query, pairs.places), context, [], pairs.places)
        logits, states = self.head.predict(self.head.layer.finish(taken(residual, pairs.places), attended))
        yield logits.flatten(0, 1), (begins + pairs.places + 1).flatten(), pairs.count.flatten()

        pairs, kept = pairs.subset(LATER_PART, self._random)
        states, counts = taken(states, kept), pairs.count
        own: list[Projected] = []
        for step in range(1, NUM_STEPS):
            is_inside = pairs.places + step + 2 < length
            last = torch.where(is_inside, pairs.places + step + 1, 0)  # the token that the pair has moved on to
            counts = counts & is_inside & batch.is_answer.gather(1, torch.where(is_inside, last + 1, 0))
            embedded = self.head.embed_tokens(batch.tokens.gather(1, last))
            angles = self.head.rotary(pairs.places + step + 1)
            projected, residual = self.head.layer.project_pair(embedded, states, angles)
            own.append(projected)
            attended = _attended(projected.query, context, own, pairs.places)
            logits, states = self.head.predict(self.head.layer.finish(residual, attended))
            yield logits.flatten(0, 1), (begins + last).flatten(), counts.flatten()


def _answer_pairs(batch: Batch) -> Pairs:
    """Return all pairs that predict a token of an answer."""
    wanted = batch.is_answer[:, 2:]
    num_most = max(1, int(wanted.sum(dim=1).max()))
    order = wanted.long().sort(dim=1, descending=True, stable=True)
    return Pairs(order.indices[:, :num_most], order.values[:, :num_most].bool())


def taken(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return rows [N, P, ...] at places [N, M]: [N, M, ...]."""
    return rows[torch.arange(len(rows), device=rows.device)[:, None], places]


def _attended(query: torch.Tensor, context: Projected, own: list[Projected], places: torch.Tensor) -> torch.Tensor:
    """Return what queries [N, M, heads, size] see: the context [N, P, ...] up to `places` [N, M], and their `own`."""
    num_kv_heads, size = context.key.shape[-2:]
    grouped = query.unflatten(2, (num_kv_heads, -1)) * size**-0.5  # [N, M, kv_heads, group, size]
    scores = torch.einsum("nmkgd,npkd->nmkgp", grouped, context.key).float()
    is_later = torch.arange(context.key.shape[1], device=places.device) > places[..., None]
    scores = scores.masked_fill(is_later[:, :, None, None], float("-inf"))
    own_scores = [torch.einsum("nmkgd,nmkd->nmkg", grouped, step.key)[..., None].float() for step in own]
    weights = torch.cat((scores, *own_scores), dim=-1).softmax(dim=-1).to(query.dtype)
    num_context = context.key.shape[1]
    output = torch.einsum("nmkgp,npkd->nmkgd", weights[..., :num_context], context.value)
    for index, step in enumerate(own):
        output = output + weights[..., num_context + index, None] * step.value[:, :, :, None]
    return output.flatten(2, 3)
