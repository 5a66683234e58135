"""The loop: draft, score, accept, commit, until the generation is done.

The next round runs while the last one's commit is in flight; only emission waits for the commit.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol

from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.comparisons import is_missed
from coordinator.choosing.lookups import LOOKUP
from coordinator.choosing.offers import OFFER
from coordinator.choosing.plans import PLAIN, DraftPlan, Forward, Found, Missed, RoundOutcome
from coordinator.generation import NO_DRAFTER, Generation, Round
from coordinator.grammars import MIN_FORCED, ForcedDrafter
from specdec.exact.acceptance import AcceptanceRule, matched
from specdec.exact.lookup import NO_MATCH, Match, NextRound, TextLookup, continued
from specdec.exact.values import Observations, Proposal, Scores, Verdict
from specdec.outside import REAL, Outside
from specdec.serving.tracing import spans
from specdec.types import MAX_TOLD_TOKENS

COMPARISON_PATIENCE_S = 0.01  # a round waits for a comparison that outlasts the scoring, once and so long at most
GRAMMAR = "grammar"  # in place of a drafter's name, where the session's grammar forced the draft
MAX_TOGETHER = 8  # rounds that the target may answer together, where it knows their drafts
MAX_CAUGHT_UP = 4  # tokens besides those of the last round; a worker that has to read more measures no cost


@dataclass(frozen=True, slots=True)
class Drafted:
    """A proposal and how long it took; empty where no draft worker answers."""

    proposal: Proposal = Proposal()  # noqa: RUF009  # frozen
    elapsed_s: float = 0.0
    num_fed: int = 1  # committed tokens that the worker had to read first
    has_failed: bool = False  # the drafter could not be asked, or gave no valid answer


@dataclass(frozen=True, slots=True)
class Scored:
    """The target's answer and how long it took, as the coordinator saw it."""

    scores: Scores
    elapsed_s: float
    num_fed: int = 1  # committed tokens that the worker had to read first
    num_sessions: int = 1  # at the worker, waiting or in the forward
    offer: Proposal = Proposal()  # noqa: RUF009  # frozen; what the target scores ahead as the next round's draft
    forward: Forward | None = None  # in which it was scored; None: not told
    waited_s: float | None = None  # for the answer; None: as long as it took. Rounds that are answered together differ
    num_more: int = 0  # answers that came with this one, to the rounds that follow
    has_lost: bool = False  # an answer to this round and some that follow may have been lost


@dataclass(slots=True)
class Before:
    """What the last round here has left for the next one."""

    num_new: int = 0  # tokens that it committed; 0: there was none
    offer: Proposal = field(default_factory=Proposal)  # of the target
    num_answered: int = 0  # rounds that follow whose answers are here
    has_prefill: bool = False  # it read more than rounds do, and so did those that were answered with it
    redrawn_until: int = 0  # committed tokens; up to there an answer may have been lost that told of several rounds

    def note_lost(self, generation: Generation) -> None:
        """Take note that an answer that told of several rounds may have been lost, or is of no use."""
        self.redrawn_until = len(generation.committed) + MAX_TOLD_TOKENS

    def is_redrawn(self, generation: Generation) -> bool:
        """Return whether the next round may have been drawn before, in an answer that was lost.

        When an answer of several rounds is sent depends on the tokens that were drawn, and so does whether it is lost.
        Drawn again with a draft that was drawn they would be others: an end, which is sent at once, would be found too
        often. Plain rounds, and those that are matched, draw what was drawn before.
        """
        is_drawn = generation.sampling.temperature > 0
        return is_drawn and not self.num_answered and len(generation.committed) < self.redrawn_until


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What the target may do besides scoring a round."""

    observes: bool = True  # what the session's drafters asked for
    next_round: NextRound | None = None  # what it may score ahead; None: nothing
    num_rounds: int = 1  # that it may answer together, this one and those that follow
    ending_tokens: Collection[int] = ()  # after which none of them follows


DEFAULT_OPTIONS = ScoreOptions()


class RoundDrafter(Protocol):
    """Proposes draft tokens; may propose none."""

    @property
    def available(self) -> bool:
        """Whether it is worth asking now."""
        ...

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return a tree of at most K tokens with the distributions that they were drawn from.

        It may stop before a token that is accepted with less than a chance of `stop_below`, by its own judgement.
        """
        ...

    def observe(self, observations: Observations) -> None:
        """Receive what the target observed at committed tokens, to be sent with the next proposal's request."""
        ...


class RoundScorer(Protocol):
    """Scores a proposal with the target model."""

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        """Return the target's distributions at the N + 1 positions of a proposal of N tokens.

        The same call has the same answer, whatever the options say of observations and of the next round.
        """
        ...

    def known(self, committed: Sequence[int], proposal: Proposal) -> Scored | None:
        """Return the answer to a round that observes nothing, if it came with the one before it: see `num_more`."""
        ...


