"""Scoring ahead: while a plain round's answer is on its way the worker goes on with the one that will follow.

A round without draft tokens commits the one token that the worker has drawn, so the worker knows what the next message
will append. Where the coordinator says that a plain round follows, the engine scores that round in the very next
forward. Its answer is used only if exactly that round is asked for: the same text, proved by its digest, no draft
tokens, and nothing to observe that was not observed. It has the keys of that round, so what was drawn is what would be
drawn then. This is a cache: no distribution and no key depends on it. The model's forwards and all that comes between
two of them (messages, the coordinator, its store) so overlap, and all sessions of a forward go on together in the next.
"""

from dataclasses import replace

from specdec.engine import EngineLoop, Task
from specdec.exact.values import ObservationRequest, Scores
from target_service.metrics import count_ahead
from target_service.scorer import ScoreRound, ScoreTask, Watch

UNKNOWN = 0  # token, until the round before has drawn it


class AheadTask(ScoreTask):
    """The plain round that follows another one. Until it is asked for, its token is a draft token of the cache."""

    def __init__(self, previous: ScoreTask, watch: Watch) -> None:
        length = previous.round.committed_length
        expected = ScoreRound(length, [UNKNOWN], [], [])
        super().__init__(previous.session, expected, watch, match=False, num_committed=length)

    def begin_after(self, previous: Task[Scores]) -> None:
        """Append the token that the round before has drawn."""
        assert isinstance(previous, ScoreTask)
        token = _drawn(previous)
        self.round = replace(self.round, tokens=[token], prefix_digest=previous.digest)
        self.append_instead(self.round.start, [token])
        self.prefix_digest = previous.digest


class ScoringAhead:
    """One session's round that is scored before it is asked for, if there is one."""

    def __init__(self, engine: EngineLoop[ScoreTask]) -> None:
        self._engine = engine
        self._pair: tuple[ScoreTask, AheadTask] | None = None  # the last round, and the one that follows it

    def begin(self, task: ScoreTask, request: ObservationRequest) -> None:
        """Score the plain round that follows a plain one as soon as that is scored. Returns at once.

        It observes what is to be observed in the one before.
        """
        ahead = AheadTask(task, task.watch if request else Watch())
        self._engine.follow(task, ahead)
        self._pair = task, ahead

    def take(self, given: ScoreRound, request: ObservationRequest) -> AheadTask | None:
        """Return the task of a round that is asked for, if it was begun ahead; what was begun is used at most once."""
        if self._pair is None:
            return None
        previous, ahead = self._pair
        is_observed = not request or request == ahead.watch.request
        if previous.submission.error or not is_observed or not _is_expected(given, previous):
            self.stop()
            return None
        self._pair = None
        count_ahead(hit=True)
        return ahead

    def stop(self) -> None:
        """Give up what was begun."""
        if self._pair is not None:
            count_ahead(hit=False)
            self._engine.drop(self._pair[1])
            self._pair = None


def _is_expected(given: ScoreRound, previous: ScoreTask) -> bool:
    """Return whether a round adds to the text of the last one, which was answered, the token that that one drew."""
    if given.draft_tokens or given.start != previous.round.committed_length:
        return False
    return list(given.tokens) == [_drawn(previous)] and given.prefix_digest == previous.digest


def _drawn(task: ScoreTask) -> int:
    """Return the token that a plain round has drawn."""
    scores: Scores = task.submission.result
    return scores.positions[0].tail_token
