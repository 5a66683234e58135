"""Chosen drafts that are matched change no token: enumerated in fractions, in the real loop, and where that would end.

One round is enough for whole texts: whatever was drafted, it commits what plain decoding draws at its places, by draws
that belong to these places, and so does the round after it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise, product
from math import prod
from typing import TypeAlias

import pytest

from coordinator import rounds
from coordinator.rounds import Drafted
from specdec.exact import randomness
from specdec.exact.acceptance import DEFAULT_RULE, RULES, matched
from specdec.exact.race import Draw, Race
from specdec.exact.randomness import Key, Purpose, own_draws, uniform
from specdec.exact.tree import children_of, depths_of, path_to
from specdec.exact.values import Proposal, Scores, TargetDistribution, Verdict, one_hot
from specdec.types import TokenOrigin
from tests.support.enumeration import dense
from tests.support.toys import (
    OlderScorer,
    ToyDrafter,
    ToyModel,
    ToyScorer,
    generate_text,
    markov_logits,
    new_chooser,
)

Text: TypeAlias = tuple[int, ...]
ROWS = [dense(3, 1, 2), dense(0, 1, 1), dense(1, 5, 1)]  # of a Markov chain over three tokens
VOCABULARY = range(len(ROWS))
TREES = [parents for count in range(4) for parents in product(*(range(index + 1) for index in range(count)))]


def cells() -> list[tuple[Fraction, Fraction]]:
    """Return the intervals of one draw in which it chooses the same token after every text, and their lengths."""
    points = sorted({Fraction(0), Fraction(1), *(value for row in ROWS for value in accumulate(row))})
    return [(low, high - low) for low, high in pairwise(points)]


CELLS = cells()


def token_of(last: int, draw: Fraction) -> int:
    """Return the token that the target draws after another one."""
    return next(token for token, total in enumerate(accumulate(ROWS[last])) if draw < total)


def plain_text(start: int, draws: Sequence[Fraction]) -> Text:
    """Return what plain decoding draws at the places after `start`."""
    text: Text = (start,)
    for draw in draws:
        text += (token_of(text[-1], draw),)
    return text[1:]


def scores_of(start: int, tokens: Text, parents: Text, draws: Sequence[Fraction]) -> Scores:
    """Return the target's own tokens at the positions of a tree, by the draws of their places."""
    lasts, depths = (start, *tokens), (0, *depths_of(parents))
    drawn = [token_of(last, draws[depth]) for last, depth in zip(lasts, depths, strict=True)]
    return Scores(tuple(TargetDistribution((), 1.0, token) for token in drawn), is_matched=True)


def committed(tokens: Text, verdict: Verdict) -> Text:
    return (*(tokens[index] for index in verdict.path), verdict.next_token)


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_whatever_is_drafted_the_text_is_that_of_plain_decoding(parents: Text) -> None:
    """All trees of up to three tokens, all tokens in them, siblings of the same one too, and all draws."""
    for tokens in product(VOCABULARY, repeat=len(parents)):
        for draws in product([low for low, _ in CELLS], repeat=max(depths_of(parents), default=0) + 1):
            verdict = matched(tokens, parents, scores_of(0, tokens, parents, draws))
            text = committed(tokens, verdict)
            assert text == plain_text(0, draws)[: len(text)]
            assert verdict.path == tuple(path_to((verdict.path or (-1,))[-1] + 1, parents))


@pytest.mark.parametrize("parents", [(), (0,), (0, 1), (0, 0), (0, 0, 1)], ids=str)
def test_the_verdict_is_that_of_the_loop(parents: Text) -> None:
    """As many tokens are accepted as can be: the round ends where no child is the token that was drawn."""
    tokens = tuple(range(len(parents)))
    proposal = Proposal(tokens, tuple(map(one_hot, tokens)), parents)
    for draws in product([low for low, _ in CELLS], repeat=len(parents) + 1):
        verdict = matched(tokens, parents, scores_of(0, tokens, parents, draws))
        end = (verdict.path or (-1,))[-1] + 1
        children = [tokens[child] for child in proposal.children()[end]]
        assert verdict.next_token not in children
        assert verdict.next_origin is (TokenOrigin.RECOVERED if children else TokenOrigin.BONUS)


def test_it_accepts_as_often_as_the_rules_that_draw() -> None:
    """The expected number of accepted tokens of chains and trees that were chosen: no rule accepts more."""
    for parents in TREES:
        for tokens in product(VOCABULARY, repeat=len(parents)):
            if len({(parent, token) for parent, token in zip(parents, tokens, strict=True)}) < len(tokens):
                continue  # a token twice at a position is no gain to any
            expected = Fraction(0)
            for drawn in product(CELLS, repeat=max(depths_of(parents), default=0) + 1):
                verdict = matched(tokens, parents, scores_of(0, tokens, parents, [low for low, _ in drawn]))
                expected += prod(length for _, length in drawn) * verdict.num_accepted
            paths = [path_to(position, parents) for position in range(1, len(parents) + 1)]
            assert expected == sum(chance_of(tuple(tokens[index] for index in path)) for path in paths)


# ---- rounds of both kinds in one text: which kind comes next may not depend on draws that nobody has committed

Mode: TypeAlias = Callable[[Text, int], bool]  # of the text, and of what was drawn after a rejected token
NUM_PLACES = 3


