"""Runs EAGLE-3 heads: first the pairs whose states were observed, then level after level of a tree, or of a chain.

Only pairs of the target's own states are kept. A pair of a candidate and the head's own output is scratch: it stands
behind those kept, and is overwritten by the next round.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.drafting.request import DraftRequest
from specdec.engine import Quantization
from specdec.engine.compiled_pairs import CompiledPairs, TextPairs
from specdec.exact.values import ObservationRequest, SparseDistribution
from specdec.heads.drafting.fast import AngleTable, FastLayer, Heads, Norm, attend, joined
from specdec.heads.drafting.kept import KeptKeys
from specdec.heads.drafting.observed import new_positions
from specdec.heads.drafting.predictions import Predictions
from specdec.heads.drafting.rounds import NOTHING, DrawnChain, HeadRound
from specdec.heads.drafting.sessions import HeldSessions
from specdec.heads.drafting.tree import MAX_CHILDREN, Candidates
from specdec.heads.eagle3 import Eagle3Head
from specdec.serving.session_stream import WorkerSession


class FastEagle3:
    """The network, as few steps as possible."""

    def __init__(self, head: Eagle3Head, quantization: Quantization | None) -> None:
        self._fc_norms = [Norm(norm) for norm in head.fc_norm or ()]  # type: ignore[arg-type]
        self._layer = FastLayer(head.layer, quantization)
        self._state_norm, self._output_norm = Norm(head.layer.hidden_norm), Norm(head.norm)
        self._normalises_residual = head.shape.norm_before_residual
        self._returns_normalised = head.shape.norm_output
        self._fc = joined(head.fc, quantization=quantization)
        self._lm_head = joined(head.lm_head, quantization=quantization)
        self._input_norm = Norm(head.input_norm) if head.input_norm is not None else None
        self.embeddings = head.embed_tokens.weight
        self._angles = AngleTable(head.rotary, self.embeddings)
        self._compiled = self._compiled_layer()

    def _compiled_layer(self) -> CompiledPairs | None:
        """Return the layer in one call; None where a part of it has no kernel of ours."""
        parts = self._layer.parts
        turns_all = self._angles.covering([0]).shape[1:] == (2, 1, parts.head_size)
        if not (parts.has_kernels and turns_all and self.embeddings.is_contiguous()):
            return None
        return CompiledPairs(parts, self.embeddings, self._state_norm.parts, self._normalises_residual)

    def new_keys(self) -> KeptKeys:
        """Return room for one session's keys and values."""
        return KeptKeys(1, self._layer.num_kv_heads, self._layer.head_size, self.embeddings)

    def joined_states(self, states: torch.Tensor) -> torch.Tensor:
        """Return the target's states [N, layers, target_hidden_size] in the head's own width."""
        states = states.to(self.embeddings.device, self.embeddings.dtype)
        if self._fc_norms:
            states = torch.stack([norm(states[:, layer]) for layer, norm in enumerate(self._fc_norms)], dim=1)
        flat = states.flatten(1)
        rows: torch.Tensor = self._fc(self._input_norm(flat) if self._input_norm else flat)
        return rows

    def run(self, states: torch.Tensor, rounds: Sequence["Eagle3Round"]) -> torch.Tensor:
        """Return the layer's outputs [N, hidden_size] at the pairs of all rounds, and keep their keys and values.

        `states` [N, hidden_size] stand beside the pairs' tokens.
        """
        pairs = [one.pairs for one in rounds if one.pairs]
        tokens = [token for each in pairs for token in each.tokens]
        positions = [position for each in pairs for position in each.positions]
        if self._compiled is None:
            return self._run_in_steps(tokens, positions, states, rounds)
        texts = [_text_pairs(one, each) for one, each in zip(rounds, pairs, strict=True)]
        return self._compiled(tokens, positions, states, self._angles.covering(positions), texts)

    def _run_in_steps(
        self, tokens: list[int], positions: list[int], states: torch.Tensor, rounds: Sequence["Eagle3Round"]
    ) -> torch.Tensor:
        embedded = self.embeddings[torch.tensor(tokens, device=self.embeddings.device)]
        normalised = self._state_norm(states)
        rows = torch.cat((self._layer.input_norm(embedded), normalised), dim=-1)
        heads = self._layer.project(rows, self._angles.at(positions))
        attended, begin = [], 0
        for one in rounds:
            if one.pairs:
                part = Heads(*(rows[begin : begin + len(one.pairs)] for rows in heads))
                attended.append(_attended(one, one.pairs, part))
                begin += len(one.pairs)
        return self._layer.finish(normalised if self._normalises_residual else states, torch.cat(attended))

    def predict(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [N, draft_vocab_size] and the next pairs' states from the layer's output [N, hidden_size]."""
        normalised = self._output_norm(output)
        return self._lm_head(normalised), normalised if self._returns_normalised else output


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of one round that are computed next."""

    tokens: list[int]
    positions: list[int]
    states: torch.Tensor  # [N, layers, target_hidden_size], the target's, or [N, hidden_size], the head's own
    seen: list[list[int]] | None = None  # scratch entries that each sees; None: observed ones, which see those before

    @property
    def is_observed(self) -> bool:
        """Whether the states are the target's."""
        return self.seen is None

    def __len__(self) -> int:
        return len(self.tokens)


class Eagle3Round(HeadRound):
    """A round with its tree or chain in the making."""

    def __init__(self, session: WorkerSession, request: DraftRequest, states: torch.Tensor | None, draws: bool) -> None:
        super().__init__(session, request, states)
        self.chain = DrawnChain(session, request) if draws else None
        self.candidates = Candidates(request.num_draft_tokens, request.stop_below, request.guesses)
        self.pairs: Pairs | None = None  # to be computed
        self.expanded = [0]  # positions to predict after; 0: the root
        self.outputs: torch.Tensor | None = None  # [len(expanded), hidden_size], the layer's at these positions
        self._seen: dict[int, list[int]] = {0: []}  # by position: scratch entries that its pair sees
        self._num_scratch = 0

    @property
    def root(self) -> int:
        """Position of the last pair of two committed tokens."""
        return len(self.held.tokens) - 2

    @property
    def num_entries(self) -> int:
        """Entries that hold keys: those kept, and scratch."""
        return len(self.held.kept) + self._num_scratch

    def take_observed(self) -> None:
        """Prepare the pairs at which states arrived and that are not kept yet."""
        held, observations = self.held, self.request.observations
        if observations is None or self.states is None:
            return
        start, tokens = observations.start, held.tokens
        positions = new_positions(start, self.states, held.kept.last, len(tokens) - 1)
        if positions:
            states = self.states[torch.tensor([position - start for position in positions])]
            next_tokens = [tokens[position + 1] for position in positions]
            self.pairs = Pairs(next_tokens, positions, states)

    def note_computed(self, outputs: torch.Tensor) -> None:
        """Take the outputs [N, hidden_size] of `pairs`, whose keys are written."""
        assert self.pairs
        if self.pairs.is_observed:
            self.held.kept.keep(self.pairs.positions)
            self.held.latest = self.pairs.positions[-1], outputs[-1:].clone()
        else:
            self._num_scratch += len(self.pairs)
            self.outputs = outputs
        self.pairs = None

    def find_root(self) -> None:
        """Begin to draft after the last pair, or end where nothing is wanted or its state was lost."""
        latest = self.held.latest
        if not self.num_draft_tokens or latest is None or latest[0] != self.root:
            self.finish(NOTHING)
        else:
            self.outputs = latest[1]

    def paths(self) -> list[list[int]]:
        """Return the tokens on the way to each position to predict after; empty lists where none depends on them."""
        if not self.depends_on_path:
            return [[]] * len(self.expanded)
        if self.chain:
            return [self.chain.tokens]
        return [self.candidates.path(position) for position in self.expanded]

    def depths(self) -> list[int]:
        """Return the depth of each position to predict after, 0 of the root."""
        return [self.candidates.depths[position - 1] if position else 0 for position in self.expanded]

    def expand(self, positions: list[int], tokens: list[int], parents: list[int], states: torch.Tensor) -> None:
        """Go on with pairs of candidates and the states [N, hidden_size] that were predicted from at their parents."""
        for entry, (position, parent) in enumerate(zip(positions, parents, strict=True), start=self._num_scratch):
            self._seen[position] = [*self._seen[parent], entry]
        places = [self.root + len(self._seen[position]) for position in positions]
        self.expanded, self.outputs = positions, None
        self.pairs = Pairs(tokens, places, states, [self._seen[position] for position in positions])


def _mask(one: Eagle3Round, pairs: Pairs) -> torch.Tensor | None:
    """Return what each of a round's pairs sees, bool [N, entries]; None: everything."""
    num_kept, count = len(one.held.kept), len(pairs)
    if pairs.seen is None:
        return _causal(num_kept, count)
    num_scratch = one.num_entries - num_kept + count
    if count == 1 and len(pairs.seen[0]) == num_scratch:
        return None
    mask = np.zeros((count, num_kept + num_scratch), np.bool_)
    mask[:, :num_kept] = True
    for row, entries in enumerate(pairs.seen):
        mask[row, [num_kept + entry for entry in entries]] = True
    return torch.from_numpy(mask)


def _causal(num_before: int, count: int) -> torch.Tensor | None:
    """Return a mask [count, num_before + count] in which each sees all before it and itself."""
    if count == 1:
        return None
    return torch.ones(count, num_before + count, dtype=torch.bool).tril(num_before)


class Eagle3Runner:
    """Drafts with an EAGLE-3 head."""

    num_ahead = 1  # a pair has the token after its state

    def __init__(
        self,
        head: Eagle3Head,
        predictions: Predictions,
        draws: bool,
        max_bytes: int,
        quantization: Quantization | None = None,
    ) -> None:
        """`draws`: chains of drawn tokens, not trees of chosen ones."""
        self.observations = ObservationRequest(hidden_layers=head.shape.aux_layers)
        self.hidden_size = head.shape.target_hidden_size
        self._network = FastEagle3(head, quantization)
        self._predictions = predictions
        self._draws = draws
        self.sessions = HeldSessions(self._network.new_keys, max_bytes)

    def new_round(self, session: WorkerSession, request: DraftRequest, states: torch.Tensor | None) -> Eagle3Round:
        """Return a round."""
        return Eagle3Round(session, request, states, self._draws)

    def begin(self, begun: Eagle3Round) -> None:
        """Prepare the pairs that were observed."""
        begun.take_observed()

    def step(self, rounds: Sequence[Eagle3Round]) -> None:
        """Compute the pairs of all rounds, then predict after those that go on."""
        fresh = [one for one in rounds if one.outputs is None and one.expanded == [0]]
        if computing := sorted((one for one in rounds if one.pairs), key=lambda one: not one.pairs.is_observed):  # type: ignore[union-attr]
            self._compute(computing)
        for one in fresh:
            one.find_root()
        if drafting := [one for one in rounds if not one.done]:
            self._predict(drafting)

    def _compute(self, rounds: list[Eagle3Round]) -> None:
        """Run the layer over the pairs of all rounds, those of the target's states first."""
        pairs = [one.pairs for one in rounds if one.pairs]
        observed = [each.states for each in pairs if each.is_observed]
        own = [each.states for each in pairs if not each.is_observed]
        states = torch.cat(([self._network.joined_states(torch.cat(observed))] if observed else []) + own)
        outputs = self._network.run(states, rounds)
        for one, rows in zip(rounds, torch.split(outputs, [len(each) for each in pairs]), strict=True):
            one.note_computed(rows)

    def _predict(self, rounds: list[Eagle3Round]) -> None:
        """Predict after the positions of all rounds, and let each of them go on or end."""
        outputs = [one.outputs for one in rounds if one.outputs is not None]
        logits, states = self._network.predict(torch.cat(outputs))
        sizes = [len(one.expanded) for one in rounds]
        if self._draws:
            contexts = [one.context(path) for one in rounds for path in one.paths()]
            distributions = self._predictions.distributions(logits, contexts)
            for one, distribution, row in zip(rounds, distributions, torch.split(states, 1), strict=True):
                _draw(one, distribution, row)
            return
        contexts = [one.ranking(path) for one in rounds for path in one.paths()]
        width = min(MAX_CHILDREN, max(one.num_draft_tokens for one in rounds))
        races = [one.race(depth) for one in rounds for depth in one.depths()]
        tokens, probs = self._predictions.ranked(logits, contexts, width, races)
        begin = 0
        for one, rows in zip(rounds, torch.split(states, sizes), strict=True):
            end = begin + len(rows)
            _grow(one, tokens[begin:end], probs[begin:end], rows)
            begin = end


def _attended(one: Eagle3Round, pairs: Pairs, heads: Heads) -> torch.Tensor:
    """Write the keys of a round's pairs, and return what their queries see."""
    kept, begin = one.held.kept, one.num_entries
    kept.reserve(begin - len(kept) + len(pairs))
    kept.write(0, begin, heads.key, heads.value)
    keys, values = kept.read(0, begin + len(pairs))
    mask = _mask(one, pairs)
    return attend(heads.query, keys, values, None if mask is None else mask.to(keys.device))


def _text_pairs(one: Eagle3Round, pairs: Pairs) -> TextPairs:
    """Make room for the keys of a round's pairs, and return what the compiled layer reads of them."""
    kept, begin, count = one.held.kept, one.num_entries, len(pairs)
    num_kept = len(kept)
    kept.reserve(begin - num_kept + count)
    if pairs.seen is None:
        return TextPairs(*kept.storage(0), begin, range(begin + 1, begin + count + 1), [()] * count)
    others = [[num_kept + entry for entry in entries] for entries in pairs.seen]
    return TextPairs(*kept.storage(0), begin, [num_kept] * count, others)


def _draw(one: Eagle3Round, distribution: SparseDistribution, state: torch.Tensor) -> None:
    """Draw a chain's next token, and go on after it unless it is the last."""
    assert one.chain
    if not distribution.token_ids:
        return one.fail_not_finite()
    token = one.chain.draw_from(distribution)
    if one.chain.is_complete:
        return one.finish(one.chain.proposal())
    return one.expand([one.expanded[0] + 1], [token], one.expanded, state)


def _grow(one: Eagle3Round, tokens: list[list[int]], probs: list[list[float]], states: torch.Tensor) -> None:
    """Add the candidates after each position, and expand the promising ones, unless there are none."""
    candidates = one.candidates
    if any(math.isnan(row[0]) for row in probs):
        return one.fail_not_finite()
    for position, ids, chances in zip(one.expanded, tokens, probs, strict=True):
        candidates.add(position, ids, chances)
    positions = candidates.next_level()
    if not positions:
        return one.finish(candidates.proposal())
    parents = [candidates.parents[position - 1] for position in positions]
    rows = [one.expanded.index(parent) for parent in parents]
    return one.expand(
        positions, [candidates.tokens[position - 1] for position in positions], parents, states[torch.tensor(rows)]
    )
