"""Runs Medusa heads: one small forward from the target's last state."""

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import functional

from specdec.drafting.request import DraftRequest
from specdec.engine import Quantization
from specdec.exact.values import ObservationRequest
from specdec.heads.drafting.depths import end_rounds
from specdec.heads.drafting.fast import joined
from specdec.heads.drafting.kept import KeptKeys
from specdec.heads.drafting.observed import new_positions
from specdec.heads.drafting.predictions import Predictions
from specdec.heads.drafting.rounds import NOTHING, HeadRound
from specdec.heads.drafting.sessions import HeldSessions
from specdec.heads.medusa import MedusaHead, ResidualBlock
from specdec.serving.session_stream import WorkerSession


class MedusaRunner:
    """Drafts with Medusa heads."""

    num_ahead = 0

    def __init__(
        self,
        head: MedusaHead,
        num_target_layers: int,
        predictions: Predictions,
        draws: bool,
        max_bytes: int,
        quantization: Quantization | None = None,
    ) -> None:
        """`draws`: chains of drawn tokens, not trees of chosen ones."""
        self.observations = ObservationRequest(hidden_layers=(num_target_layers,))
        self.hidden_size = head.shape.hidden_size
        join = partial(joined, quantization=quantization)
        self._blocks = [[join(_linear(layer)) for layer in block.children()] for block in head.blocks]
        self._lm_heads = [join(layer) for layer in head.lm_heads]  # type: ignore[arg-type]
        self._like = next(head.lm_heads.parameters()).detach()[:0]
        self._predictions = predictions
        self._draws = draws
        self.sessions = HeldSessions(lambda: KeptKeys(0, 0, 0, self._like), max_bytes)

    def new_round(self, session: WorkerSession, request: DraftRequest, states: torch.Tensor | None) -> HeadRound:
        """Return a round."""
        return HeadRound(session, request, states)

    def begin(self, begun: HeadRound) -> None:
        """Keep the latest state that was observed."""
        held, observations = begun.held, begun.request.observations
        if observations is None or begun.states is None:
            return
        known = held.latest[0] if held.latest else -1
        positions = new_positions(observations.start, begun.states, known, len(held.tokens))
        if positions:
            held.latest = positions[-1], begun.states[positions[-1] - observations.start].clone()

    def step(self, rounds: Sequence[HeadRound]) -> None:
        """Run one forward for all rounds, and end them."""
        for one in rounds:
            if not one.num_draft_tokens or one.held.latest is None or one.held.latest[0] != len(one.held.tokens) - 2:
                one.finish(NOTHING)
        if drafting := [one for one in rounds if not one.done]:
            num_depths = min(len(self._blocks), max(one.num_draft_tokens for one in drafting))
            states = torch.cat([one.held.latest[1] for one in drafting if one.held.latest])
            end_rounds(drafting, self._logits(states, num_depths), self._predictions, self._draws)

    def _logits(self, states: torch.Tensor, num_depths: int) -> torch.Tensor:
        """Return logits [N, num_depths, draft_vocab_size] from states [N, hidden_size]."""
        states = states.to(self._like.device, self._like.dtype)
        outputs = [self._output(states, depth) for depth in range(num_depths)]
        if len(self._lm_heads) == 1:
            rows = self._lm_heads[0](torch.cat(outputs))
            return torch.stack(rows.split(len(states)), dim=1)
        return torch.stack([head(output) for head, output in zip(self._lm_heads, outputs, strict=False)], dim=1)

    def _output(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        for layer in self._blocks[depth]:
            hidden = hidden + functional.silu(layer(hidden))
        return hidden


def _linear(layer: object) -> torch.nn.Linear:
    assert isinstance(layer, ResidualBlock)
    return layer.linear
