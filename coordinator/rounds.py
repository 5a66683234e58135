"""The loop: draft, score, accept, commit, until the generation is done.

The next round runs while the last one's commit is in flight; only emission waits for the commit.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from coordinator.acceptance import AcceptanceRule
from coordinator.draft_length import DraftLength
from coordinator.generation import Generation, Round
from specdec.exact.values import Observations, Proposal, Scores, Verdict

MAX_FED_TOKENS = 40  # a round in which a worker had to read more tokens than a round commits includes a prefill


@dataclass(frozen=True, slots=True)
class Drafted:
    """A proposal and how long it took; empty where no draft worker answers."""

    proposal: Proposal = Proposal()  # noqa: RUF009  # frozen
    elapsed_s: float = 0.0
    num_fed: int = 1  # committed tokens that the worker had to read first


@dataclass(frozen=True, slots=True)
class Scored:
    """The target's answer and how long it took, as the coordinator saw it."""

    scores: Scores
    elapsed_s: float
    num_fed: int = 1  # committed tokens that the worker had to read first
    num_sessions: int = 1  # at the worker, waiting or in the forward


class RoundDrafter(Protocol):
    """Proposes draft tokens; may propose none."""

    async def propose(self, committed: list[int], num_draft_tokens: int) -> Drafted:
        """Return a tree of at most K tokens with the distributions that they were drawn from."""
        ...

    def observe(self, observations: Observations) -> None:
        """Receive what the target observed at committed tokens, to be sent with the next proposal's request."""
        ...


class RoundScorer(Protocol):
    """Scores a proposal with the target model."""

    async def score(self, committed: list[int], proposal: Proposal) -> Scored:
        """Return the target's distributions at the N + 1 positions of a proposal of N tokens."""
        ...


@dataclass(frozen=True, slots=True)
class RoundParts:
    """The parts of a session's rounds."""

    drafter: RoundDrafter
    scorer: RoundScorer
    rule: AcceptanceRule
    draft_length: DraftLength


async def run_rounds(generation: Generation, parts: RoundParts, publish: Callable[[Round], Awaitable[None]]) -> None:
    """Run rounds until the generation is done; `publish` commits a round, then lets clients see it.

    One commit at a time, in order; an exception from `publish` ends the loop. A commit in flight is always awaited.
    """
    committing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    committing.set_result(None)
    try:
        while not generation.done:
            played = await play_round(generation, parts)
            await asyncio.shield(committing)
            committing = asyncio.ensure_future(publish(played))
    finally:
        # shielded: cancelling this loop must not interrupt a commit
        await asyncio.shield(committing)


async def play_round(generation: Generation, parts: RoundParts) -> Round:
    """Draft, score, accept; return what is to be committed."""
    base_length = len(generation.committed)
    num_draft_tokens = parts.draft_length.choose(generation.remaining_tokens)
    drafted = await parts.drafter.propose(generation.committed, num_draft_tokens)
    proposal = drafted.proposal
    scored = await parts.scorer.score(generation.committed, proposal)
    verdict = parts.rule.accept(proposal, scored.scores, generation.uniforms(len(proposal)))
    played = generation.advance(proposal, scored.scores, verdict, drafted.elapsed_s, scored.elapsed_s)

    if scored.scores.observations:
        parts.drafter.observe(committed_observations(scored.scores.observations, proposal, verdict))
    if max(drafted.num_fed, scored.num_fed) <= min(MAX_FED_TOKENS, base_length - 1):
        parts.draft_length.costs.observe(len(proposal), drafted.elapsed_s, scored.elapsed_s, scored.num_sessions)
    parts.draft_length.observe(proposal.depth, verdict.num_accepted)
    return played


def committed_observations(observations: Observations, proposal: Proposal, verdict: Verdict) -> Observations:
    """Return the observations at committed tokens: those before the proposal, and those of the accepted path."""
    num_before = len(observations) - len(proposal)
    return observations.select([*range(num_before), *(num_before + token for token in verdict.path)])
