"""Training a DFlash head: blocks that begin at random tokens of an answer (Chen et al. 2026)."""

import torch
from torch import nn

from models.heads.batches import Batch
from models.heads.eagle3 import taken
from models.heads.objective import Agreement, DepthCounter, soft_cross_entropy
from models.heads.target import TargetParts, adopt, transformer_config
from specdec.heads.dflash import DFlashHead, DFlashShape, KeysAndValues
from specdec.heads.layers import Layer, Projected

NUM_LAYERS = 2
BLOCK_SIZE = 8
MLP_FACTOR = 5 / 6  # of the target's width of the MLP
ANCHOR_PART = 0.25  # of an answer's tokens begin a block, in each batch
DECAY_TOKENS = 4.0  # the weight of a later token falls by exp(-1 / DECAY_TOKENS) a place


def new_head(target: TargetParts, draft_tokens: torch.Tensor, mask_token_id: int) -> DFlashHead:
    """Return an untrained head over a draft vocabulary, of Qwen 3 layers as those that are published."""
    shape = DFlashShape(
        transformer=transformer_config(
            target, "qwen3", NUM_LAYERS, round(MLP_FACTOR * target.config.intermediate_size)
        ),
        draft_vocab_size=len(draft_tokens),
        aux_layers=tuple(target.layers[:-1]),
        target_hidden_size=target.hidden_size,
        block_size=BLOCK_SIZE,
        mask_token_id=mask_token_id,
    )
    head = DFlashHead(shape)
    head.vocabulary.choose(draft_tokens)
    adopt(head, target)
    for layer in head.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(layer.mlp.down_proj.weight)  # type: ignore[union-attr, arg-type]
    return head


class DFlashObjective:
    """A DFlash head under training."""

    def __init__(self, head: DFlashHead, target: TargetParts) -> None:
        self.head = head
        self._target = target
        self._random = torch.Generator(target.device).manual_seed(0)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the tokens of blocks, later tokens weighing less."""
        logits, rows, counts = self._predicted(batch)
        finals = batch.states[..., -1, :].flatten(0, 1)
        with torch.no_grad():
            wanted = self.head.lm_head(finals[rows[counts]])
        losses = soft_cross_entropy(logits[counts], wanted)
        places = torch.arange(logits.shape[1], device=logits.device).expand_as(counts)[counts]
        weights = torch.exp(-places / DECAY_TOKENS)
        return (weights * losses).sum() / weights.sum()

    def agreement(self, batch: Batch) -> Agreement:
        """Return how each place's choices fare."""
        counter = DepthCounter(self.head.vocabulary.target_ids)
        logits, rows, counts = self._predicted(batch)
        finals, tokens = batch.states[..., -1, :].flatten(0, 1), batch.tokens.flatten()
        for place in range(logits.shape[1]):
            kept = rows[:, place][counts[:, place]]
            wanted = finals[kept].float() @ self._target.head.T
            counter.add(logits[:, place][counts[:, place]], wanted, tokens[kept + 1])
        return counter.agreement

    def _predicted(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [R, B - 1, D] of R blocks, the token after which each predicts [R, B - 1], and which count."""
        num_samples, length = batch.tokens.shape
        device = batch.tokens.device
        anchors, is_anchor = self._anchors(batch)
        positions = torch.arange(length, device=device).expand(num_samples, -1)
        hidden, angles = self.head.begin(batch.tokens.gather(1, anchors), anchors)
        for layer, context in zip(self.head.layers, self.head.offered(batch.states[:, :, :-1], positions), strict=True):
            assert isinstance(layer, Layer)
            own = layer.project(hidden, angles)
            hidden = layer.finish(hidden, _attended(own, context, anchors))
        logits = self.head.logits(hidden)
        after = anchors[..., None] + torch.arange(BLOCK_SIZE - 1, device=device)  # each predicts the token after these
        is_inside = after + 1 < length
        following = torch.where(is_inside, after + 1, 0)
        counts = is_anchor[..., None] & is_inside & taken(batch.is_answer, following.flatten(1)).view_as(following)
        rows = torch.arange(num_samples, device=device)[:, None, None] * length + torch.where(is_inside, after, 0)
        return logits.flatten(0, 1), rows.flatten(0, 1), counts.flatten(0, 1)

    def _anchors(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random tokens before those of answers [N, M], and which of them are no padding."""
        may_begin = nn.functional.pad(batch.is_answer[:, 1:], (0, 1))
        num_most = max(1, int(ANCHOR_PART * int(may_begin.sum(dim=1).max())))
        order = torch.rand(may_begin.shape, generator=self._random, device=may_begin.device) + may_begin
        chosen = order.topk(num_most, dim=1).indices
        return chosen, may_begin.gather(1, chosen)


def _attended(own: Projected, context: KeysAndValues, anchors: torch.Tensor) -> torch.Tensor:
    """Return what blocks [N, M, B, heads, size] see: the context [N, L, ...] before anchors [N, M], themselves."""
    keys, values = context
    length, num_kv_heads, size = keys.shape[1:]
    grouped = own.query.unflatten(3, (num_kv_heads, -1)) * size**-0.5  # [N, M, B, kv_heads, group, size]
    scores = torch.einsum("nmbkgd,nlkd->nmbkgl", grouped, keys).float()
    is_hidden = torch.arange(length, device=anchors.device) >= anchors[..., None]
    scores = scores.masked_fill(is_hidden[:, :, None, None, None], float("-inf"))
    own_scores = torch.einsum("nmbkgd,nmckd->nmbkgc", grouped, own.key).float()
    weights = torch.cat((scores, own_scores), dim=-1).softmax(dim=-1).to(own.query.dtype)
    seen = torch.einsum("nmbkgl,nlkd->nmbkgd", weights[..., :length], values)
    return (seen + torch.einsum("nmbkgc,nmckd->nmbkgd", weights[..., length:], own.value)).flatten(3, 4)
