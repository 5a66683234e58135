"""Scoring ahead: while a round's answer is on its way the worker goes on with the one that will follow.

What a round commits the worker knows where its own draws decide: a plain round commits the token that was drawn, one
that is matched (`matched`) the draft tokens that were drawn as well, and one more. The coordinator says what it will
look up in the text then, or that it will draft nothing, or what the worker offers (target_service/offering.py); the
worker looks up the same, or says in its answer what it offers, and has the engine score that round in the very next
forward. Its answer is used only if exactly that round is asked for: the same text,
proved by its digest, the same draft tokens, and nothing to observe that was not observed. It has the keys of that
round, so what was drawn is what would be drawn then. This is a cache: no distribution and no key depends on it. The
model's forwards and all that comes between two of them (messages, the coordinator, its store) so overlap, and all
sessions of a forward go on together in the next.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TypeVar

from specdec.engine import EngineLoop, Task
from specdec.exact.acceptance import matched
from specdec.exact.lookup import NextRound, TextLookup, continued
from specdec.exact.values import ObservationRequest, Proposal, Scores
from specdec.serving.telemetry import get_logger
from specdec.types import MAX_TOLD_TOKENS
from target_service.metrics import count_ahead
from target_service.offering import SessionOffers
from target_service.own_head import HeadDraft, OwnHead
from target_service.scorer import ScoreRound, ScoreTask, Watch

Found = TypeVar("Found")

TOGETHER_S = 0.05  # that rounds take which are answered together, at least: what a reader does not notice
TOGETHER_EACH_S = 0.0125  # and for each session at work: an answer costs the coordinator's time for each of them
LONGEST_TOGETHER_S = 0.25
UNKNOWN = 0  # token, until the round before has ended


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known of a round that follows another one."""

    emitted: list[int]  # the tokens that the round before it commits
    draft: Proposal = Proposal()  # noqa: RUF009  # frozen
    is_offered: bool = False  # the draft is the worker's own
    text: Sequence[int] | None = None  # after which the worker may draft itself
    head_draft: HeadDraft | None = None  # what its head is to draft


@dataclass(frozen=True, slots=True)
class Following:
    """By what the round after another one is known."""

    next_round: NextRound
    lookup: TextLookup  # in the session's text
    head: OwnHead | None = None

    def after(self, task: ScoreTask) -> Outlook | None:
        """Return what follows a round that was scored. None: nobody knows, or nothing."""
        emitted = self._emitted(task)
        length = task.round.committed_length + len(emitted)
        if not emitted or length >= self.next_round.max_length:
            return None
        return self._drafted(task, emitted)

    def _drafted(self, task: ScoreTask, emitted: list[int]) -> Outlook:
        """Return the outlook with what is looked up in the text that a round has committed, if anything is."""
        if not self.next_round.num_offered and not any(self.next_round.draft_lengths):
            return Outlook(emitted)
        text = task.sequence.tokens[: task.round.committed_length]
        if len(text) < task.round.committed_length:  # evicted since
            return Outlook(emitted)
        text.extend(emitted)
        match = self.lookup.find(text)
        if count := self.next_round.num_draft_tokens(match, len(text)):
            return Outlook(emitted, continued(text, match, count))
        if task.offers is None or not self.next_round.num_offered:
            return Outlook(emitted)
        has_head = self.head is not None and self.head.is_worth(task.timings.forward_s)
        head_draft = task.offers.head_draft(text, self.lookup, self.next_round) if has_head else None
        return Outlook(emitted, text=text, head_draft=head_draft)

    def offered(self, task: ScoreTask, outlook: Outlook, drafted: Proposal) -> Outlook:
        """Return an outlook with what the worker's head has drafted, or with what else it can offer."""
        if outlook.text is None or task.offers is None:
            return outlook
        offer = drafted or task.offers.draft(outlook.text, self.lookup, self.next_round)
        return replace(outlook, draft=offer, is_offered=len(offer) > 0)

    def round_of(self, task: ScoreTask, outlook: Outlook) -> ScoreRound | None:
        """Return the round that follows, if it is known."""
        draft = outlook.draft
        if not draft and not self.next_round.plain:
            return None
        supports = [distribution.token_ids for distribution in draft.distributions]
        parents = () if draft.is_chain else draft.parents
        start, digest = task.round.committed_length, task.digest
        is_matched = len(draft) > 0
        return ScoreRound(start, outlook.emitted, draft.tokens, supports, parents, digest, is_matched)

    def _emitted(self, task: ScoreTask) -> list[int]:
        """Return the tokens that a round commits; nothing where that cannot be foreseen."""
        scores: Scores = task.submission.result
        draft_tokens = task.round.draft_tokens
        if draft_tokens and not task.round.is_matched:
            return []
        foreseen = matched(draft_tokens, task.round.tree, scores)
        if task.offers is not None:
            task.offers.observe(task.round.committed_length, task.own_states(foreseen.path))
        return [*(draft_tokens[token] for token in foreseen.path), foreseen.next_token]


