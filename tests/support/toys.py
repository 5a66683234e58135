"""Toy models with known distributions: Markov draft and target over a few tokens, run through the production loop.

They use the production sampling code, keys and supports; only the models are matrices.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.shared_statistics import SharedStatistics
from coordinator.generation import Generation, Limits, Round
from coordinator.joint_drafter import JointDrafter
from coordinator.rounds import DEFAULT_OPTIONS, Drafted, RoundParts, Scored, ScoreOptions, run_rounds
from specdec.exact import randomness
from specdec.exact.acceptance import AcceptanceRule, TokenRule
from specdec.exact.lookup import TextLookup
from specdec.exact.randomness import Key, Purpose
from specdec.exact.sampling import SamplingContext, draw, draw_dense, next_token_distributions, sparse_distributions
from specdec.exact.tree import depths_of, path_to
from specdec.exact.values import Observations, Proposal, Scores, SparseDistribution, TargetDistribution, one_hot
from specdec.outside import Outside
from specdec.types import SamplingParams

VOCAB_SIZE = 5
NUM_TOKENS = 4
MAX_DRAFT_TOKENS = 5  # for automatic K
TOY = "toy"  # the drafter's name
DRAFT_S, SCORE_S = 0.01, 0.05  # the cost of a draft token and of a score: K = 3 is best at the prior rate
PROMPT = (0, 1, 4, 2, 1, 3, 0)  # every token occurs with a successor, so n-gram lookup always finds a draft

History = tuple[int, ...]
Answer = tuple[list[list[float]], torch.Tensor]  # target probabilities on the unions, distributions off them [N + 1, V]


def markov_logits(seed: int, size: int = VOCAB_SIZE, scale: float = 1.5) -> torch.Tensor:
    """Return logits [V, V] of a Markov chain: row t is the distribution after token t."""
    return torch.tensor(np.random.default_rng(seed).normal(0, scale, (size, size)), dtype=torch.float32)


@dataclass(slots=True)
class ToyModel:
    """A Markov chain under sampling parameters; a distribution is computed once for each history (for penalties)."""

    logits: torch.Tensor  # [V, V]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    support_mass: float = 1.0
    support_max: int = VOCAB_SIZE
    prompt: History = PROMPT
    _distributions: dict[History, torch.Tensor] = field(default_factory=dict)
    _sparse: dict[History, SparseDistribution] = field(default_factory=dict)
    answers: dict[Hashable, Answer] = field(default_factory=dict)

    def distribution(self, history: History) -> torch.Tensor:
        """Return the next-token distribution [V] after a history."""
        if history not in self._distributions:
            num_prompt = len(self.prompt)
            context = SamplingContext(self.sampling, history[:num_prompt], history[num_prompt:])
            logits = self.logits[history[-1]][None]
            self._distributions[history] = next_token_distributions(logits, [context], logits.shape[-1])[0]
        return self._distributions[history]

    def sparse(self, history: History) -> SparseDistribution:
        """Return the distribution as a drafter ships it."""
        if history not in self._sparse:
            distribution = self.distribution(history)[None]
            self._sparse[history] = sparse_distributions(distribution, self.support_mass, self.support_max)[0]
        return self._sparse[history]


# ---- drafters


@dataclass(slots=True)
class ToyDrafter:
    """Drafts a chain from a toy model."""

    model: ToyModel
    seed: int

    @property
    def available(self) -> bool:
        """Whether it is worth asking now."""
        return True

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return K tokens, each with its distribution."""
        tokens: History = ()
        distributions: tuple[SparseDistribution, ...] = ()
        for index in range(num_draft_tokens):
            distributions += (self.distribution((*committed, *tokens)),)
            tokens += (self.draw(distributions[-1], len(committed), index),)
        return Drafted(Proposal(tokens, distributions), DRAFT_S * num_draft_tokens)

    def distribution(self, history: History) -> SparseDistribution:
        """Return the distribution that is drawn from and shipped."""
        return self.model.sparse(history)

    def draw(self, distribution: SparseDistribution, committed_length: int, index: int) -> int:
        """Draw a token of the proposal."""
        return draw(distribution, randomness.uniform(self.seed, Key(committed_length, index, Purpose.DRAFT)))

    def observe(self, observations: Observations) -> None:
        """Ignore observations."""


