"""What the target's offers are worth: learned apart where it is busy, as its head drafts for few sessions alone."""

import numpy as np

from coordinator.choosing.offers import Offers
from coordinator.choosing.plans import PLAIN, Estimate
from coordinator.choosing.shared_statistics import SharedStatistics

LENGTHS = np.array([1, 2, 4, 8])


def played(offers: Offers, shared: SharedStatistics, num_sessions: int, num_accepted: int) -> None:
    """Let the target offer for a while, at a load, and accept so many of four."""
    for _ in range(60):
        shared.costs.observe_score(4, 1.0, num_sessions, None)
        offers.begin_round()
        offers.next(Estimate(PLAIN, 1.0, 1.0), 1.03)
        offers.observe(4, 4, range(num_accepted))
        offers.observe_time(1.0, 1 + num_accepted)


def test_offers_to_few_sessions_promise_nothing_for_many() -> None:
    shared = SharedStatistics()
    offers = Offers(shared, LENGTHS, is_greedy=True)
    played(offers, shared, num_sessions=1, num_accepted=3)
    assert offers.best.num_tokens > 2
    played(offers, shared, num_sessions=8, num_accepted=0)
    assert offers.best.num_tokens < 1.3
    shared.costs.observe_score(4, 1.0, 1, None)
    assert offers.best.num_tokens > 2, "what was seen among few is not forgotten among many"


def test_an_offer_is_counted_at_the_load_at_which_it_was_asked_for() -> None:
    """In the round before; by then the next one's is asked for."""
    shared = SharedStatistics()
    offers = Offers(shared, LENGTHS, is_greedy=True)
    played(offers, shared, num_sessions=1, num_accepted=0)
    for _ in range(60):
        shared.costs.observe_score(0, 1.0, 1, None)
        offers.next(Estimate(PLAIN, 1.0, 1.0), 1.03)  # asked for among few, in a round that is not counted
        offers.begin_round()
        shared.costs.observe_score(0, 1.0, 8, None)
        offers.next(Estimate(PLAIN, 1.0, 1.0), 1.03)
        offers.observe(4, 4, range(3))
        offers.observe_time(1.0, 4)
    among_many = offers.best.num_tokens
    shared.costs.observe_score(0, 1.0, 1, None)
    assert offers.best.num_tokens > among_many + 1
