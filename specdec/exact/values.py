"""The values of one round: proposal, scores, verdict. Frozen, checked once at the border (`codec.py`), trusted inside.

Number types are open on purpose: production distributions hold floats, the proofs run the same code on fractions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specdec.exact.tree import chain_parents, children_of, depths_of, union
from specdec.types import TokenOrigin

MAX_SUPPORT_TOKENS = 1024
MAX_OBSERVED_LAYERS = 8
MAX_TOP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A sparse next-token distribution: what was truncated, renormalised, drawn from and shipped."""

    token_ids: Sequence[int]  # [S], the support, each id once
    probs: Sequence[float]  # [S], > 0, summing to 1


def one_hot(token: int) -> SparseDistribution:
    """Return the distribution of a token that was chosen without a draw."""
    return SparseDistribution((token,), (1.0,))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree of N draft tokens, each with the distribution that it was drawn from; N = 0 is plain decoding."""

    tokens: tuple[int, ...] = ()  # [N]
    distributions: tuple[SparseDistribution, ...] = ()  # [N]; siblings may share one
    parents: tuple[int, ...] = ()  # [N], see tree.py; empty: a chain

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tree(self) -> tuple[int, ...]:
        """The parents, also of a chain."""
        return self.parents or chain_parents(len(self.tokens))

    @property
    def is_chain(self) -> bool:
        """Whether each token continues the one before it."""
        return not self.parents or self.parents == chain_parents(len(self.tokens))

    @property
    def is_chosen(self) -> bool:
        """Whether no token was drawn."""
        return all(len(distribution.token_ids) == 1 for distribution in self.distributions)

    @property
    def as_chosen(self) -> "Proposal":
        """The same tokens as if none had been drawn."""
        return self if self.is_chosen else replace(self, distributions=tuple(map(one_hot, self.tokens)))

    @property
    def depth(self) -> int:
        """The maximum number of tokens that can be accepted."""
        return len(self.tokens) if not self.parents else max(depths_of(self.parents))

    def children(self) -> list[list[int]]:
        """Return the indices of the tokens that continue each position, [N + 1]."""
        return children_of(self.tree)

    def unions(self) -> list[tuple[int, ...]]:
        """Return the token ids on which the target answers at each position, [N + 1]."""
        return list(map(self.union_at, self.children()))

    def union_at(self, children: Sequence[int]) -> tuple[int, ...]:
        """Return the token ids on which the target answers at a position with these children."""
        return union([self.distributions[child].token_ids for child in children])


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """The target's distribution at one position, as far as acceptance needs it."""

    support_probs: Sequence[float]  # [S], on the union of the supports of the position's children
    tail_mass: float  # mass outside that union, summed over the complement
    tail_token: int  # drawn from the distribution outside the union; meaningless where tail_mass is 0


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log probabilities of one position under the model's own distribution, in nats."""

    by_token: Mapping[int, float]  # every token that could be emitted here
    top: tuple[tuple[int, float], ...]  # the most probable tokens, best first


@dataclass(frozen=True, slots=True)
class ObservationRequest:
    """What a drafter wants to know about the target's forwards; the default asks for nothing."""

    hidden_layers: tuple[
        int, ...
    ] = ()  # l: the state after l layers; 0: the embeddings; all layers: what the head reads
    num_top_tokens: int = 0  # most probable tokens wanted at each position

    def __bool__(self) -> bool:
        return bool(self.hidden_layers) or self.num_top_tokens > 0


@dataclass(frozen=True, slots=True)
class Observations:
    """What the target computed at consecutive tokens, as bytes that the coordinator does not read."""

    start: int  # index of the first observed token, counted from the prompt's first
    hidden_states: tuple[bytes, ...] = ()  # one a token: bfloat16[layers asked for, hidden size]; empty: none asked for
    top_tokens: tuple[bytes, ...] = ()  # one a token: uint32[top tokens asked for]; empty: none asked for

    def __len__(self) -> int:
        return max(len(self.hidden_states), len(self.top_tokens))

    @property
    def end(self) -> int:
        """Index of the token after the last observed one."""
        return self.start + len(self)

    def followed_by(self, later: "Observations") -> "Observations":
        """Return both joined; where there is a gap between them, the later ones alone."""
        kept = later.start - self.start
        if not 0 < kept <= len(self):
            return later
        hidden, top = self.hidden_states[:kept], self.top_tokens[:kept]
        return Observations(self.start, hidden + later.hidden_states, top + later.top_tokens)

    def latest(self, count: int) -> "Observations":
        """Return the last `count` observations."""
        num_dropped = max(0, len(self) - count)
        if not num_dropped:
            return self
        return self.select(range(num_dropped, len(self))).moved(num_dropped)

    def moved(self, distance: int) -> "Observations":
        """Return the same observations `distance` tokens later."""
        return Observations(self.start + distance, self.hidden_states, self.top_tokens)

    def select(self, indices: Sequence[int]) -> "Observations":
        """Return the observations at these indices, which become consecutive."""
        hidden, top = self.hidden_states, self.top_tokens
        return Observations(
            self.start,
            tuple(hidden[index] for index in indices) if hidden else (),
            tuple(top[index] for index in indices) if top else (),
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """The target's answer to a proposal of N tokens."""

    positions: tuple[TargetDistribution, ...]  # [N + 1], see tree.py
    logprobs: tuple[PositionLogprobs, ...] = ()  # [N + 1], or empty where none were asked for
    observations: Observations | None = None  # of the last committed tokens, then of draft tokens
    observed: tuple[int, ...] | None = None  # the draft tokens that are observed, as indices, rising; None: all N
    is_matched: bool = False  # each position's token is drawn from its whole distribution; the draft was chosen


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a round ends: the draft tokens of `path`, then `next_token`."""

    path: tuple[int, ...]  # accepted tokens, from the root on, as indices into the proposal
    next_token: int
    next_origin: TokenOrigin

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens."""
        return len(self.path)


@dataclass(frozen=True, slots=True)
class Uniforms:
    """The coordinator's draws of one round."""

    accept: Sequence[float]  # [N], in [0, 1): one a draft token
    close: float  # in [0, 1)


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a worker's time went, in seconds."""

    queue_s: float = 0.0
    forward_s: float = 0.0
    total_s: float = 0.0
    num_forward_tokens: int = 0  # of all sessions in its last forward; 0: not known, or prompts were read in it
