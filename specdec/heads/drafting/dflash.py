"""Runs DFlash heads: in one go, what was observed joins the context and the next block is predicted."""

from collections.abc import Sequence

import torch

from specdec.drafting.request import DraftRequest
from specdec.engine import Quantization
from specdec.exact.values import ObservationRequest
from specdec.heads.dflash import DFlashHead
from specdec.heads.drafting.depths import end_rounds
from specdec.heads.drafting.fast import AngleTable, FastLayer, Heads, Norm, attend, joined
from specdec.heads.drafting.kept import KeptKeys
from specdec.heads.drafting.observed import new_positions
from specdec.heads.drafting.predictions import Predictions
from specdec.heads.drafting.rounds import NOTHING, HeadRound
from specdec.heads.drafting.sessions import HeldSessions
from specdec.serving.session_stream import WorkerSession


class DFlashRound(HeadRound):
    """A round: what joins its context, and where its block begins."""

    positions: list[int]  # whose states join the context

    @property
    def anchor(self) -> int:
        """Position of the last committed token."""
        return len(self.held.tokens) - 1

    @property
    def can_draft(self) -> bool:
        """Whether something is wanted, and the states just before the block will be there."""
        last = self.positions[-1] if self.positions else self.held.kept.last
        return self.num_draft_tokens > 0 and self.anchor > 0 and last == self.anchor - 1

    def new_states(self) -> torch.Tensor | None:
        """Return the states [N, layers, hidden_size] that join the context."""
        if not self.positions or self.states is None or self.request.observations is None:
            return None
        start = self.request.observations.start
        return self.states[torch.tensor([position - start for position in self.positions])]


class DFlashRunner:
    """Drafts with a DFlash head."""

    num_ahead = 0

    def __init__(
        self,
        head: DFlashHead,
        predictions: Predictions,
        draws: bool,
        max_bytes: int,
        quantization: Quantization | None = None,
    ) -> None:
        """`draws`: chains of drawn tokens, not trees of chosen ones."""
        self.observations = ObservationRequest(hidden_layers=head.shape.aux_layers)
        self.hidden_size = head.shape.target_hidden_size
        self._layers = [FastLayer(layer, quantization) for layer in head.layers]  # type: ignore[arg-type]
        self._fc = joined(head.fc, quantization=quantization)
        self._lm_head = joined(head.lm_head, quantization=quantization)
        self._state_norm, self._norm = Norm(head.hidden_norm), Norm(head.norm)
        self._embeddings = head.embed_tokens.weight
        self._angles = AngleTable(head.rotary, self._embeddings)
        self._block_size, self._mask_token = head.shape.block_size, head.shape.mask_token_id
        self._predictions = predictions
        self._draws = draws
        self.sessions = HeldSessions(self._new_keys, max_bytes)

    def _new_keys(self) -> KeptKeys:
        layer = self._layers[0]
        return KeptKeys(len(self._layers), layer.num_kv_heads, layer.head_size, self._embeddings)

    def new_round(self, session: WorkerSession, request: DraftRequest, states: torch.Tensor | None) -> DFlashRound:
        """Return a round."""
        return DFlashRound(session, request, states)

    def begin(self, begun: DFlashRound) -> None:
        """Find the positions whose states join the context."""
        held, observations = begun.held, begun.request.observations
        begun.positions = []
        if observations is not None and begun.states is not None:
            begun.positions = new_positions(observations.start, begun.states, held.kept.last, len(held.tokens))

    def step(self, rounds: Sequence[DFlashRound]) -> None:
        """Run one forward for all rounds, and end them."""
        for one in rounds:
            if not one.positions and not one.can_draft:
                one.finish(NOTHING)
        if computing := [one for one in rounds if not one.done]:
            self._forward(computing)
        for one in computing:
            if not one.done:
                one.finish(NOTHING)

    def _forward(self, rounds: list[DFlashRound]) -> None:
        """Compute the new context and the blocks of all rounds; end those that draft."""
        states = [states for one in rounds if (states := one.new_states()) is not None]
        context = self._joined_states(torch.cat(states)) if states else self._embeddings[:0]
        drafting = [one for one in rounds if one.can_draft]
        blocks = self._blocks(drafting)
        places = [place for one in rounds for place in one.positions]
        places += [one.anchor + offset for one in drafting for offset in range(self._block_size)]
        angles = self._angles.at(places)
        for number, layer in enumerate(self._layers):
            heads = layer.project(torch.cat((context, layer.input_norm(blocks))), angles)
            self._keep(number, rounds, heads)
            own = Heads(*(rows[len(context) :] for rows in heads))
            blocks = layer.finish(blocks, self._attended(number, drafting, own))
        for one in rounds:
            one.held.kept.keep(one.positions)
        if drafting:
            self._end(drafting, blocks)

    def _joined_states(self, states: torch.Tensor) -> torch.Tensor:
        rows = self._fc(states.to(self._embeddings.device, self._embeddings.dtype).flatten(1))
        return self._state_norm(rows)

    def _blocks(self, rounds: list[DFlashRound]) -> torch.Tensor:
        """Return the embeddings [rounds * block_size, hidden_size] of blocks: a token, then masks."""
        masks = [self._mask_token] * (self._block_size - 1)
        tokens = [token for one in rounds for token in (one.held.tokens[-1], *masks)]
        return self._embeddings[torch.tensor(tokens, dtype=torch.long, device=self._embeddings.device)]

    def _keep(self, number: int, rounds: list[DFlashRound], heads: Heads) -> None:
        """Write the keys of what joins each context."""
        begin = 0
        for one in rounds:
            end, kept = begin + len(one.positions), one.held.kept
            kept.reserve(len(one.positions) + self._block_size)
            kept.write(number, len(kept), heads.key[begin:end], heads.value[begin:end])
            begin = end

    def _attended(self, number: int, rounds: list[DFlashRound], heads: Heads) -> torch.Tensor:
        """Return what the blocks see: their context, and all of themselves."""
        if not rounds:
            return heads.query
        attended = []
        for one, query, key, value in zip(
            rounds, *(torch.split(rows, self._block_size) for rows in heads), strict=True
        ):
            kept, begin = one.held.kept, len(one.held.kept) + len(one.positions)
            kept.write(number, begin, key, value)
            attended.append(attend(query, *kept.read(number, begin + self._block_size)))
        return torch.cat(attended)

    def _end(self, rounds: list[DFlashRound], blocks: torch.Tensor) -> None:
        """Predict the tokens of the masks that are wanted, and end the rounds."""
        num_depths = min(self._block_size - 1, max(one.num_draft_tokens for one in rounds))
        masks = blocks.view(len(rounds), self._block_size, -1)[:, 1 : 1 + num_depths]
        logits = self._lm_head(self._norm(masks.flatten(0, 1)))
        end_rounds(rounds, logits.view(len(rounds), num_depths, -1), self._predictions, self._draws)
