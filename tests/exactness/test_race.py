"""A race draws with the law of the target's chances, and who runs it with a draft's mostly sees the same winner."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from benchmarks.judging import agreement_of_counts
from specdec.engine.rows import read_and_draw
from specdec.exact import race, sampling
from specdec.exact.race import MAX_RUNNERS, MIN_CHANCE, REST, Draw, Race, likely_winners, threefry, times
from specdec.exact.randomness import own_draws
from specdec.exact.sampling import SamplingContext
from specdec.exact.values import TargetDistribution
from specdec.types import SamplingParams

NUM_RACES = 4000
REJECT_BELOW = 1e-6
FEW = np.array([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
WITH_A_REST = np.concatenate((np.array([0.3, 0.2, 0.1]), np.full(16_000, 0.4 / 16_000)))  # of little chances
MANY = np.concatenate((np.full(2000, 0.9 / 2000), np.full(1000, 0.1 / 1000)))  # more than MAX_RUNNERS have MIN_CHANCE
LAWS = {"few": FEW, "with a rest": WITH_A_REST, "many": MANY}
SAMPLED = SamplingContext(SamplingParams())
Drawing = Callable[..., Sequence[TargetDistribution | None]]


def winners(chances: np.ndarray, drawing: Drawing, count: int = NUM_RACES) -> np.ndarray:
    """Return who wins the same place in sessions of so many seeds."""
    logits = torch.from_numpy(np.log(chances)).float()
    tokens: list[int] = []
    for begin in range(0, count, 250):
        draws = [own_draws(seed, 9, 1)[0] for seed in range(begin, begin + 250)]
        found = drawing(logits.repeat(250, 1), [SAMPLED] * 250, [()] * 250, draws)
        tokens += [each.tail_token for each in found if each]
    return np.array(tokens)


def p_value(chances: np.ndarray, tokens: np.ndarray) -> float:
    """Return how likely these winners are; tokens that are rare are counted in twenty groups."""
    groups = np.arange(len(chances)) if len(chances) < 20 else (np.cumsum(chances) * 20 - 1e-9).astype(int)
    expected = np.bincount(groups, weights=chances).astype(np.float64)
    observed = np.bincount(groups[tokens], minlength=len(expected)).astype(np.float64)
    return agreement_of_counts(observed, expected).p_value


def test_the_bits_are_those_of_the_paper() -> None:
    """Three of the known answers that its authors give out with their library, Random123."""
    every = 2**64 - 1
    pi = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89
    known = {
        (0, 0, 0, 0): (0xC2B6E3A8C2C69865, 0x6F81ED42F350084D),
        (every, every, every, every): (0xE02CB7C4D95D277A, 0xD06633D0893B8B68),
        pi: (0x263C7D30BB0F0AF1, 0x56BE8361D3311526),
    }
    for (first, second, *key), expected in known.items():
        keys, counter = [np.array([word], np.uint64) for word in key], np.array([first], np.uint64)
        found = threefry((keys[0], keys[1]), (counter, np.uint64(second)))
        assert tuple(int(word[0]) for word in found) == expected


@pytest.mark.parametrize("drawing", [read_and_draw, sampling.read_and_draw], ids=["compiled", "torch"])
@pytest.mark.parametrize("name", LAWS)
def test_winners_have_the_targets_law(name: str, drawing: Drawing) -> None:
    value = p_value(LAWS[name], winners(LAWS[name], drawing))
    print(name, value)
    assert value > REJECT_BELOW


def test_times_are_exponential_and_independent_of_one_another() -> None:
    """Over seeds, over places, over tokens, and the rest's."""
    tokens = np.array([[0, 1, 2, 50_000, REST]])
    drawn = [
        *(times([Race(seed, 9)], tokens)[0] for seed in range(NUM_RACES)),
        *(times([Race(7, place)], tokens)[0] for place in range(NUM_RACES)),
    ]
    columns = np.array(drawn).T
    ordered, count = np.sort(columns, axis=None), columns.size
    farthest = np.abs(1 - np.exp(-ordered) - (np.arange(count) + 0.5) / count).max()
    assert farthest < 2.7 / np.sqrt(count), "Kolmogorov and Smirnov's test, at 1e-6"
    nearby = np.concatenate((columns[:, :-1], columns[:, 1:]))  # the same token's in the next race, too
    correlations = np.corrcoef(nearby) - np.eye(len(nearby))
    assert np.abs(correlations).max() < 6 / np.sqrt(len(drawn))


