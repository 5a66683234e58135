"""The block rule has the target's distribution, and accepts at least as many tokens as the token rule: enumerated.

A configuration is a pair of distributions, a support size, K, and what makes the drafter stop early. The text of one
round, continued by the target itself, must have the target's joint distribution: equality of fractions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.exact.acceptance import AcceptanceRule, BlockRule, TokenRule
from specdec.exact.values import Proposal, SparseDistribution
from tests.support.counts import SWEEP
from tests.support.enumeration import (
    ONE,
    ZERO,
    Draws,
    Enumeration,
    History,
    Note,
    Pair,
    RoundOutcome,
    expected_accepted,
    prob_of,
    target_text_distribution,
)
from tests.support.pairs import DISTRIBUTIONS, markov_pairs, rotating_pair, sparse_markov_pair

# whether a drafter stops: by the draft's distribution after the tokens drawn so far, and by those tokens
Stop = Callable[[SparseDistribution, History], bool]
Weigh = Callable[[Fraction, Fraction], Fraction]  # the weight of a prefix and p / q of the next token: the next weight

STOPS: dict[str, Stop] = {
    "never": lambda draft, drawn: False,
    "before an unsure token": lambda draft, drawn: max(draft.probs) < Fraction(1, 2),
    "before a sure token": lambda draft, drawn: max(draft.probs) >= Fraction(1, 2),
    "after token 0": lambda draft, drawn: 0 in drawn,
    "after any token but 0": lambda draft, drawn: drawn[-1:] not in ((), (0,)),
}


@dataclass(frozen=True)
class StoppingDrafter(Enumeration):
    """Drafts a chain of at most K tokens, and may stop before it draws the next one."""

    stop: Stop = STOPS["never"]

    def propose(self, history: History, num_draft_tokens: int, draws: Draws) -> Proposal:
        """Draft until it stops."""
        tokens: History = ()
        distributions: tuple[SparseDistribution, ...] = ()
        while len(tokens) < num_draft_tokens:
            draft = self.pair.draft((*history, *tokens))
            if self.stop(draft, tokens):
                break
            distributions += (draft,)
            tokens += (draws.token(draft),)
        return Proposal(tokens, distributions)

    def ratio_products(self, text: History, room: int, weigh: Weigh) -> Fraction:
        """Return the sum over i of the mean w_i, where `weigh(w, p / q)` is the next w: the mean accepted length.

        Independent of the production code: P(i or more accepted) is the mean of w_i over drafts.
        """
        return self._products(text, (), room, ONE, weigh)

    def _products(
        self,
        text: History,
        drawn: History,
        room: int,
        weight: Fraction,
        weigh: Callable[[Fraction, Fraction], Fraction],
    ) -> Fraction:
        draft = self.pair.draft(text)
        if not room or self.stop(draft, drawn):
            return ZERO
        total = ZERO
        for token in draft.token_ids:
            draft_prob, target_prob = prob_of(draft, token), self.pair.target(text)[token]
            longer = weigh(weight, target_prob / draft_prob)
            rest = self._products((*text, token), (*drawn, token), room - 1, longer, weigh)
            total += draft_prob * (longer + rest)
        return total


def block_weight(weight: Fraction, ratio: Fraction) -> Fraction:
    """Return min(1, w p / q)."""
    return min(ONE, weight * ratio)


def token_weight(weight: Fraction, ratio: Fraction) -> Fraction:
    """Return w min(1, p / q)."""
    return weight * min(ONE, ratio)


class Configuration(NamedTuple):
    """What is enumerated."""

    distributions: str
    support_size: int
    num_draft_tokens: int
    stop: str

    def drafter(self, rule: AcceptanceRule) -> StoppingDrafter:
        """Return the enumeration."""
        target, draft, size = DISTRIBUTIONS[self.distributions]
        pair = rotating_pair(target, draft, min(size, self.support_size))
        return StoppingDrafter(pair, rule, STOPS[self.stop])


SUPPORT_SIZES = {1: (3, 2, 1), 2: (3, 2, 1), 3: (3, 2, 1), 4: (2, 1)}  # by K
LOOKS_BACK = ("after token 0", "after any token but 0")  # with K = 1 there are no earlier tokens


def configurations(num_draft_tokens: int, distributions: str) -> list[Configuration]:
    """Return all that differ: a support cannot be larger than the draft's."""
    _, draft, size = DISTRIBUTIONS[distributions]
    largest = min(size, sum(map(bool, draft)))
    sizes = {min(largest, size) for size in SUPPORT_SIZES[num_draft_tokens]}
    stops = [stop for stop in STOPS if num_draft_tokens > 1 or stop not in LOOKS_BACK]
    return [Configuration(distributions, size, num_draft_tokens, stop) for size in sizes for stop in stops]