@dataclass(frozen=True, slots=True)
class RoundParts:
    """The parts of a session's rounds."""

    drafters: Mapping[str, RoundDrafter]  # by name; none for plain decoding
    scorer: RoundScorer
    rule: AcceptanceRule
    chooser: PlanChooser
    outside: Outside = REAL
    forced: ForcedDrafter | None = None  # where the session has a grammar
    lookup: TextLookup | None = None  # where the coordinator may draft what it finds in the text itself

    def forced_draft(self, generation: Generation) -> Proposal:
        """Return a draft of what the session's grammar forces, if that is worth a round."""
        if self.forced is None:
            return Proposal()
        proposal = self.forced.propose(generation.committed, len(generation.prompt), generation.remaining_tokens)
        return proposal if len(proposal) >= (MIN_FORCED if self.drafters else 1) else Proposal()


@dataclass(frozen=True, slots=True)
class AvailableDrafters:
    """The names of those that are worth asking; a round that rests need not know them."""

    drafters: Mapping[str, RoundDrafter]

    def __iter__(self) -> Iterator[str]:
        return (name for name, drafter in self.drafters.items() if drafter.available)


async def _at_once() -> None:
    """Do not wait."""


async def run_rounds(
    generation: Generation,
    parts: RoundParts,
    publish: Callable[[Round], Awaitable[None]],
    until_wanted: Callable[[], Awaitable[None]] = _at_once,
) -> None:
    """Run rounds until the generation is done; `publish` commits a round, then lets clients see it.

    Each round begins when `until_wanted` returns: clients have read enough of what there is. Rounds that are answered
    together are committed together. One commit at a time, in order; an exception from `publish` ends the loop. A commit
    in flight is always awaited.
    """
    commits = Commits(publish)
    comparing = Comparing(parts)
    try:
        before = Before()
        if generation.emitted and not parts.chooser.is_fixed:  # else it drafts as it did before
            before.note_lost(generation)
        while not generation.done:
            if not before.num_answered:
                await until_wanted()
            with spans.current().begin_round(generation.statistics.num_rounds) as tracing:
                commits.add(await run_round(generation, parts, comparing, before, commits.begin), tracing)
                if generation.done or not before.num_answered:
                    await commits.begin()
        await comparing.finish()
    finally:
        try:
            await comparing.stop()
        finally:
            await commits.settle()


class Commits:
    """The commits of one session's rounds: one at a time, of rounds that follow one another."""

    def __init__(self, publish: Callable[[Round], Awaitable[None]]) -> None:
        self._publish = publish
        self._in_flight: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_flight.set_result(None)
        self._rounds = list[tuple[Round, spans.Span]]()  # that are to be committed, and where they are traced

    def add(self, played: Round, tracing: spans.Span) -> None:
        """Commit a round with the next ones."""
        self._rounds.append((played, tracing))

    async def begin(self) -> None:
        """Begin to commit what was added, when the last commit has ended. Raises what that does."""
        if not self._rounds:
            return
        await asyncio.shield(self._in_flight)
        together = joined_rounds([played for played, _ in self._rounds])
        self._in_flight = asyncio.ensure_future(self._publish(together))
        for _, tracing in self._rounds:
            tracing.end_after(self._in_flight)
        self._rounds.clear()

    async def settle(self) -> None:
        """Wait for the commit in flight; what was added since is not committed. Raises what the commit does."""
        for _, tracing in self._rounds:
            tracing.end()
        await _settled(self._in_flight)


def joined_rounds(together: Sequence[Round]) -> Round:
    """Return what rounds commit that follow one another."""
    if len(together) == 1:
        return together[0]
    first, last = together[0], together[-1]
    emitted = tuple(token for played in together for token in played.emitted)
    return replace(
        last,
        base_length=first.base_length,
        base_digest=first.base_digest,
        emitted=emitted,
        joined=tuple(together),
    )


async def _settled(committing: asyncio.Future[None]) -> None:
    """Wait for a commit in flight, however often this is cancelled meanwhile. Raises what the commit does."""
    is_cancelled = False
    while not committing.done():
        try:
            await asyncio.wait([committing])
        except asyncio.CancelledError:
            is_cancelled = True
    committing.result()
    if is_cancelled:
        raise asyncio.CancelledError


