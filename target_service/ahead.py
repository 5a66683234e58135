"""Scoring ahead: while a round's answer is on its way the worker goes on with the one that will follow.

What a round commits follows from its scores and its draws, which the worker has: a plain round commits the token that
was drawn, and one whose draft tokens were chosen rather than drawn those that the session's acceptance rule accepts.
The coordinator says what it will look up in the text then, or that it will draft nothing, or what the worker offers
(target_service/offering.py); the worker looks up the same, or says in its answer what it offers, and has the engine
score that round in the very next forward. Its answer is used only if exactly that round is asked for: the same text,
proved by its digest, the same draft tokens, and nothing to observe that was not observed. It has the keys of that
round, so what was drawn is what would be drawn then. This is a cache: no distribution and no key depends on it. The
model's forwards and all that comes between two of them (messages, the coordinator, its store) so overlap, and all
sessions of a forward go on together in the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from specdec.engine import EngineLoop, Task
from specdec.exact.acceptance import AcceptanceRule
from specdec.exact.lookup import NextRound, TextLookup, continued
from specdec.exact.values import ObservationRequest, Proposal, Scores
from target_service.metrics import count_ahead
from target_service.observing import verdict
from target_service.offering import SessionOffers
from target_service.scorer import ScoreRound, ScoreTask, Watch

UNKNOWN = 0  # token, until the round before has ended


@dataclass(frozen=True, slots=True)
class Following:
    """By what the round after another one is known."""

    next_round: NextRound
    rule: AcceptanceRule | None  # of the session; None: not told, or a newer one
    lookup: TextLookup  # in the session's text

    def after(self, task: ScoreTask) -> tuple[ScoreRound, bool] | None:
        """Return the round that follows one that was scored, and whether its draft is offered.

        None: nobody knows, or there is none.
        """
        emitted = self._emitted(task)
        length = task.round.committed_length + len(emitted)
        if not emitted or length >= self.next_round.max_length:
            return None
        draft, is_offered = self._draft(task, emitted)
        if not draft and not self.next_round.plain:
            return None
        supports = [distribution.token_ids for distribution in draft.distributions]
        parents = () if draft.is_chain else draft.parents
        start, digest = task.round.committed_length, task.digest
        return ScoreRound(start, emitted, draft.tokens, supports, parents, prefix_digest=digest), is_offered

    def _draft(self, task: ScoreTask, emitted: list[int]) -> tuple[Proposal, bool]:
        """Return what is looked up in the text that a round has committed, or what is offered after it."""
        if not self.next_round.num_offered and not any(self.next_round.draft_lengths):
            return Proposal(), False
        text = task.sequence.tokens[: task.round.committed_length]
        if len(text) < task.round.committed_length:  # evicted since
            return Proposal(), False
        text.extend(emitted)
        match = self.lookup.find(text)
        if count := self.next_round.num_draft_tokens(match, len(text)):
            return continued(text, match, count), False
        if task.offers is None or not self.next_round.num_offered:
            return Proposal(), False
        offered = task.offers.draft(text, self.lookup, self.next_round)
        return offered, len(offered) > 0

    def _emitted(self, task: ScoreTask) -> list[int]:
        """Return the tokens that a round commits; nothing where that cannot be foreseen."""
        scores: Scores = task.submission.result
        draft_tokens = task.round.draft_tokens
        if not draft_tokens:
            _observe(task, ())
            return [scores.positions[0].tail_token]
        foreseen = verdict(self.rule, scores, task.round, task.session.seed)
        if foreseen is None:
            return []
        _observe(task, foreseen.path)
        return [*(draft_tokens[token] for token in foreseen.path), foreseen.next_token]


def _observe(task: ScoreTask, path: Sequence[int]) -> None:
    """Give the worker's own head the states at the tokens that are committed with a draft's `path`."""
    if task.offers is not None:
        task.offers.observe(task.own_states(path))


class AheadTask(ScoreTask):
    """The round that follows another one. Until it is asked for, all its tokens are draft tokens of the cache."""

    expected: ScoreRound | None = None  # what it scores, once the round before has ended
    is_offered = False  # its draft is the worker's own

    def __init__(self, previous: ScoreTask, watch: Watch, following: Following) -> None:
        length = previous.round.committed_length
        unknown = ScoreRound(length, [UNKNOWN], [], [])
        super().__init__(previous.session, unknown, watch, match=True, num_committed=length)
        self.offers = previous.offers
        self._following = following
        self._lock, self._has_looked = Lock(), False

    def begin_after(self, previous: Task[Scores]) -> bool:
        """Append what the round before commits, and the draft that is looked up then; return whether that is known."""
        assert isinstance(previous, ScoreTask)
        self.look(previous)
        return self.expected is not None

    def look(self, previous: ScoreTask) -> None:
        """Find out what follows a round that has ended; once, on whichever thread comes to it first."""
        with self._lock:
            if not self._has_looked and (found := self._following.after(previous)):
                expected, self.is_offered = found
                self.score_instead(expected)
                self.expected = expected
            self._has_looked = True


class ScoringAhead:
    """One session's round that is scored before it is asked for, if there is one."""

    def __init__(
        self,
        engine: EngineLoop[ScoreTask],
        rule: AcceptanceRule | None,
        new_offers: Callable[[], SessionOffers],
    ) -> None:
        self._engine, self._rule, self._new_offers = engine, rule, new_offers
        self._offers: SessionOffers | None = None
        self._lookup = TextLookup()  # used by one task at a time, when the one before it has ended
        self._ahead: AheadTask | None = None

    def begin(self, task: ScoreTask, watch: Watch, next_round: NextRound) -> None:
        """Score the round that follows another one as soon as that is scored; it observes `watch`. Returns at once."""
        if next_round.learns:
            self._offers = self._offers or self._new_offers()
            task.offers = self._offers
        following = Following(next_round, self._rule, self._lookup)
        self._ahead = AheadTask(task, watch, following)
        self._engine.follow(task, self._ahead)

    def note_scored(self, task: ScoreTask) -> None:
        """Take note of a round that is answered: what follows may be asked for before the engine comes to it."""
        if self._ahead:
            self._ahead.look(task)

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

    def stop(self) -> None:
        """Give up what was begun."""
        if self._ahead is not None:
            if self._ahead.expected is not None:
                count_ahead(hit=False)
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
