"""Planted bugs in the real loop: keys, positions and shipped distributions; test_mutants.py must reject them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.plans import NOTHING, DraftPlan, Found, Missed
from coordinator.choosing.shared_statistics import SharedStatistics
from coordinator.rounds import Drafted, RoundParts
from specdec.exact import randomness
from specdec.exact.acceptance import TokenRule
from specdec.exact.lookup import Match, continued
from specdec.exact.randomness import Key, Purpose
from specdec.exact.sampling import draw
from specdec.exact.values import Proposal, Scores, SparseDistribution, Uniforms, Verdict
from tests.support.enumeration import prob_of
from tests.support.toys import DRAFT_S, TOY, History, ToyDrafter, ToyScorer, TreeDrafter

# ---- rules


class ShareOneUniform(TokenRule):
    """Tests all tokens with the first one's uniform."""

    def accept(self, proposal: Proposal, scores: Scores, uniforms: Uniforms) -> Verdict:
        """Return the verdict of the production rule on fewer uniforms."""
        return TokenRule().accept(proposal, scores, Uniforms([*uniforms.accept[:1]] * len(proposal), uniforms.close))


# ---- drafters


@dataclass(slots=True)
class AcceptKeyDrafter(ToyDrafter):
    """Draws with the keys of the tests (purposes DRAFT and ACCEPT share)."""

    def draw(self, distribution: SparseDistribution, committed_length: int, index: int) -> int:
        """Draw with the wrong purpose."""
        return draw(distribution, randomness.uniform(self.seed, Key(committed_length, index, Purpose.ACCEPT)))


@dataclass(slots=True)
class ArgmaxDrafter(ToyDrafter):
    """Drafts the most probable token with its softmax distribution."""

    def draw(self, distribution: SparseDistribution, committed_length: int, index: int) -> int:
        """Draw nothing."""
        return distribution.token_ids[int(np.argmax(distribution.probs))]


@dataclass(slots=True)
class DiscardingDrafter(ToyDrafter):
    """Ends the proposal before an unlikely token, after drawing it."""

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return fewer tokens than were drawn."""
        proposal = (await ToyDrafter.propose(self, committed, num_draft_tokens)).proposal
        steps = zip(proposal.tokens, proposal.distributions, strict=True)
        sure = [prob_of(distribution, token) >= 0.25 for token, distribution in steps]
        size = (*sure, False).index(False)
        return Drafted(Proposal(proposal.tokens[:size], proposal.distributions[:size]), DRAFT_S)


@dataclass(slots=True)
class SortingDrafter(TreeDrafter):
    """Draws three siblings, and proposes them in the order of their probabilities."""

    branching: tuple[int, ...] = (3,)

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return sorted siblings."""
        proposal = (await TreeDrafter.propose(self, committed, num_draft_tokens)).proposal
        pairs = list(zip(proposal.tokens, proposal.distributions, strict=True))
        pairs.sort(key=lambda pair: -prob_of(pair[1], pair[0]))
        tokens, distributions = tuple(token for token, _ in pairs), tuple(distribution for _, distribution in pairs)
        return Drafted(Proposal(tokens, distributions, proposal.parents), DRAFT_S)

    def candidate(self, history: History, rank: int, siblings: Sequence[int]) -> SparseDistribution:
        """Draw every sibling from the same distribution."""
        return self.distribution(history)


@dataclass(slots=True)
class SiblingKeyDrafter(TreeDrafter):
    """Draws all siblings at a depth with the same key."""

    branching: tuple[int, ...] = (3,)

    def draw(self, distribution: SparseDistribution, committed_length: int, index: int) -> int:
        """Draw with the key of the first token."""
        return ToyDrafter.draw(self, distribution, committed_length, 0)


# ---- the coordinator's own lookups


def continued_by_chance(tokens: Sequence[int], match: Match, count: int) -> Proposal:
    """Give what was looked up half of the mass, as if it had been drawn."""
    chain = continued(tokens, match, count).tokens
    return Proposal(chain, tuple(SparseDistribution((token, (token + 1) % 5), (0.5, 0.5)) for token in chain))


async def drafted_if_agreed(
    parts: RoundParts, committed: list[int], chosen: DraftPlan, match: Match, offer: Proposal
) -> tuple[DraftPlan, Drafted, Missed | None]:
    """Draw a draft, and keep it only where it begins as what was looked up does; else take that."""
    if chosen.drafter is None:
        return chosen, Drafted(), None
    drafted = await parts.drafters[TOY].propose(committed, 3)
    looked_up = continued(committed, match, 3) if match.num_tokens else drafted.proposal
    is_same = looked_up.tokens[:1] == drafted.proposal.tokens[:1]
    return chosen, drafted if is_same else Drafted(looked_up), None


# ---- the target


@dataclass(slots=True)
class CloseKeyScorer(ToyScorer):
    """Draws tail tokens with the closing key (purposes CLOSE and TAIL share)."""

    def draws(self, committed_length: int, count: int) -> Sequence[float]:
        """Draw with the wrong purpose."""
        return randomness.uniforms(self.seed, committed_length, count, Purpose.CLOSE)


@dataclass(slots=True)
class EarlyBonusScorer(ToyScorer):
    """Takes the bonus distribution from the position before."""

    def distributions(self, committed: History, proposal: Proposal) -> torch.Tensor:
        """Return K + 1 distributions, the last one position too early."""
        distributions = ToyScorer.distributions(self, committed, proposal)
        return torch.cat([distributions[:-1], distributions[-2:-1]]) if len(proposal) else distributions


@dataclass(slots=True)
class WholeTailScorer(ToyScorer):
    """Draws tail tokens from the whole distribution."""

    def tails(self, distributions: torch.Tensor, supports: list[list[int]]) -> torch.Tensor:
        """Return the whole distributions."""
        return distributions


@dataclass(slots=True)
class ChainScorer(ToyScorer):
    """Answers at each position as if all tokens before it were its prefix."""

    def distributions(self, committed: History, proposal: Proposal) -> torch.Tensor:
        """Return the distributions of a chain."""
        return ToyScorer.distributions(self, committed, Proposal((0, *proposal.tokens)))[1:]


# ---- keys and draft lengths


def by_position(key: Key) -> Key:
    """Return the key of an absolute position: the keys of rejected draft tokens are reused.

    Exact as long as nothing depends on rejected tokens; see PlanFromRejected.
    """
    return Key(0, key.committed_length + key.position, key.purpose)


class PlanFromRejected(PlanChooser):
    """Chooses K from the tokens of the last proposal, rejected ones too. Exact, unless keys come again."""

    def __init__(self) -> None:
        super().__init__(SharedStatistics(), [TOY], maximum=3)
        self.last = Proposal()

    def choose(
        self, remaining_tokens: int, available: Iterable[str] | None = None, found: Found = NOTHING
    ) -> DraftPlan:
        """Return K: none after a proposal whose second token came out unlikely."""
        steps = list(zip(self.last.tokens, self.last.distributions, strict=True))
        unlikely = any(prob_of(distribution, token) < 0.4 for token, distribution in steps[1:2])
        return DraftPlan(TOY, min(0 if unlikely else 3, max(remaining_tokens - 1, 0)))


@dataclass(slots=True)
class RememberingDrafter(ToyDrafter):
    """Records its drafts for PlanFromRejected."""

    chooser: PlanFromRejected = field(default_factory=PlanFromRejected)

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Draft, and record the tokens."""
        drafted = await ToyDrafter.propose(self, committed, num_draft_tokens)
        self.chooser.last = drafted.proposal
        return drafted
