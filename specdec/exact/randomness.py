"""Randomness as a pure function of (seed, key): a retried or repeated call makes the same decision.

Every draw of a session is `uniform(seed, Key(...))`, but for the times of races. Where draft tokens are drawn, the
committed length at the round's start is part of the key and is fresh each round, since each round commits at least one
token; so no key decides twice, and keeping, discarding or repeating such a round's draws never ties one round to
another.

A token that the target draws itself, in a plain round or where draft tokens were chosen (`acceptance.matched`), has the
key of its place in the text: that of the plain round which would draw it. It has won a race there (`race.py`), or was
drawn from the rest by a uniform. So it is the same token, whatever was drafted. What is drawn after a rejected token
foretells the draws of later rounds: nothing may be decided by it.

Source: the counter-based generator Philox4x64-10 (Salmon, Moraes, Dror and Shaw 2011).
"""

import enum
import threading
from typing import Any, NamedTuple

import numpy as np

from specdec.exact.race import Draw, Race
from specdec.exact.values import Uniforms

MAX_SEED = 2**64 - 1
BLOCK_WORDS = 4  # that one value of the counter yields, 64 bits each; the next value follows by itself
NO_DRAWS = Uniforms((), 0.0)


class Purpose(enum.IntEnum):
    """What a draw decides; two purposes never share one."""

    DRAFT = 1  # the draft worker draws a proposal's token
    ACCEPT = 2  # the coordinator accepts or rejects it
    CLOSE = 3  # the coordinator draws the token that closes the round
    TAIL = 4  # the target worker draws from outside a position's union; in a race, from the rest


class Key(NamedTuple):
    """Names one draw of a session."""

    committed_length: int  # tokens committed when the round began, prompt included; of own draws: before their place
    position: int  # within the round, from 0; of own draws 0
    purpose: Purpose


class _Generator(threading.local):
    """One generator a thread, moved to the key of each draw: a new one would take four times as long."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(0)
        self._state: Any = self._bits.state
        self._state["buffer_pos"] = len(self._state["buffer"])  # nothing is left of an earlier block
        self._key, self._counter = self._state["state"]["key"], self._state["state"]["counter"]

    def words(self, seed: int, purpose: int, position: int, committed_length: int, count: int) -> list[int]:
        """Return the first 64 bits of each of the `count` blocks after this counter."""
        self._key[0], self._key[1] = seed, purpose
        self._counter[0], self._counter[1] = position, committed_length
        self._bits.state = self._state
        words: list[int] = self._bits.random_raw(BLOCK_WORDS * count)[::BLOCK_WORDS].tolist()
        return words


_generator = _Generator()


def uniform(seed: int, key: Key) -> float:
    """Return the 53-bit uniform in [0, 1) that belongs to this key."""
    (word,) = _generator.words(seed, key.purpose, key.position, key.committed_length, 1)
    return _unit(word)


def uniforms(seed: int, committed_length: int, count: int, purpose: Purpose) -> tuple[float, ...]:
    """Return the draws of positions 0 to count - 1 of one round."""
    return tuple(map(_unit, _generator.words(seed, purpose, 0, committed_length, count))) if count else ()


def own_draws(seed: int, position: int, count: int) -> tuple[Draw, ...]:
    """Return the draws of the tokens that the target draws itself at `count` places of the text from `position` on."""
    places = range(position, position + count)
    return tuple(Draw(uniform(seed, Key(place, 0, Purpose.TAIL)), Race(seed, place)) for place in places)


def _unit(word: int) -> float:
    """Return 53 of 64 bits as a number in [0, 1)."""
    return (word >> 11) * 2.0**-53


def acceptance_uniforms(seed: int, committed_length: int, num_draft_tokens: int) -> Uniforms:
    """Return the draws by which a rule accepts what was drafted in one round.

    Without draft tokens nothing is drawn: the round's token is the target's own.
    """
    if not num_draft_tokens:
        return NO_DRAWS
    return Uniforms(
        uniforms(seed, committed_length, num_draft_tokens, Purpose.ACCEPT),
        uniform(seed, Key(committed_length, 0, Purpose.CLOSE)),
    )
