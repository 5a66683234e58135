"""Rounds that are drafted before they are asked for.

While the target scores a proposal and no request waits, the worker drafts the rounds that would follow, one after the
other: first after all of the proposal and the draft's most probable token, which costs least, as the cache holds that
text; then after the likeliest rejections, where a rival closes the round (Kumar et al. 2026, "Saguaro"). For each it
makes the request that the coordinator would make, with that round's keys: where the outcome comes true the answer is
what it would draw now (bit for bit, in forwards of the same shape); the others are discarded. This is a cache of
answers: no distribution and no key depends on it.

A sequence holds one text, so what is drafted after a rejection takes the place of the proposal's tokens there.
`HeldText` remembers what is surely cached, and what the tokens after it were.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from draft_service.model.drafted import UNDRAFTED, Drafted, Rejection
from draft_service.model.tasks import GuessTask, ProposeTask
from specdec.drafting.request import DraftRequest
from specdec.engine import EngineError, EngineLoop
from specdec.errors import NonFiniteLogitsError
from specdec.exact.prefix import chain
from specdec.exact.values import Proposal
from specdec.serving.session_stream import WorkerSession
from specdec.serving.telemetry import get_logger

LEAST_CHANCE = 0.05  # of a rejection after which a round is drafted


@dataclass(frozen=True, slots=True)
class HeldText:
    """A session's text up to the latest proposal's end, as far as a worker needs it to say what the cache may lack."""

    start: int  # as many tokens are cached
    digest: bytes  # of these
    tokens: tuple[int, ...]  # after them; the cache may hold others
    num_committed: int  # tokens before the proposal

    @property
    def from_proposal(self) -> "HeldText":
        """The same, where all that is committed is cached."""
        size = self.num_committed - self.start
        digest = chain(self.digest, self.tokens[:size])
        return HeldText(self.num_committed, digest, self.tokens[size:], self.num_committed)

    def request_from(self, request: DraftRequest) -> DraftRequest:
        """Return the same request with more of the text, so that it does not build on tokens that are not cached."""
        repeated = self.tokens[: max(0, request.start - self.start)]
        is_after = request.start == self.start + len(repeated)
        if not is_after or chain(self.digest, repeated) != request.prefix_digest:
            return request
        return replace(request, start=self.start, tokens=[*repeated, *request.tokens], prefix_digest=self.digest)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A round that was drafted, or begun, before its request."""

    session: WorkerSession
    accepted: tuple[int, ...]  # draft tokens of the round before, as far as `request` does not have them
    request: DraftRequest
    drafted: Drafted
    digest: bytes  # of the text that it follows, as the cache held it
    seconds: float  # that it took

    def answers(self, session: WorkerSession, request: DraftRequest) -> bool:
        """Return whether this is the requested round: the same text, whatever part of it the request repeats."""
        if session != self.session or request.committed_length != self.request.committed_length:
            return False
        if [*self.accepted, *self.request.tokens][-len(request.tokens) :] != list(request.tokens):
            return False
        return request.prefix_digest is None or chain(request.prefix_digest, request.tokens) == self.digest


class Found(NamedTuple):
    """A round that was drafted ahead and is asked for now."""

    ahead: Ahead | None
    drafted: Drafted  # as much of it as was asked for
    is_whole: bool  # nothing is to be added


NONE_FOUND = Found(None, UNDRAFTED, is_whole=False)