@dataclass(slots=True)
class RepeatingDrafter(ToyDrafter):
    """Drafts as n-gram lookup does: the token that last followed the last one, one-hot; else nothing."""

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return at most K tokens with one-hot distributions."""
        tokens: History = ()
        while len(tokens) < num_draft_tokens:
            follower = last_follower((*committed, *tokens))
            if follower is None:
                break
            tokens += (follower,)
        return Drafted(Proposal(tokens, tuple(map(one_hot, tokens))), DRAFT_S)


def last_follower(history: Sequence[int]) -> int | None:
    """Return the token after the last earlier occurrence of the history's last token."""
    followers = [after for before, after in pairwise(history) if before == history[-1]]
    return followers[-1] if followers else None


@dataclass(slots=True)
class FlakyDrafter(ToyDrafter):
    """Drafts nothing in every second call, and sometimes only one token, as if its worker were unavailable."""

    calls: int = 0

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return a proposal, a shorter one, or none."""
        self.calls += 1
        if (self.seed + self.calls) % 2:
            return Drafted()
        most = min(num_draft_tokens, 1) if self.seed % 3 == 0 else num_draft_tokens
        return await ToyDrafter.propose(self, committed, most)


@dataclass(slots=True)
class TreeDrafter(ToyDrafter):
    """Drafts a tree of K tokens, breadth first; siblings are drawn, deterministic, and drawn again.

    The first child of a position is drawn, the second is the most probable of the other tokens, chosen without a draw,
    and the third is drawn again and may repeat the first.
    """

    branching: tuple[int, ...] = (3, 2, 1)  # children of a position, by depth

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return a tree of at most K tokens."""
        tokens: list[int] = []
        distributions: list[SparseDistribution] = []
        parents: list[int] = []
        texts: list[History] = [()]  # before each position; grows with the tree
        for position, text in enumerate(texts):
            siblings: list[int] = []
            for rank in range(min(self.width(len(text)), num_draft_tokens - len(tokens))):
                distribution = self.candidate((*committed, *text), rank, siblings)
                siblings.append(self.draw(distribution, len(committed), len(tokens)))
                tokens.append(siblings[-1])
                distributions.append(distribution)
                parents.append(position)
                texts.append((*text, siblings[-1]))
        return Drafted(Proposal(tuple(tokens), tuple(distributions), tuple(parents)), DRAFT_S * len(tokens))

    def width(self, depth: int) -> int:
        """Return the number of children of a position."""
        return self.branching[depth] if depth < len(self.branching) else 0

    def candidate(self, history: History, rank: int, siblings: Sequence[int]) -> SparseDistribution:
        """Return the distribution of a position's next child."""
        distribution = self.distribution(history)
        others = [token for token in distribution.token_ids if token not in siblings]  # most probable first
        return one_hot(others[0]) if rank == 1 and others else distribution


@dataclass(slots=True)
class StemDrafter(TreeDrafter):
    """Drafts a chain of two tokens, then branches."""

    branching: tuple[int, ...] = (1, 1, 2, 1)


@dataclass(slots=True)
class MergingDrafter(ToyDrafter):
    """Merges a drawn chain with n-gram lookup."""

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return one tree."""
        parts = [RepeatingDrafter(self.model, self.seed), ToyDrafter(self.model, self.seed)]
        return await JointDrafter(parts).propose(committed, num_draft_tokens, stop_below)


@dataclass(slots=True)
class ObservingDrafter(ToyDrafter):
    """Drafts with observations: half the mass goes to the token that the target last found most probable there."""

    observed: dict[int, int] = field(default_factory=dict)  # a token, and the target's most probable token after it
    text: list[int] = field(default_factory=list)

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return K tokens."""
        self.text = committed
        return await ToyDrafter.propose(self, committed, num_draft_tokens)

    def observe(self, observations: Observations) -> None:
        """Learn from observations."""
        observed = self.text[observations.start : observations.end]
        assert len(observed) == len(observations), "observations past the committed tokens"
        for token, top in zip(observed, observations.top_tokens, strict=True):
            self.observed[token] = int.from_bytes(top, "little")

    def distribution(self, history: History) -> SparseDistribution:
        """Return the model's distribution, tilted to what was observed after the last token."""
        distribution = self.model.sparse(history)
        if history[-1] not in self.observed:
            return distribution
        probs = dict(
            zip(distribution.token_ids, np.asarray(distribution.probs, np.float32) / np.float32(2), strict=True)
        )
        top = self.observed[history[-1]]
        probs[top] = probs.get(top, np.float32(0)) + np.float32(0.5)
        return SparseDistribution(tuple(probs), tuple(map(float, probs.values())))


