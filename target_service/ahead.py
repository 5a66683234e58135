"""Scoring ahead: while a plain round's answer is on its way the worker goes on with the one that will follow.

A round without draft tokens commits the one token that the worker has drawn, so the worker knows what the next message
will append. Where the coordinator says that a plain round follows, the engine scores that round in the very next
forward, unless it was told of the drawn token that a draft follows it. Its answer is used only if exactly that round is
asked for: the same text, proved by its digest, no draft tokens, and nothing to observe that was not observed. It has
the keys of that round, so what was drawn is what would be drawn then. This is a cache: no distribution and no key
depends on it. The model's forwards and all that comes between two of them (messages, the coordinator, its store) so
overlap, and all sessions of a forward go on together in the next.
"""

from collections.abc import Iterable

from specdec.engine import EngineLoop, Task
from specdec.exact.values import ObservationRequest, Scores
from target_service.metrics import count_ahead
from target_service.scorer import ScoreRound, ScoreTask, Watch

UNKNOWN = 0  # token, until the round before has drawn it


class AheadTask(ScoreTask):
    """The plain round that follows another one. Until it is asked for, its token is a draft token of the cache."""

    def __init__(self, previous: ScoreTask, watch: Watch, unless: frozenset[int] = frozenset()) -> None:
        length = previous.round.committed_length
        expected = ScoreRound(length, [UNKNOWN], [], [])
        super().__init__(previous.session, expected, watch, match=False, num_committed=length)
        self._unless = unless

    def is_wanted_after(self, previous: Task[Scores]) -> bool:
        """Return whether a plain round follows the token that the round before has drawn."""
        return drawn_by(previous) not in self._unless

    def begin_after(self, previous: Task[Scores]) -> None:
        """Append the token that the round before has drawn."""
        assert isinstance(previous, ScoreTask)
        self.round = following(previous)
        self.append_instead(self.round.start, list(self.round.tokens))
        self.prefix_digest, self.on_draft = self.round.prefix_digest, True


class ScoringAhead:
    """One session's round that is scored before it is asked for, if there is one."""

    def __init__(self, engine: EngineLoop[ScoreTask]) -> None:
        self._engine = engine
        self._ahead: AheadTask | None = None
        self._expected: ScoreRound | None = None  # by the answer to the round before

    def begin(self, task: ScoreTask, request: ObservationRequest, unless: Iterable[int] = ()) -> None:
        """Score the plain round that follows a plain one as soon as that is scored. Returns at once.

        Nothing is scored after a token of `unless`. It observes what is to be observed in the one before.
        """
        self._ahead = AheadTask(task, task.watch if request else Watch(), frozenset(unless))
        self._engine.follow(task, self._ahead)

    def note_scored(self, task: ScoreTask) -> None:
        """Take note of a round that is answered: what must be asked for next, if it was begun."""
        if self._ahead and not self._ahead.is_wanted_after(task):
            self._ahead = None
        self._expected = following(task) if self._ahead else None

    def take(self, given: ScoreRound, request: ObservationRequest) -> AheadTask | None:
        """Return the task of a round that is asked for, if it was begun ahead; what was begun is used at most once.

        What has failed is not: it may have failed for the sake of others in its forward.
        """
        ahead, expected = self._ahead, self._expected
        if ahead is None:
            return None
        is_observed = not request or request == ahead.watch.request
        has_failed = ahead.done and ahead.submission.error is not None
        if expected is None or not is_observed or has_failed or not _is_same(given, expected):
            self.stop()
            return None
        count_ahead(hit=True)
        self._ahead = self._expected = None
        return ahead

    def stop(self) -> None:
        """Give up what was begun."""
        if self._ahead is not None:
            count_ahead(hit=False)
            self._engine.drop(self._ahead)
        self._ahead = self._expected = None


def drawn_by(task: Task[Scores]) -> int:
    """Return the token that a plain round has drawn."""
    scores: Scores = task.submission.result
    return scores.positions[0].tail_token


def following(task: ScoreTask) -> ScoreRound:
    """Return the plain round that appends what a plain round has drawn."""
    return ScoreRound(task.round.committed_length, [drawn_by(task)], [], [], prefix_digest=task.digest)


def _is_same(given: ScoreRound, expected: ScoreRound) -> bool:
    """Return whether a round that is asked for adds the same token to the same text, and drafts nothing."""
    if given.draft_tokens or given.start != expected.start:
        return False
    return list(given.tokens) == list(expected.tokens) and given.prefix_digest == expected.prefix_digest