def assert_exact_and_never_worse(drafter: StoppingDrafter, num_draft_tokens: int, history: History = (0,)) -> None:
    """Assert that a round has the target's distribution, and the accepted lengths that the formulas give."""
    outcomes = list(drafter.outcomes(history, num_draft_tokens))
    distribution = drafter.continued_distribution(history, outcomes, num_draft_tokens + 1)
    assert distribution == target_text_distribution(drafter.pair, history, num_draft_tokens + 1)
    accepted = expected_accepted(outcomes)
    assert accepted == drafter.ratio_products(history, num_draft_tokens, block_weight)
    by_token = expected_accepted(replace(drafter, rule=TokenRule()).outcomes(history, num_draft_tokens))
    assert by_token == drafter.ratio_products(history, num_draft_tokens, token_weight)
    assert accepted >= by_token


@pytest.mark.parametrize("distributions", DISTRIBUTIONS)
@pytest.mark.parametrize("num_draft_tokens", SUPPORT_SIZES)
def test_one_round_of_a_block(num_draft_tokens: int, distributions: str) -> None:
    """Exact, and never fewer accepted tokens than the token rule, for every stopping rule of the drafter."""
    for each in configurations(num_draft_tokens, distributions):
        assert_exact_and_never_worse(each.drafter(BlockRule()), num_draft_tokens)


def test_the_number_of_configurations() -> None:
    """Each is a pair, a support size, a K, and a drafter that stops somewhere else."""
    count = sum(len(configurations(size, distributions)) for size in SUPPORT_SIZES for distributions in DISTRIBUTIONS)
    print(f"{count} configurations of the block rule")
    assert count >= 612


def test_the_block_rule_accepts_more() -> None:
    """Not only never fewer: the gain in tokens a round on one pair."""
    block = StoppingDrafter(sparse_markov_pair(3), BlockRule())
    token = replace(block, rule=TokenRule())
    gain = (1 + expected_accepted(block.outcomes((0,), 3))) / (1 + expected_accepted(token.outcomes((0,), 3)))
    print(f"tokens a round at K = 3: {float(gain):.4f} times the token rule's")
    assert gain > Fraction(102, 100)


# ---- several rounds


def last_accepted(outcome: RoundOutcome) -> Note:
    """Note how many tokens were accepted, and which were drafted, rejected ones too."""
    return outcome.verdict.num_accepted, outcome.proposal.tokens


def length_from_note(history: History, note: Note) -> int:
    """Return K from what was noted of the last round: 1 after a rejection of token 0 or of all, else 2."""
    if note is None:
        return 2
    assert isinstance(note, tuple)
    num_accepted, drafted = note
    return 1 if num_accepted == 0 or 0 in drafted[num_accepted:] else 2


@pytest.mark.parametrize("size", [3, 2, 1])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_texts_of_several_rounds_of_blocks(num_draft_tokens: int, size: int) -> None:
    """Rounds that continue from any end of the last one: the joint distribution of four tokens of a Markov chain."""
    enumeration = Enumeration(sparse_markov_pair(size), BlockRule())
    distribution = enumeration.text_distribution((0,), 4, lambda history, note: num_draft_tokens)
    assert distribution == target_text_distribution(enumeration.pair, (0,), 4)


@pytest.mark.parametrize("rule", [TokenRule(), BlockRule()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("size", [3, 2])
def test_draft_length_may_follow_rejected_tokens(size: int, rule: AcceptanceRule) -> None:
    """K may depend on anything in earlier rounds of drawn drafts, since each has fresh randomness."""
    enumeration = Enumeration(sparse_markov_pair(size), rule)
    distribution = enumeration.text_distribution((0,), 4, length_from_note, last_accepted)
    assert distribution == target_text_distribution(enumeration.pair, (0,), 4)


@settings(max_examples=30 * SWEEP, deadline=None, derandomize=True, database=None)
@given(markov_pairs(), st.integers(1, 3), st.sampled_from(sorted(STOPS)))
def test_any_rational_distributions_in_blocks(pair: Pair, num_draft_tokens: int, stop: str) -> None:
    """For random rational distributions."""
    assert_exact_and_never_worse(StoppingDrafter(pair, BlockRule(), STOPS[stop]), num_draft_tokens)