@dataclass(slots=True)
class LosingDrafter(ObservingDrafter):
    """Loses most observations, and sometimes clears what it learned."""

    def observe(self, observations: Observations) -> None:
        """Learn from every third observation."""
        if observations.start % 3 == 0:
            self.observed.clear()
            ObservingDrafter.observe(self, observations)


# ---- the target


@dataclass(slots=True)
class ToyScorer:
    """Scores with a toy model."""

    matches: ClassVar[bool] = True  # chosen draft tokens

    model: ToyModel
    seed: int

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        """Return the target's answers at the N + 1 positions."""
        return self.scored(committed, proposal)

    def known(self, committed: Sequence[int], proposal: Proposal) -> Scored | None:
        """Return nothing: each round is asked for."""
        return None

    def scored(self, committed: Sequence[int], proposal: Proposal) -> Scored:
        """Return the answers, without waiting; chosen draft tokens are matched."""
        if self.matches and proposal and proposal.is_chosen:
            return Scored(self.matched(committed, proposal), SCORE_S)
        probs, outside = self.answer(tuple(committed), proposal)
        tokens, masses = (each.tolist() for each in draw_dense(outside, self.draws(len(committed), len(outside))))
        return Scored(Scores(tuple(map(TargetDistribution, probs, masses, tokens))), SCORE_S)

    def matched(self, committed: Sequence[int], proposal: Proposal) -> Scores:
        """Return what the target draws itself at each position."""
        depths = [0, *depths_of(proposal.tree)]
        draws = randomness.own_draws(self.seed, len(committed), max(depths) + 1)
        whole = self.distributions(tuple(committed), proposal)
        tokens = draw_dense(whole, [draws[depth].uniform for depth in depths])[0].tolist()
        return Scores(tuple(TargetDistribution((), 1.0, token) for token in tokens), is_matched=True)

    def answer(self, committed: History, proposal: Proposal) -> Answer:
        """Return what does not depend on the seed; cached, because histories repeat."""
        unions = proposal.unions()
        key = committed, proposal.tokens, proposal.parents, tuple(unions)
        if key not in self.model.answers:
            distributions = self.distributions(committed, proposal)
            supports = [list(union) for union in unions]
            pairs = zip(distributions, supports, strict=True)
            probs = [distribution[support].tolist() for distribution, support in pairs]
            self.model.answers[key] = probs, self.tails(distributions, supports)
        return self.model.answers[key]

    def distributions(self, committed: History, proposal: Proposal) -> torch.Tensor:
        """Return the target's distribution at each position [N + 1, V]."""
        paths = [path_to(position, proposal.tree) for position in range(len(proposal) + 1)]
        texts = [(*committed, *(proposal.tokens[index] for index in path)) for path in paths]
        return torch.stack([self.model.distribution(text) for text in texts])

    def tails(self, distributions: torch.Tensor, supports: list[list[int]]) -> torch.Tensor:
        """Return the distributions outside the supports [N + 1, V]."""
        outside = distributions.clone()
        for index, support in enumerate(supports):
            outside[index, support] = 0
        return outside

    def draws(self, committed_length: int, count: int) -> Sequence[float]:
        """Return the uniforms of the tail tokens."""
        return randomness.uniforms(self.seed, committed_length, count, Purpose.TAIL)


class OlderScorer(ToyScorer):
    """Answers chosen draft tokens as it does drawn ones, for a rule to accept."""

    matches = False


@dataclass(slots=True)
class ObservedScorer(ToyScorer):
    """Also observes its most probable next token at the last committed token and at each draft token."""

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        """Return the answers with observations."""
        scored = await ToyScorer.score(self, committed, proposal, options)
        if not options.observes:
            return scored
        tops = self.distributions(tuple(committed), proposal).argmax(dim=-1).tolist()
        observations = Observations(len(committed) - 1, top_tokens=tuple(top.to_bytes(4, "little") for top in tops))
        return replace(scored, scores=replace(scored.scores, observations=observations))


# ---- generations


TIMELESS = Outside(now_s=lambda: 0.0)  # so that a choice of K does not depend on how fast this machine is


class NoText:
    """A detokenizer without text."""

    def push(self, token: int) -> str:
        """Return nothing."""
        return ""


def new_generation(model: ToyModel, seed: int, num_tokens: int) -> Generation:
    """Return a generation of exactly so many tokens."""
    limits = Limits(num_tokens, context_length=1000)
    return Generation(model.prompt, replace(model.sampling, seed=seed), limits, NoText())