class Comparing:
    """Asks drafters for proposals that no round uses, while the target scores; no round waits for them for long."""

    def __init__(self, parts: RoundParts) -> None:
        self._parts = parts
        self._asking: asyncio.Task[None] | None = None
        self._is_late = False  # a round has waited for it in vain

    def begin(self, chosen: DraftPlan, available: Iterable[str], committed: Sequence[int]) -> None:
        """Ask another drafter than the chosen one, if that is due and none is being asked."""
        plan = None if self._asking else self._parts.chooser.choose_compared(chosen, available)
        if plan:
            self._asking, self._is_late = asyncio.create_task(self._ask(plan, list(committed))), False

    async def wait(self) -> None:
        """Wait a moment for what is being asked: its drafter, which may be the best one, can be asked again then."""
        if self._asking and not self._is_late:
            await asyncio.wait([self._asking], timeout=COMPARISON_PATIENCE_S)
            self._is_late = self._asking is not None

    async def _ask(self, plan: DraftPlan, committed: list[int]) -> None:
        assert plan.drafter is not None
        drafter = self._parts.drafters[plan.drafter]
        with spans.span("compare"):
            drafted = await drafter.propose(committed, plan.num_draft_tokens, plan.stop_below)
        if not drafted.has_failed:
            self._parts.chooser.observe_unused(plan, drafted.proposal, len(committed))
        self._asking = None

    async def finish(self) -> None:
        """Wait for what is being asked, so that its stream can be closed in order."""
        if self._asking:
            await self._asking

    async def stop(self) -> None:
        """Give up what is being asked."""
        if self._asking:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)


async def draft(
    drafters: Mapping[str, RoundDrafter], committed: list[int], plan: DraftPlan
) -> tuple[DraftPlan, Drafted, Missed | None]:
    """Follow a plan, and its fallback where it finds too little; return which plan drafted, and what was missed.

    A proposal that was drawn is never given up: a fallback that draws would make the same draws again.
    """
    if plan.drafter is None:
        return plan, Drafted(), None
    drafted = await drafters[plan.drafter].propose(committed, plan.num_draft_tokens, plan.stop_below)
    if plan.fallback is None or not is_missed(drafted.proposal):
        return plan, drafted, None
    again, fallen, _ = await draft(drafters, committed, plan.fallback)
    if fallen.has_failed:
        return plan, replace(drafted, elapsed_s=drafted.elapsed_s + fallen.elapsed_s), None
    fallen = replace(fallen, num_fed=max(drafted.num_fed, fallen.num_fed))
    return again, fallen, None if drafted.has_failed else Missed(plan, drafted.proposal, drafted.elapsed_s)


async def _drafted(
    parts: RoundParts, committed: list[int], chosen: DraftPlan, match: Match, offer: Proposal
) -> tuple[DraftPlan, Drafted, Missed | None]:
    """Draft what was looked up, or what the target has offered, or as `draft` does."""
    if match.num_tokens and chosen.drafter == LOOKUP:
        return chosen, Drafted(continued(committed, match, chosen.num_draft_tokens)), None
    parts.chooser.compare_lookup(len(committed))
    if chosen.drafter == OFFER:
        return chosen, Drafted(offer), None
    return await draft(parts.drafters, committed, chosen)


async def run_round(
    generation: Generation,
    parts: RoundParts,
    comparing: Comparing,
    before: Before,
    commit: Callable[[], Awaitable[None]] = _at_once,
) -> Round:
    """Draft, score, accept; return what is to be committed, and leave what the next round shall know in `before`.

    Where another round is due than the one whose answer is here, `commit` is awaited: those before do not wait for it.
    """
    num_new, offer = before.num_new, before.offer
    if forced := parts.forced_draft(generation):
        return await _run_forced_round(generation, parts, forced, before)
    begin = parts.outside.now_s()
    await comparing.wait()
    available = AvailableDrafters(parts.drafters)
    match = parts.lookup.find(generation.committed) if parts.lookup else NO_MATCH
    found = Found(match, len(offer), before.num_answered > 0, before.is_redrawn(generation))
    chosen = parts.chooser.choose(generation.remaining_tokens, available, found)
    plan, drafted, missed = await _drafted(parts, generation.committed, chosen, match, offer)
    proposal = drafted.proposal
    comparing.begin(chosen, available, generation.committed)
    if missed:
        parts.chooser.observe_unused(missed.plan, missed.proposal, len(generation.committed))
    scored = parts.scorer.known(generation.committed, proposal) if before.num_answered else None
    if scored is None:
        scored = await _scored(generation, parts, plan, proposal, before, commit)
        before.has_prefill = not num_new or max(drafted.num_fed, scored.num_fed) > num_new + MAX_CAUGHT_UP
    drafting_s = drafted.elapsed_s + (missed.elapsed_s if missed else 0.0)
    finished_round, verdict = _accepted(generation, parts, proposal, scored, drafting_s, plan.drafter or NO_DRAFTER)
    before.num_new, before.offer, before.num_answered = len(finished_round.emitted), scored.offer, scored.num_more
    waited_s = scored.elapsed_s if scored.waited_s is None else scored.waited_s
    parts.chooser.settle(generation.committed)
    parts.chooser.observe(
        RoundOutcome(
            plan=PLAIN if drafted.has_failed else plan,
            num_drafted=len(proposal),
            path=verdict.path,
            draft_s=0.0 if drafted.has_failed else drafted.elapsed_s,
            score_s=scored.elapsed_s,
            num_sessions=scored.num_sessions,
            has_prefill=before.has_prefill,
            other_s=max(0.0, parts.outside.now_s() - begin - drafting_s - waited_s),
            missed=missed,
            forward=scored.forward,
        )
    )
    return finished_round


