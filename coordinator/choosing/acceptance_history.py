"""How much of a drafter's proposals is accepted, node by node.

Drafters emit nodes best first, so that a shorter proposal is the beginning of a longer one. A round of K draft tokens
then yields 1 + h_0 + ... + h_(K-1) tokens on average, where h_i is the probability that node i is on the accepted
path: for a chain with acceptance rate a, h_i = a^(i+1) (Leviathan et al. 2023, equation 1); for a tree the h_i are
whatever rank and depth of its nodes make them. One round of K draft tokens tests all of h_0 to h_(K-1).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.types import MAX_DRAFT_TOKENS

DECAY = 0.96  # of a round's weight in its session, a round
SHARED_DECAY = 0.998  # and in what all sessions saw: some tens of sessions
PRIOR_ROUNDS = 4.0  # what is assumed of a drafter counts as much as this many rounds
SESSION_PRIOR_ROUNDS = 12.0  # and so does what other sessions saw of a node
SESSION_PRIOR_TOKENS = 20.0  # and this many accepted tokens, of whether this session accepts more or less than others
SESSION_ROUNDS = 8.0  # rounds of one session are much alike: after so many, another one counts half as much for all
FIRST_PRIOR = 0.7  # of the first node
NEXT_PRIOR = 0.6  # of a node, as a fraction of the node before it
MAX_NEXT = 0.98

Floats = NDArray[np.float64]


class NodeCounts:
    """Decayed counts by node [MAX_DRAFT_TOKENS]: rounds that asked for it, drafted it, accepted it."""

    def __init__(self, decay: float = DECAY) -> None:
        self._decay = decay
        self._counts = np.zeros((3, MAX_DRAFT_TOKENS))
        self.asked, self.drafted, self.accepted = self._counts

    def observe(self, num_asked: int, num_drafted: int, path: Sequence[int], weight: float = 1.0) -> None:
        """Add one round; `path` has the accepted nodes."""
        self._counts[:, :num_asked] *= self._decay**weight
        self.asked[:num_asked] += weight
        self.drafted[: min(num_asked, num_drafted)] += weight
        for node in path:
            if node < num_asked:
                self.accepted[node] += weight


class AcceptanceHistory:
    """One drafter's proposals over all sessions."""

    def __init__(self) -> None:
        self._counts = NodeCounts(decay=SHARED_DECAY)
        self._probs: tuple[Floats, Floats] | None = None  # since the last round; a session with a fixed K asks for none
        self._expected: tuple[Floats, Floats] | None = None  # the same

    def observe(self, num_asked: int, num_drafted: int, path: Sequence[int], weight: float = 1.0) -> None:
        """Add one round."""
        self._counts.observe(num_asked, num_drafted, path, weight)
        self._probs = self._expected = None

    @property
    def accept_probs(self) -> Floats:
        """Each node's probability of being accepted [MAX_DRAFT_TOKENS]."""
        return self._known_probs()[0]

    @property
    def draft_probs(self) -> Floats:
        """Each node's probability of being drafted where it is asked for [MAX_DRAFT_TOKENS]."""
        return self._known_probs()[1]

    @property
    def expected(self) -> tuple[Floats, Floats]:
        """The mean tokens, and the mean draft tokens, of a round of a session of which nothing is known [MAX + 1]."""
        if self._expected is None:
            self._expected = _sums(1.0, self.accept_probs), _sums(0.0, self.draft_probs)
        return self._expected

    def _known_probs(self) -> tuple[Floats, Floats]:
        if self._probs is None:
            self._probs = self._accept_probs(), self._draft_probs()
        return self._probs

    def _draft_probs(self) -> Floats:
        prior = PRIOR_ROUNDS * self._unasked_draft_prob()
        return (self._counts.drafted + prior) / (self._counts.asked + PRIOR_ROUNDS)

    def _accept_probs(self) -> Floats:
        """Return each node's probability; where rounds were few, the node before it is the prior."""
        probs, prior, ratio = [], FIRST_PRIOR, self._next_ratio()
        for asked, accepted in zip(self._counts.asked.tolist(), self._counts.accepted.tolist(), strict=True):
            probs.append((accepted + PRIOR_ROUNDS * prior) / (asked + PRIOR_ROUNDS))
            prior = ratio * probs[-1]
        return np.array(probs)

    def _next_ratio(self) -> float:
        """Return how often a node was accepted, as a fraction of the node before it, where both were asked for."""
        counts = self._counts
        both = np.minimum(counts.asked[1:] / np.maximum(counts.asked[:-1], 1e-9), 1.0)
        before, after = float((both * counts.accepted[:-1]).sum()), float(counts.accepted[1:].sum())
        return min((after + PRIOR_ROUNDS * NEXT_PRIOR) / (before + PRIOR_ROUNDS), MAX_NEXT)

    def _unasked_draft_prob(self) -> float:
        """Return the fraction of all nodes asked for that were drafted."""
        return float((self._counts.drafted.sum() + 1) / (self._counts.asked.sum() + 1))


class SessionAcceptance:
    """One drafter's proposals in one session; what all sessions saw is the prior."""

    def __init__(self, shared: AcceptanceHistory) -> None:
        self._shared = shared
        self._counts = NodeCounts()
        self._num_rounds = 0

    def observe(self, num_asked: int, num_drafted: int, path: Sequence[int], weight: float = 1.0) -> None:
        """Add one round, here and to what all sessions saw."""
        self._counts.observe(num_asked, num_drafted, path, weight)
        self._shared.observe(num_asked, num_drafted, path, weight / (1 + self._num_rounds / SESSION_ROUNDS))
        self._num_rounds += 1

    def expected_tokens(self) -> Floats:
        """Return the mean tokens of a round by draft tokens asked for, the closing token included [MAX + 1]."""
        if not self._num_rounds:
            return self._shared.expected[0]
        asked, accepted, prior = self._counts.asked, self._counts.accepted, self._shared.accept_probs
        # a session that accepts more than others at the nodes tested will do so at the others too
        ratio = (accepted.sum() + SESSION_PRIOR_TOKENS) / ((asked * prior).sum() + SESSION_PRIOR_TOKENS)
        probs = (accepted + SESSION_PRIOR_ROUNDS * np.minimum(ratio * prior, 1.0)) / (asked + SESSION_PRIOR_ROUNDS)
        return _sums(1.0, probs)

    def expected_drafted(self) -> Floats:
        """Return the mean number of draft tokens by draft tokens asked for [MAX + 1]."""
        if not self._num_rounds:
            return self._shared.expected[1]
        asked, drafted, prior = self._counts.asked, self._counts.drafted, self._shared.draft_probs
        probs = (drafted + SESSION_PRIOR_ROUNDS * prior) / (asked + SESSION_PRIOR_ROUNDS)
        return _sums(0.0, probs)


def _sums(first: float, probs: Floats) -> Floats:
    """Return the sums of the first 0, 1, ... probabilities, each and a number [MAX + 1]; not to be written to."""
    sums = np.cumsum(np.concatenate([[first], probs]))
    sums.flags.writeable = False
    return sums
