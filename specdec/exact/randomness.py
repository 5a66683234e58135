"""Randomness as a pure function of (seed, key): a retried or repeated call makes the same decision.

Every draw of a session is `uniform(seed, Key(...))`. The committed length at the round's start is part of the key and
is fresh each round, since each round commits at least one token; so no key is consumed twice, and keeping, discarding
or repeating a round's draws never ties one round to another.

Source: the counter-based generator Philox4x64-10 (Salmon, Moraes, Dror and Shaw 2011).
"""

import enum
from typing import NamedTuple

import numpy as np

from specdec.exact.values import Uniforms

MAX_SEED = 2**64 - 1


class Purpose(enum.IntEnum):
    """What a draw decides; two purposes never share one."""

    DRAFT = 1  # the draft worker draws a proposal's token
    ACCEPT = 2  # the coordinator accepts or rejects it
    CLOSE = 3  # the coordinator draws the token that closes the round
    TAIL = 4  # the target worker draws from a row's complement


class Key(NamedTuple):
    """Names one draw of a session."""

    committed_length: int  # tokens committed when the round began, prompt included
    position: int  # within the round, from 0
    purpose: Purpose


def uniform(seed: int, key: Key) -> float:
    """Return the 53-bit uniform in [0, 1) that belongs to this key."""
    # typed arrays: numpy takes a list with a number of 2**63 or more for floats, and seeds would be rounded together
    philox_key = np.array([seed, int(key.purpose)], dtype=np.uint64)
    counter = np.array([key.position, key.committed_length, 0, 0], dtype=np.uint64)
    bits = np.random.Philox(key=philox_key, counter=counter)
    return float(int(bits.random_raw()) >> 11) * 2.0**-53


def uniforms(seed: int, committed_length: int, count: int, purpose: Purpose) -> tuple[float, ...]:
    """Return the draws of positions 0 to count - 1 of one round."""
    return tuple(uniform(seed, Key(committed_length, position, purpose)) for position in range(count))


def acceptance_uniforms(seed: int, committed_length: int, num_draft_tokens: int) -> Uniforms:
    """Return the draws of one round's acceptance; a target worker that predicts it makes the same."""
    return Uniforms(
        uniforms(seed, committed_length, num_draft_tokens, Purpose.ACCEPT),
        uniform(seed, Key(committed_length, 0, Purpose.CLOSE)),
    )