class AheadTask(ScoreTask):
    """The round that follows another one. Until it is asked for, all its tokens are draft tokens of the cache."""

    expected: ScoreRound | None = None  # what it scores, once the round before has ended
    is_offered = False  # its draft is the worker's own
    has_looked = False  # at the round before it, for what it scores

    def __init__(self, previous: ScoreTask, watch: Watch, following: Following) -> None:
        length = previous.round.committed_length
        unknown = ScoreRound(length, [UNKNOWN], [], [])
        super().__init__(previous.session, unknown, watch, match=True, num_committed=length)
        self.offers, self.reports_to = previous.offers, previous.reports_to
        self.rules = following
        self._lock = Lock()

    def begin_after(self, previous: Task[Scores]) -> bool:
        """Append what the round before commits, and the draft that is looked up then; return whether that is known."""
        assert isinstance(previous, ScoreTask)
        self.look(previous)
        return self.expected is not None

    def look(self, previous: ScoreTask) -> None:
        """Find out what follows a round that has ended; once, on whichever thread comes to it first."""
        with self._lock:
            if not self.has_looked:
                _look([(previous, self)])

    def expect(self, previous: ScoreTask, outlook: Outlook) -> None:
        """Score what follows a round that has ended, if that is known."""
        if expected := self.rules.round_of(previous, outlook):
            self.score_instead(expected)
            self.expected, self.is_offered = expected, outlook.is_offered


def look_ahead(scored: Sequence[ScoreTask]) -> None:
    """Find out what follows rounds that have just been scored together; a head drafts for all of them at once."""
    pairs = [(task, task.following) for task in scored if not (task.submission.error or task.submission.abandoned)]
    _look([(task, ahead) for task, ahead in pairs if isinstance(ahead, AheadTask)])


def _look(pairs: Sequence[tuple[ScoreTask, AheadTask]]) -> None:
    outlooks = [(task, ahead, _unless_failed(partial(ahead.rules.after, task))) for task, ahead in pairs]
    asked = [outlook.head_draft for _, _, outlook in outlooks if outlook and outlook.head_draft]
    head = next((ahead.rules.head for _, ahead in pairs if ahead.rules.head), None)
    drafted = zip(asked, head.draft(asked), strict=True) if head and asked else ()
    drafts = {each.session.key: draft for each, draft in drafted}
    for task, ahead, outlook in outlooks:
        ahead.has_looked = True
        if outlook:
            draft = drafts.get(task.session.key, Proposal())
            _unless_failed(partial(_expect, task, ahead, outlook, draft))


def _expect(task: ScoreTask, ahead: AheadTask, outlook: Outlook, drafted: Proposal) -> None:
    ahead.expect(task, ahead.rules.offered(task, outlook, drafted))


def _unless_failed(look: Callable[[], Found]) -> Found | None:
    """Return what is found; None where that fails: to score ahead is never worth a round, or the engine's thread."""
    try:
        return look()
    except Exception as error:
        get_logger().error("look_ahead_failed", error=f"{type(error).__name__}: {error}")
        return None


def together_s(num_sessions: int) -> float:
    """Return how long rounds may take which are answered together, where so many sessions are at work, or wait.

    A message and a commit take the coordinator as long however many rounds they tell of, so that with many sessions it
    could not keep up with the forwards.
    """
    return max(TOGETHER_S, min(LONGEST_TOGETHER_S, num_sessions * TOGETHER_EACH_S))


