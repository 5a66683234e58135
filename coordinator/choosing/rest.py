"""Rest: rounds in which a session only decodes, while no drafter pays.

To look for a better plan costs time even where nobody drafts: the target observes for the drafters, other drafters are
compared, plans are weighed. So a session that has decoded plainly for a while rests, longer each time, and looks again
for a few rounds in between. A great change of load wakes it, as that may change what pays. The target scores rounds of
a rest ahead, as it knows that another one follows, so they are faster than any other plain round.

Where drafts would clearly lose by what all sessions have seen, a session rests long from its first round on, so that
the target need not even observe its prompt. Some sessions are scouts, which look all the same.

Where the target's own offers promise most, a session rests from its first round on, too, and drafts what is offered;
its prompt is observed for no drafter. A long text is awake after two such rests.

At a busy target a round awake costs twice one of a rest: it misses the forward that the others share. There a session
rests after its first round, and goes on resting where plans are weighed again and nothing is to be tried or compared.
"""

from dataclasses import dataclass

AWAKE_ROUNDS = 2  # in which plain decoding was best, before the first rest; none of them is scored ahead
FIRST_REST = 16  # rounds
LONGEST_REST = 64
OBSERVED_EVERY = 4  # rounds of a rest: what a round costs changes slowly, and to add one takes a tenth of a millisecond
CHANGED_LOAD = 2.0  # more than so many times the sessions, or fewer by more than that, wake a session


@dataclass(slots=True)
class Rest:
    """The rests of one session."""

    _left: int = 0  # rounds of this rest
    _length: int = FIRST_REST  # of the next rest
    _num_plain: int = 0  # rounds awake in which plain decoding was best, lately
    _begins: bool = False  # with a plain round that was not scored ahead, where others are
    _num_sessions: int | None = None  # at the target worker in this rest's first round

    @property
    def follows(self) -> bool:
        """Whether the next round belongs to a rest, unless the load changes."""
        return self._left > 0

    @property
    def num_left(self) -> int:
        """Rounds of this rest that follow."""
        return self._left

    @property
    def is_observed(self) -> bool:
        """Whether the costs of this round of a rest are taken note of."""
        return self._left % OBSERVED_EVERY == 0 and not self._begins

    @property
    def is_young(self) -> bool:
        """Whether the next rest is not one of the longest yet, as nothing else has paid for long."""
        return self._length < LONGEST_REST

    def goes_on(self, num_sessions: int) -> bool:
        """Return whether the next round belongs to a rest, and count it; `num_sessions` are at the target worker."""
        if not self._left:
            return False
        self._num_sessions = self._num_sessions or num_sessions
        if not 1 / CHANGED_LOAD <= num_sessions / self._num_sessions <= CHANGED_LOAD:
            self._left, self._length = 0, FIRST_REST
            return False
        self.count()
        return True

    def count(self) -> None:
        """Count a round of a rest, whatever the load."""
        self._begins = False
        self._left = max(0, self._left - 1)

    def observe(self, is_plain: bool, num_rounds: int = AWAKE_ROUNDS) -> None:
        """Note whether plain decoding was best in a round awake.

        After `num_rounds` of them a rest begins, and after one where nothing has paid since the last rest.
        """
        if not is_plain:
            self._num_plain, self._length = 0, FIRST_REST
            return
        self._num_plain += 1
        if self._num_plain >= num_rounds or self._length > FIRST_REST:
            self._begin(self._length)
            self._length = min(2 * self._length, LONGEST_REST)

    def begin_with_offers(self) -> None:
        """Begin a rest, longer each time, in which the target's offers are drafted."""
        self.observe(is_plain=True, num_rounds=1)
        self._begins = True

    def begin_long(self) -> None:
        """Begin a rest as long as any."""
        self._begin(LONGEST_REST)

    def _begin(self, length: int) -> None:
        self._num_plain, self._num_sessions, self._left = 0, None, length