async def _scored(
    generation: Generation,
    parts: RoundParts,
    plan: DraftPlan,
    proposal: Proposal,
    before: Before,
    commit: Callable[[], Awaitable[None]],
) -> Scored:
    """Ask the target for a round's scores, and tell it what follows. What was lost until then is noted."""
    if before.num_answered:
        await commit()
    scored = await parts.scorer.score(generation.committed, proposal, _options(generation, parts, plan, before))
    if scored.has_lost or before.num_answered:
        before.note_lost(generation)
    return scored


def _options(generation: Generation, parts: RoundParts, plan: DraftPlan, before: Before) -> ScoreOptions:
    """Return what the target may do besides scoring a round: what the next ones will most likely draft, if known."""
    num_left = generation.remaining_tokens
    if num_left <= 1:
        return ScoreOptions(plan.observes)
    max_length = len(generation.committed) + num_left
    if parts.drafters:
        next_round = parts.chooser.next_round(plan, max_length)
        num_rounds = min(parts.chooser.num_foreseen(plan), MAX_TOGETHER)
    else:
        next_round, num_rounds = NextRound(plain=True, max_length=max_length), MAX_TOGETHER
    if num_rounds == 1 or not before.num_new:  # nobody waits for more than the first token; prompts are no plain rounds
        return ScoreOptions(plan.observes, next_round)
    return ScoreOptions(plan.observes, next_round, num_rounds, generation.ending_tokens)


async def _run_forced_round(generation: Generation, parts: RoundParts, proposal: Proposal, before: Before) -> Round:
    """Score what the session's grammar forces. The chooser learns no costs from it, as no drafter took part."""
    scored = await parts.scorer.score(generation.committed, proposal)
    finished_round, _ = _accepted(generation, parts, proposal, scored, 0.0, GRAMMAR)
    before.num_new, before.offer, before.num_answered = len(finished_round.emitted), scored.offer, scored.num_more
    parts.chooser.settle(generation.committed)
    return finished_round


def _accepted(
    generation: Generation, parts: RoundParts, proposal: Proposal, scored: Scored, drafting_s: float, drafter: str
) -> tuple[Round, Verdict]:
    """Accept by the target's answer, append to the generation, and pass on what the target observed."""
    with spans.span("accept"):
        verdict = _verdict(generation, parts.rule, proposal, scored.scores)
    finished_round = generation.advance(proposal, scored.scores, verdict, drafting_s, scored.elapsed_s, drafter)
    if scored.scores.observations is not None:
        observed = committed_observations(scored.scores, len(proposal), verdict)
        for each in parts.drafters.values():
            each.observe(observed)
    spans.current().set(
        drafter=drafter,
        num_draft_tokens=len(proposal),
        num_accepted_tokens=len(verdict.path),
        num_tokens=len(finished_round.emitted),
        num_sessions=scored.num_sessions,
    )
    return finished_round, verdict


def _verdict(generation: Generation, rule: AcceptanceRule, proposal: Proposal, scores: Scores) -> Verdict:
    """Accept what the target has matched; what was drawn, by the session's rule."""
    if scores.is_matched or not proposal:
        return matched(proposal.tokens, proposal.tree, scores)
    return rule.accept(proposal, scores, generation.uniforms(len(proposal)))


def committed_observations(scores: Scores, num_draft_tokens: int, verdict: Verdict) -> Observations:
    """Return the observations at committed tokens: those before the proposal, and those of the accepted path.

    Where the target told of other draft tokens than were accepted, they end before the first one that is missing.
    """
    observations = scores.observations
    assert observations is not None
    observed = range(num_draft_tokens) if scores.observed is None else scores.observed
    num_before = len(observations) - len(observed)
    places = {token: num_before + place for place, token in enumerate(observed)}
    path = takewhile(places.__contains__, verdict.path)
    return observations.select([*range(num_before), *(places[token] for token in path)])