class ScoringAhead:
    """One session's round that is scored before it is asked for, if there is one."""

    def __init__(
        self,
        engine: EngineLoop[ScoreTask],
        matches_chosen: bool,
        new_offers: Callable[[], SessionOffers],
    ) -> None:
        """`matches_chosen`: rounds whose draft tokens were chosen are matched. Others are not foreseen."""
        self._engine, self.matches_chosen, self._new_offers = engine, matches_chosen, new_offers
        self._offers: SessionOffers | None = None
        self._lookup = TextLookup()  # used by one task at a time, when the one before it has ended
        self._ahead: AheadTask | None = None

    def begin(self, task: ScoreTask, watch: Watch, next_round: NextRound, head: OwnHead | None = None) -> None:
        """Score the round that follows another one as soon as that is scored; it observes `watch`. Returns at once.

        `head` may draft for it.
        """
        if not self.matches_chosen and (next_round.num_offered or any(next_round.draft_lengths)):
            return
        if next_round.learns:
            self._offers = self._offers or self._new_offers()
            task.offers = self._offers
            task.reports_to = None if head and head.was_worth else self._offers
        following = Following(next_round, self._lookup, head)
        self._ahead = AheadTask(task, watch, following)
        self._engine.follow(task, self._ahead)

    async def note_scored(self, task: ScoreTask) -> None:
        """Take note of a round that is answered: what follows may be asked for before the engine comes to it."""
        ahead = self._ahead
        if ahead is None:
            return
        may_draft = ahead.rules.head is not None and ahead.rules.next_round.num_offered > 0
        if may_draft and not ahead.has_looked:
            await asyncio.to_thread(ahead.look, task)
        else:
            ahead.look(task)

    @property
    def offer(self) -> ScoreRound | None:
        """The next round, if its draft is the worker's own; after `note_scored`."""
        return self._ahead.expected if self._ahead and self._ahead.is_offered else None

    def take(self, given: ScoreRound, request: ObservationRequest) -> AheadTask | None:
        """Return the task of a round that is asked for, if it was begun ahead; what was begun is used at most once.

        What has failed is not: it may have failed for the sake of others in its forward.
        """
        ahead = self._ahead
        if ahead is None:
            return None
        is_observed = not request or request == ahead.watch.request
        has_failed = ahead.done and ahead.submission.error is not None
        if ahead.expected is None or not is_observed or has_failed or not _is_same(given, ahead.expected):
            self.stop()
            return None
        count_ahead(hit=True)
        self._ahead = None
        return ahead

    async def following(
        self, task: ScoreTask, num_rounds: int, ending_tokens: Collection[int]
    ) -> AsyncIterator[tuple[ScoreTask, Scores]]:
        """Give the rounds that follow one that was scored, as far as they are scored soon; none that fails.

        How long an answer is held depends on the tokens in it, and one that is lost, with its client or a process, is
        drawn again. That changes no token of these rounds, whatever is drafted then: each has the key of its place.

        They tell of MAX_TOLD_TOKENS at most, with the first: so far a coordinator that has lost an answer goes back.
        The engine goes on with each of them as soon as the one before it has ended. `note_scored` comes first, and has
        been called for each that is given.
        """
        now_s, round_s, ends = asyncio.get_running_loop().time, task.timings.forward_s, frozenset(ending_tokens)
        load = self._engine.load
        num_sessions = max(task.num_batched, load.num_running + load.num_waiting - load.num_without_place)
        until_s, num_told = now_s() + together_s(num_sessions) - round_s, 0
        while num_rounds > 0 and now_s() + round_s <= until_s:
            following = self._ahead
            expected = following.expected if following else None
            if following is None or expected is None or ends.intersection(expected.tokens):
                return
            num_told += len(expected.tokens)
            if num_told + 1 + len(expected.draft_tokens) > MAX_TOLD_TOKENS:
                return
            rules, self._ahead = following.rules, None
            self.begin(following, following.watch, rules.next_round, rules.head)
            if not await self._is_scored(following, until_s - now_s()):
                self._drop()
                self._ahead = following  # to be asked for
                return
            count_ahead(hit=True)
            await self.note_scored(following)
            yield following, following.submission.result
            num_rounds, round_s = num_rounds - 1, following.timings.total_s

    async def _is_scored(self, task: AheadTask, timeout_s: float) -> bool:
        """Wait for a round, but not for long; return whether it was scored."""
        future = task.submission.future
        try:
            await asyncio.wait([future], timeout=timeout_s)
            if task.done:
                await asyncio.wait([future])  # which the engine tells when it has begun with what follows
        except asyncio.CancelledError:
            self._engine.drop(task)
            raise
        return future.done() and not future.cancelled() and future.exception() is None

    def stop(self) -> None:
        """Give up what was begun."""
        if self._ahead is not None and self._ahead.expected is not None:
            count_ahead(hit=False)
        self._drop()

    def _drop(self) -> None:
        if self._ahead is not None:
            self._engine.drop(self._ahead)
        self._ahead = None


def _is_same(given: ScoreRound, expected: ScoreRound) -> bool:
    """Return whether a round that is asked for adds the same tokens to the same text, and has the same draft."""
    return (
        (given.start, list(given.tokens), list(given.draft_tokens), given.prefix_digest)
        == (expected.start, list(expected.tokens), list(expected.draft_tokens), expected.prefix_digest)
        and given.tree == expected.tree
        and list(map(tuple, given.supports)) == list(map(tuple, expected.supports))
    )