class GenerationResult(NamedTuple):
    """The tokens and the acceptance counts of a finished generation."""

    tokens: History
    num_drafted: int  # in the first round
    num_accepted: int  # in the first round
    total_drafted: int
    total_accepted: int


def new_chooser(num_draft_tokens: int | None, shared: SharedStatistics | None = None) -> PlanChooser:
    """Return the chooser of a session with one drafter, at a fixed K or at any up to MAX_DRAFT_TOKENS."""
    return PlanChooser(shared or SharedStatistics(), [TOY], MAX_DRAFT_TOKENS, num_draft_tokens)


async def generate_text(
    drafter: ToyDrafter,
    scorer: ToyScorer,
    chooser: PlanChooser,
    num_tokens: int = NUM_TOKENS,
    rule: AcceptanceRule | None = None,
) -> GenerationResult:
    """Generate through the production loop."""
    return await generate_with({TOY: drafter}, scorer, chooser, num_tokens, rule)


async def generate_with(
    drafters: Mapping[str, ToyDrafter],
    scorer: ToyScorer,
    chooser: PlanChooser,
    num_tokens: int = NUM_TOKENS,
    rule: AcceptanceRule | None = None,
    lookup: TextLookup | None = None,
) -> GenerationResult:
    """Generate through the production loop, with several drafters, and with what the coordinator looks up."""
    generation = new_generation(scorer.model, scorer.seed, num_tokens)
    rounds: list[Round] = []

    async def commit(finished_round: Round) -> None:
        rounds.append(finished_round)

    parts = RoundParts(drafters, scorer, rule or TokenRule(), chooser, TIMELESS, lookup=lookup)
    await run_rounds(generation, parts, commit)
    first, last = rounds[0].statistics, rounds[-1].statistics
    return GenerationResult(
        tuple(entry.token for entry in generation.emitted),
        first.num_draft_tokens,
        first.num_accepted_tokens,
        last.num_draft_tokens,
        last.num_accepted_tokens,
    )


@dataclass
class DrawRecorder:
    """Records the key of every draw."""

    draw: Callable[[int, Key], float] = randomness.uniform
    key_of: Callable[[Key], Key] = lambda key: key
    entries: list[tuple[int, Key]] = field(default_factory=list)

    def uniform(self, seed: int, key: Key) -> float:
        """Draw, and record the key."""
        key = self.key_of(key)
        self.entries.append((seed, key))
        return self.draw(seed, key)

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> "DrawRecorder":
        """Record every draw of the production code and the toys."""
        monkeypatch.setattr(randomness, "uniform", self.uniform)
        monkeypatch.setattr(randomness, "uniforms", self.uniforms)
        return self

    def uniforms(self, seed: int, committed_length: int, count: int, purpose: Purpose) -> tuple[float, ...]:
        """Draw one by one what production draws at once (tests/exactness/test_randomness.py), and record the keys."""
        return tuple(self.uniform(seed, Key(committed_length, position, purpose)) for position in range(count))


# ---- what is shipped


def random_distributions(count: int, vocab_size: int = 1000) -> list[SparseDistribution]:
    """Return draft distributions of every entropy, as a draft worker makes them."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-1, 2, count)[:, None]
    logits = torch.randn(count, vocab_size, generator=generator) * scale
    contexts = [SamplingContext(SamplingParams())] * count
    return sparse_distributions(next_token_distributions(logits, contexts, vocab_size), 0.999, 64)


def num_redrawn(drawn: Sequence[SparseDistribution], shipped: Sequence[SparseDistribution]) -> int:
    """Return how many draws differ when they are repeated from the shipped distributions."""
    uniforms = [(one, other, at) for one, other in zip(drawn, shipped, strict=True) for at in sharp_uniforms(one)]
    return sum(draw(one, at) != draw(other, at) for one, other, at in uniforms)


def sharp_uniforms(distribution: SparseDistribution) -> list[float]:
    """Return random uniforms, and those nearest to where the drawn token changes."""
    changes = np.cumsum(np.asarray(distribution.probs, dtype=np.float64)) / np.sum(distribution.probs)
    near = [np.nextafter(changes, 0), changes, np.nextafter(changes, 1)]
    uniforms = [*np.concatenate(near).tolist(), *randomness.uniforms(3, 9, 5, Purpose.DRAFT)]
    return [at for at in uniforms if 0 <= at < 1]