@dataclass(slots=True)
class RoundsAhead:
    """What is drafted ahead of one session's next request."""

    session: WorkerSession
    request: DraftRequest  # the latest
    drafted: Drafted  # its answer
    held: HeldText
    is_scattered: bool = False  # the cache may hold others than the last tokens of `held`
    rounds: list[Ahead] = field(default_factory=list)
    cached: Ahead | None = None  # the one of them that the cache holds
    running: "asyncio.Task[None] | None" = None

    def following(self, num_kept: int, tokens: Sequence[int]) -> DraftRequest:
        """Return the request for the round after the first `num_kept` tokens of `held` and others."""
        cached = 0 if self.is_scattered else num_kept
        text = [*self.held.tokens[cached:num_kept], *tokens]
        return replace(self.request, start=self.held.start + cached, tokens=text, prefix_digest=None)

    def found(self, session: WorkerSession, request: DraftRequest) -> Found:
        """Return the round that is asked for, as far as it is here."""
        ahead = next((ahead for ahead in self.rounds if ahead.answers(session, request)), None)
        if not (ahead and request.num_draft_tokens):
            return NONE_FOUND
        return Found(ahead, *ahead.drafted.asked(request.num_draft_tokens, request.stop_below))

    def held_after(self, ahead: Ahead, proposal: Proposal) -> tuple[HeldText, bool]:
        """Return what is held once a round that was drafted ahead has been answered, and whether it is scattered."""
        length = ahead.request.committed_length
        if ahead is self.cached:
            return HeldText(length, ahead.digest, proposal.tokens, length), False
        tokens = (*ahead.accepted, *ahead.request.tokens, *proposal.tokens)
        return HeldText(self.held.start, self.held.digest, tokens, length), True

    async def ended(self) -> None:
        """Return once nothing is drafted any more; whoever asks for a round has interrupted it."""
        if self.running:
            await self.running

    def stop(self) -> None:
        """Draft no more."""
        if self.running:
            self.running.cancel()


class OutcomeDrafter:
    """Drafts after the likeliest outcomes of a round, until a request arrives."""

    def __init__(
        self,
        engine: EngineLoop[Any],
        within_context: Callable[[DraftRequest], DraftRequest],
        is_asked: Callable[[], bool],
        num_outcomes: int,
    ) -> None:
        self._engine = engine
        self._within_context = within_context
        self._is_asked = is_asked
        self._num_outcomes = num_outcomes

    async def draft(self, rounds: RoundsAhead) -> None:
        """Add one round after the other; end where anything fails."""
        likely = [rejection for rejection in rounds.drafted.rejections() if rejection.chance >= LEAST_CHANCE]
        try:
            await self._after_all(rounds)
            for rejection in likely[: self._num_outcomes - 1]:
                await self._after_rejection(rounds, rejection)
        except (EngineError, NonFiniteLogitsError) as error:
            get_logger().debug("nothing_more_ahead", session_id=rounds.session.session_id, problem=str(error))

    async def _after_all(self, rounds: RoundsAhead) -> None:
        """Draft after all of the proposal, whose last token was not fed, and the most probable token."""
        num_kept, last = len(rounds.held.tokens) - 1, rounds.held.tokens[-1]
        guessing = self._within_context(replace(rounds.following(num_kept, [last]), num_draft_tokens=1))
        if not guessing.num_draft_tokens or self._is_asked():
            return
        num_committed, match = rounds.held.num_committed, rounds.is_scattered
        task: ProposeTask = GuessTask(rounds.session, guessing, match, num_committed=num_committed)
        guess: Proposal = await self._engine.run(task)
        rounds.held, rounds.is_scattered = rounds.held.from_proposal, False  # what was fed is cached, in its order
        num_kept = len(rounds.held.tokens) - 1
        await self._draft(rounds, rounds.following(num_kept, [last, *guess.tokens]), num_new=2)

    async def _after_rejection(self, rounds: RoundsAhead, rejection: Rejection) -> None:
        """Draft after some of the proposal and a rival of the token that is rejected."""
        num_kept = len(rounds.held.tokens) - len(rounds.drafted.proposal) + rejection.num_accepted
        following = rounds.following(num_kept, [rejection.closing])
        await self._draft(rounds, following, num_new=1, is_rejection=True)

    async def _draft(
        self, rounds: RoundsAhead, following: DraftRequest, num_new: int, *, is_rejection: bool = False
    ) -> None:
        """Draft a round, as far as no request arrives meanwhile."""
        following, held, began_s = self._within_context(following), rounds.held, time.perf_counter()
        if not following.num_draft_tokens or self._is_asked():
            return
        task = ProposeTask(
            rounds.session,
            following,
            rounds.is_scattered,
            interrupted=self._is_asked,
            num_committed=held.num_committed,
            num_new=num_new,
        )
        rounds.is_scattered |= is_rejection
        rounds.cached = None
        await self._engine.run(task)
        accepted, seconds = held.tokens[: following.start - held.start], time.perf_counter() - began_s
        rounds.cached = Ahead(rounds.session, accepted, following, task.drafted, task.digest, seconds)
        rounds.rounds.append(rounds.cached)