def equal_times(races: Sequence[Race], tokens: np.ndarray) -> np.ndarray:
    """Plant the mistake: uniform numbers are taken for times."""
    return 1 - np.exp(-times(races, tokens))


def hasty_times(races: Sequence[Race], tokens: np.ndarray) -> np.ndarray:
    """Plant the mistake: the rest does not run."""
    return np.where(tokens == REST, np.inf, times(races, tokens))


def places_of_one(races: Sequence[Race], tokens: np.ndarray) -> np.ndarray:
    """Plant the mistake: two neighbours run in one time."""
    return times(races, np.where(tokens == REST, tokens, tokens // 2))


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("few", equal_times), ("few", places_of_one), ("with a rest", hasty_times), ("with a rest", equal_times)],
)
def test_other_times_are_noticed(
    name: str, mistake: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "times", mistake)
    assert p_value(LAWS[name], winners(LAWS[name], sampling.read_and_draw)) < REJECT_BELOW


def test_who_runs_alone_depends_on_chances_alone() -> None:
    """At most MAX_RUNNERS, all that have as much as any of them."""
    rows = torch.from_numpy(np.stack([np.pad(law, (0, len(WITH_A_REST) - len(law))) for law in LAWS.values()]))
    runners, chances = sampling._runners(rows.clone(), [0, 1, 2])
    assert (chances > 0).sum(dim=-1).tolist() == [6, 3, 0]
    assert len(runners[0]) == MAX_RUNNERS + 1
    almost = torch.full((1, MAX_RUNNERS + 6), 0.5 * MIN_CHANCE)
    almost[:, 3:8] = 0.1
    assert (sampling._runners(almost, [0])[1] > 0).sum() == 5


@pytest.mark.parametrize("distance", [0.0, 0.1, 0.3, 0.6])
def test_a_draft_mostly_sees_the_same_winner(distance: float) -> None:
    """In at least (1 - d) / (1 + d) of all races, with d the total variation (Daliri et al. 2025, theorem 1)."""
    source = np.random.default_rng(3)
    target = source.dirichlet(np.full(40, 0.3))
    other = source.dirichlet(np.full(40, 0.3))
    share = distance / (0.5 * np.abs(target - other).sum())
    assert share <= 1
    draft = (1 - share) * target + share * other
    won = winners(target + 1e-12, read_and_draw)
    races = [Race(seed, 9) for seed in range(NUM_RACES)]
    tokens, _ = likely_winners(np.broadcast_to(draft, (NUM_RACES, 40)), races, 3, np.arange(40))
    ranks = np.array(tokens) == won[:, None]
    least = (1 - distance) / (1 + distance)
    assert ranks[:, 0].mean() >= (1 - 2e-3 if distance == 0 else least - 3 * np.sqrt(least / NUM_RACES))
    assert ranks[:, 0].mean() > ranks[:, 1].mean() >= ranks[:, 2].mean()


def test_a_race_without_a_token_that_runs_alone_is_the_rests() -> None:
    chances = np.full(1 << 15, 2.0**-15)
    draws = [Draw(0.25, Race(1, 2)), Draw(0.25)]
    found = read_and_draw(torch.from_numpy(np.log(chances)).float().repeat(2, 1), [SAMPLED] * 2, [()] * 2, draws)
    assert found[0] == found[1]
    assert chances[0] < race.MIN_CHANCE
