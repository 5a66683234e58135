"""What the target's own drafts are worth, which it offers for rounds that it scores ahead.

They cost no way to a worker, and are asked for in the round before. So that round decides how many draft tokens are
asked for: as many as promise most tokens a second, or none where plain decoding does. An offer that is expected to lose
is tried now and then, as long as trials cost little. What is accepted of offers at a busy target is learned apart: a
head of its own does not draft there.

The round that asks for a trial is answered by itself, where the target would have answered several: so trials are some
rounds apart, also where they are expected to lose nothing else.
"""

from collections.abc import Sequence

from coordinator.choosing.acceptance_history import SessionAcceptance
from coordinator.choosing.costs import Counts
from coordinator.choosing.plans import DraftPlan, Estimate
from coordinator.choosing.shared_statistics import SharedStatistics

OFFER = "offer"  # in place of a drafter's name, where the target drafted
AMONG_MANY = f"{OFFER} among many"  # and where it drafted at a busy target
REMEMBERED_ROUNDS = 8  # estimates hold for so many rounds
ROUNDS_APART = 16  # that lie between two trials of a session
MAX_OFFERED = 16  # draft tokens; of a larger tree hardly any more is accepted


class Offers:
    """The target's offers to one session."""

    def __init__(self, shared: SharedStatistics, lengths: Counts, is_greedy: bool) -> None:
        self._costs, self._exploration = shared.costs, shared.offering
        self._lengths = lengths[lengths <= MAX_OFFERED]
        names = {False: OFFER, True: AMONG_MANY}
        self._by_business = {key: SessionAcceptance(shared.acceptance(name, is_greedy)) for key, name in names.items()}
        self._was_busy = self._next_was_busy = False  # when this round's offer was asked for, and the next one's
        self._known: list[Estimate] = []  # by number of draft tokens, rising
        self._best: Estimate | None = None
        self._load, self._age = 0, 0
        self._trial_speed = 0.0  # what was promised in place of this round's trial; 0: it is none
        self._next_trial_speed = 0.0
        self._num_since_trial = ROUNDS_APART

    @property
    def _acceptance(self) -> SessionAcceptance:
        """What is accepted of offers at the load of now."""
        return self._by_business[self._costs.is_busy]

    @property
    def best(self) -> Estimate:
        """The offer that promises most tokens a second."""
        if self._best is None or self._age >= REMEMBERED_ROUNDS or self._load != self._costs.load:
            self._known = self._estimated(self._lengths)
            self._best = max(self._known, key=lambda estimate: estimate.speed)
            self._load, self._age = self._costs.load, 0
        return self._best

    @property
    def is_trial(self) -> bool:
        """Whether what was asked for last is one."""
        return self._next_trial_speed > 0

    def begin_round(self) -> None:
        """Take note that a round begins, for which an offer may have been asked for in the one before."""
        self._was_busy = self._next_was_busy

    def num_drafted(self, num_asked: int) -> float:
        """Return how many draft tokens are expected where so many are asked for."""
        return float(self._acceptance.expected_drafted()[num_asked])

    def ask_nothing(self) -> None:
        """Ask for no offer for the next round, unless `next` does."""
        self._next_was_busy, self._next_trial_speed = self._costs.is_busy, 0.0

    def next(self, plain: Estimate, min_gain: float) -> Estimate | None:
        """Return what is asked for: the best offer or a longer one, or none where plain decoding promises more.

        What promises less than the best of them is asked for as a trial.
        """
        self.ask_nothing()
        best = self.best
        pays, promised = best.speed > min_gain * plain.speed, max(best.speed, plain.speed)
        longer = [each for each in self._known if each.plan.num_draft_tokens >= 2 * best.plan.num_draft_tokens]
        is_due = self._num_since_trial >= ROUNDS_APART
        for tried in [*longer[:1], *([] if pays else [best])] if is_due else []:
            if self._exploration.affords(tried.seconds - tried.num_tokens / promised):
                self._next_trial_speed = promised
                return tried
        return best if pays else None

    def _estimated(self, lengths: Counts) -> list[Estimate]:
        tokens, drafted = self._acceptance.expected_tokens()[lengths], self._acceptance.expected_drafted()[lengths]
        seconds = self._costs.offered_each_s(drafted, OFFER)
        promised = zip(lengths.tolist(), tokens.tolist(), seconds.tolist(), strict=True)
        return [Estimate(DraftPlan(OFFER, length), *promise) for length, *promise in promised]

    def observe(self, num_asked: int, num_drafted: int, path: Sequence[int]) -> None:
        """Add a round for which so many draft tokens were asked for, and what became of those that came."""
        self._by_business[self._was_busy].observe(num_asked, num_drafted, path)

    def observe_time(self, elapsed_s: float, num_tokens: int) -> None:
        """Add what a round took and committed; trials may lose a share of all time, also where nothing was offered."""
        self._age += 1
        self._num_since_trial = 0 if self.is_trial else self._num_since_trial + 1
        is_trial = elapsed_s > 0 and self._trial_speed > 0
        self._exploration.observe(elapsed_s, elapsed_s - num_tokens / self._trial_speed if is_trial else 0.0)
        self._trial_speed = self._next_trial_speed
