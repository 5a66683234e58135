"""A race decides which token follows: each token runs in an exponential time over its chance, and the least time wins.

The winner has the distribution of the chances (the Gumbel-max trick). A token's time is a pure function of a session's
seed, the place in the text, and the token. So who runs the race with other chances mostly sees the same winner: with d
the total variation between the two, in at least (1 - d) / (1 + d) of all cases (Daliri, Musco and Suresh 2025,
"Coupling without communication and drafter-invariant speculative decoding"). That is how a draft guesses what the
target will draw.

A time is taken for each token that has a chance worth it, and one for the rest of them together: if that one wins, a
uniform draws from the rest. Which tokens these are depends on the chances alone, so the law is the same; but who
runs with another rest sees the same winner a little less often.

Source: the counter-based generator Threefry2x64-20 (Salmon, Moraes, Dror and Shaw 2011).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MIN_CHANCE = 2.0**-14  # of all: a token that has less runs with the rest
MAX_RUNNERS = 1024  # by themselves; where more have MIN_CHANCE, it is doubled until they are no more
NUM_DOUBLINGS = 4  # then no more than MAX_RUNNERS can have it
REST = 2**63 - 1  # runs in place of a token
MIN_GUESSED = 2.0**-10  # a token to which a draft gives less is not guessed
SPREAD = 0.85  # of what a draft does not know

ROTATIONS = (16, 42, 12, 31, 16, 32, 24, 21)
NUM_ROUNDS = 20
PARITY = np.uint64(0x1BD11BDAA9FC1A22)

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


class Race(NamedTuple):
    """The race for one place of a session's text."""

    seed: int
    place: int  # number of tokens before it


class Draw(NamedTuple):
    """By what a token is drawn: a number in [0, 1), and the race that comes first, if it is run."""

    uniform: float
    race: Race | None = None


def times(races: Sequence[Race], tokens: npt.NDArray[np.int64]) -> Floats:
    """Return the exponential times of tokens [N, M], each row in its own race."""
    seeds = np.array([race.seed for race in races], np.uint64)[:, None]
    places = np.array([race.place for race in races], np.uint64)[:, None]
    bits = threefry((seeds, places), (tokens.astype(np.uint64), np.uint64(0)))[0] >> np.uint64(12)
    times: Floats = -np.log((bits + 0.5) * 2.0**-52)  # of neither 0 nor 1
    return times


def threefry(key: tuple[Words, Words], counter: tuple[Words, np.uint64]) -> tuple[Words, Words]:
    """Return two words of random bits for each key and counter; all of them are broadcast."""
    with np.errstate(over="ignore"):  # sums are modulo 2**64
        keys = (*key, PARITY ^ key[0] ^ key[1])
        first, second = counter[0] + keys[0], counter[1] + keys[1]
        for number in range(NUM_ROUNDS):
            first = first + second
            left = np.uint64(ROTATIONS[number % len(ROTATIONS)])
            second = ((second << left) | (second >> (np.uint64(64) - left))) ^ first
            if number % 4 == 3:
                injected = number // 4 + 1
                first = first + keys[injected % 3]
                second = second + keys[(injected + 1) % 3] + np.uint64(injected)
    return first, second


def likely_winners(
    rows: Floats, races: Sequence[Race], count: int, names: npt.NDArray[np.int64]
) -> tuple[list[list[int]], list[list[float]]]:
    """Return who most likely wins each row's race, best first, and the chances of that, by a draft's rows [N, V].

    `names` [V] are the target's tokens. A token leads the more surely the farther it is ahead: what the draft does not
    know of the target moves it by a SPREAD, fitted to a head of SmolLM2 at temperature 1. What a draft does not guess
    runs too, with a time that nobody knows. Chances are NaN where a row has no probabilities.
    """
    found = [_likely_winners(row, race, count, names) for row, race in zip(rows, races, strict=True)]
    return [tokens for tokens, _ in found], [chances for _, chances in found]


def _likely_winners(row: Floats, race: Race, count: int, names: npt.NDArray[np.int64]) -> tuple[list[int], list[float]]:
    runners = np.flatnonzero(row >= MIN_GUESSED)
    weights = (row[runners] / times([race], names[runners][None])[0]) ** (1 / SPREAD)
    rest = max(1 - float(row[runners].sum()), 0.0) ** (1 / SPREAD)
    best = np.argsort(-weights, kind="stable")[:count]
    missing = count - len(best)
    chances = [*(weights[best] / (weights.sum() + rest)).tolist(), *[np.nan if np.isnan(row[0]) else 0.0] * missing]
    return [*names[runners[best]].tolist(), *[0] * missing], chances