def law(is_drawn: Mode) -> dict[Text, Fraction]:
    """Return the distribution of three tokens: a round drafts token 0, chosen, then the next round is of either kind.

    A round of the other kind draws by its rule, with keys of its own: it has the target's distribution whatever the
    draws of its place are (tests/exactness/test_enumeration.py).
    """
    distribution: dict[Text, Fraction] = defaultdict(Fraction)
    for drawn in product(CELLS, repeat=NUM_PLACES):
        draws = [low for low, _ in drawn]
        weight = prod(length for _, length in drawn)
        scores = scores_of(0, (0,), (0,), draws)
        text = committed((0,), matched((0,), (0,), scores))
        for after, chance in endings(text, draws, is_drawn(text, scores.positions[1].tail_token)):
            distribution[after] += weight * chance
    return dict(distribution)


def endings(text: Text, draws: Sequence[Fraction], is_drawn: bool) -> Iterator[tuple[Text, Fraction]]:
    """Yield what may follow a text, with its probability."""
    if not is_drawn:
        yield (*text, *plain_text(text[-1], draws[len(text) :])), Fraction(1)
        return
    for after in product(VOCABULARY, repeat=NUM_PLACES - len(text)):
        yield (*text, *after), chance_of(after, text[-1])


def chance_of(text: Text, start: int = 0) -> Fraction:
    """Return the probability that the target continues `start` with a text."""
    return prod((ROWS[last][token] for last, token in zip((start, *text), text, strict=False)), start=Fraction(1))


def distance(law: dict[Text, Fraction]) -> Fraction:
    """Return the total variation to the target's law."""
    texts = product(VOCABULARY, repeat=NUM_PLACES)
    return sum((abs(law.get(text, Fraction(0)) - chance_of(text)) for text in texts), Fraction(0)) / 2


@pytest.mark.parametrize("number", range(8))
def test_which_kind_comes_next_may_follow_the_text(number: int) -> None:
    """Any function of the token that the first round commits."""
    assert distance(law(lambda text, _: bool(number >> text[0] & 1))) == 0


def test_which_kind_comes_next_may_not_follow_a_draw_that_was_discarded() -> None:
    """The token drawn after a rejected one tells of the draw that plain decoding uses next."""
    found = distance(law(lambda text, discarded: len(text) == 1 and discarded == 0))
    assert found == Fraction(11, 168)


# ---- the real loop

TARGET = ToyModel(markov_logits(12))
NUM_SEEDS, NUM_GENERATED = 60, 12


class ChoosingDrafter(ToyDrafter):
    """Drafts a tree of whatever tokens, chosen; which ones and how many changes with the text's length and seed."""

    async def propose(self, committed: list[int], num_draft_tokens: int, stop_below: float = 0.0) -> Drafted:
        """Return a tree of at most K tokens."""
        count = (self.seed + len(committed)) % (num_draft_tokens + 1)
        numbers = [uniform(self.seed, Key(len(committed), index, Purpose.DRAFT)) for index in range(2 * count)]
        tokens = tuple(int(5 * number) for number in numbers[:count])
        parents = tuple(int((index + 1) * number) for index, number in enumerate(numbers[count:]))
        return Drafted(Proposal(tokens, tuple(map(one_hot, tokens)), parents), 1e-3)


async def text_of(seed: int, num_draft_tokens: int | None, scorer: type[ToyScorer] = ToyScorer) -> tuple[Text, int]:
    """Return a text and how many draft tokens were accepted."""
    drafter, rule = ChoosingDrafter(TARGET, seed), RULES[DEFAULT_RULE]
    result = await generate_text(drafter, scorer(TARGET, seed), new_chooser(num_draft_tokens), NUM_GENERATED, rule)
    return tuple(result.tokens), result.total_accepted


@pytest.mark.parametrize("num_draft_tokens", [1, 4, None])
async def test_the_loop_commits_the_text_of_plain_decoding(num_draft_tokens: int | None) -> None:
    num_accepted = 0
    for seed in range(NUM_SEEDS):
        text, accepted = await text_of(seed, num_draft_tokens)
        assert text == (await text_of(seed, 0))[0]
        num_accepted += accepted
    assert num_accepted > NUM_SEEDS


async def num_changed(scorer: type[ToyScorer]) -> int:
    """Return how many texts are not those of plain decoding."""
    return sum([(await text_of(seed, 4, scorer))[0] != (await text_of(seed, 0))[0] for seed in range(NUM_SEEDS)])


async def test_texts_are_others_where_a_rule_draws() -> None:
    assert await num_changed(OlderScorer) > NUM_SEEDS / 2


async def test_texts_are_others_where_draws_belong_to_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the mistake: a position's draw has the key of its round, as the tail of a drawn draft has."""

    def by_round(seed: int, position: int, count: int) -> tuple[Draw, ...]:
        return tuple(map(Draw, randomness.uniforms(seed, position, count, Purpose.TAIL)))

    monkeypatch.setattr(randomness, "own_draws", by_round)
    assert await num_changed(ToyScorer) > NUM_SEEDS / 2


async def test_texts_are_others_where_siblings_are_taken_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the mistake: the round goes on at the first child, whichever was drawn."""

    def first_child(tokens: Text, parents: Text, scores: Scores) -> Verdict:
        verdict = matched(tokens, parents, scores)
        if not verdict.path:
            return verdict
        end = children_of(parents)[parents[verdict.path[-1]]][0]
        return replace(verdict, next_token=scores.positions[end + 1].tail_token)

    monkeypatch.setattr(rounds, "matched", first_child)
    assert await num_changed(ToyScorer) > 0


def test_draws_belong_to_places() -> None:
    expected = [Draw(uniform(7, Key(place, 0, Purpose.TAIL)), Race(7, place)) for place in (30, 31, 32)]
    assert own_draws(7, 30, 3) == tuple(expected)
    assert own_draws(7, 30, 0) == ()
