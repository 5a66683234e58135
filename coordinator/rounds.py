"""The loop: draft, score, accept, commit, until the generation is done.

The next round is on its way while the last one's commit is; only emission waits for the commit.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from coordinator.acceptance import accept
from coordinator.draft import Drafted
from coordinator.draft_length import DraftLength
from coordinator.generation import Generation, Round
from coordinator.target import Scored
from specdec.exact.values import Proposal

MAX_FED_TOKENS = 40  # a round whose worker had to read more than a round's tokens, or a stream's first one, says
# nothing of rounds to come


class Drafter(Protocol):
    """Guesses; may guess nothing."""

    async def propose(self, committed: list[int], num_draft_tokens: int) -> Drafted:
        """Return at most K tokens with the rows that they were drawn from."""
        ...

    def keep(self, num_tokens: int, cached_len: int) -> None:
        """Note that the first `num_tokens` tokens are committed now, of the `cached_len` that the worker holds."""
        ...


class Scorer(Protocol):
    """Knows the target's distribution."""

    async def score(self, committed: list[int], proposal: Proposal) -> Scored:
        """Return the K + 1 rows."""
        ...

    def keep(self, num_tokens: int, cached_len: int) -> None:
        """Note that the first `num_tokens` tokens are committed now, of the `cached_len` that the worker holds."""
        ...


async def run_rounds(
    generation: Generation,
    drafter: Drafter,
    scorer: Scorer,
    draft_length: DraftLength,
    publish: Callable[[Round], Awaitable[None]],
) -> None:
    """Play rounds until the generation is done; `publish` commits a round, then lets clients see it.

    One commit at a time, in order; what it raises ends the loop. A commit that is under way is always awaited.
    """
    committing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    committing.set_result(None)
    try:
        while not generation.done:
            played = await play_round(generation, drafter, scorer, draft_length)
            await asyncio.shield(committing)
            committing = asyncio.ensure_future(publish(played))
    finally:
        # shielded, for who cancels this loop must not cut a commit in two
        await asyncio.shield(committing)


async def play_round(generation: Generation, drafter: Drafter, scorer: Scorer, draft_length: DraftLength) -> Round:
    """Draft, score, accept; return what is to be committed."""
    base_length = len(generation.committed)
    drafted = await drafter.propose(generation.committed, draft_length.choose(generation.remaining_tokens))
    proposal = drafted.proposal
    scored = await scorer.score(generation.committed, proposal)
    verdict = accept(proposal, scored.scores, generation.uniforms(len(proposal)))
    played = generation.advance(proposal, scored.scores, verdict, drafted.elapsed_s, scored.elapsed_s)

    kept = base_length + verdict.num_accepted
    scorer.keep(kept, scored.cached_len)
    if drafted.cached_len is not None:
        drafter.keep(kept, drafted.cached_len)
    if max(drafted.num_fed, scored.num_fed) <= min(MAX_FED_TOKENS, base_length - 1):
        draft_length.costs.observe(len(proposal), drafted.elapsed_s, scored.elapsed_s)
    draft_length.observe(len(proposal), verdict.num_accepted)
    return played
