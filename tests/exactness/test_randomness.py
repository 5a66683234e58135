"""A draw is a pure function of seed and key: known answers, range, uniformity, and no collisions."""

import threading
from itertools import product

import numpy as np
import pytest

from benchmarks.judging import agreement_of_counts
from specdec.exact.randomness import MAX_SEED, Key, Purpose, uniform, uniforms

WORD = 2**64 - 1
REJECT_BELOW = 1e-6


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Return a block of Philox4x64-10, from the paper (Salmon et al. 2011, section 3.3)."""
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            (second >> 64) ^ counter[1] ^ key[0],
            second & WORD,
            (first >> 64) ^ counter[3] ^ key[1],
            first & WORD,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & WORD, (key[1] + 0xBB67AE8584CAA73B) & WORD]
    return counter


# the authors' known answers: Random123, kat_vectors, philox4x64 10
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]),
    ([WORD] * 4, [WORD] * 2, [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]),
]


@pytest.mark.parametrize(("counter", "key", "block"), KNOWN_ANSWERS)
def test_the_reference_knows_the_published_answers(counter: list[int], key: list[int], block: list[int]) -> None:
    """What the tests below compare with is Philox."""
    assert philox(counter, key) == block


@pytest.mark.parametrize("seed", [0, 1, 123456789, MAX_SEED])
@pytest.mark.parametrize("purpose", Purpose)
def test_draws_are_philox(seed: int, purpose: Purpose) -> None:
    """The top 53 bits of the first word of the block after counter (position, length), keyed by (seed, purpose)."""
    for length, position in product([0, 1, 4096, 2**40], [0, 1, 31]):
        word = philox([position + 1, length, 0, 0], [seed, int(purpose)])[0]  # numpy steps the counter, then draws
        assert uniform(seed, Key(length, position, purpose)) == (word >> 11) / 2**53


def test_draws_are_pinned() -> None:
    """These values never change, so that sessions continue identically after an upgrade."""
    draws = [uniform(7, Key(10, 2, purpose)) for purpose in Purpose]
    assert draws == [0.5624235523251044, 0.6535047499930724, 0.3619856416526711, 0.17431899247145788]


def test_draws_are_numpys_own_stream() -> None:
    """`Generator.random` of the same bit generator gives the same number."""
    bits = np.random.Philox(key=[42, int(Purpose.TAIL)], counter=[3, 17, 0, 0])
    assert np.random.Generator(bits).random() == uniform(42, Key(17, 3, Purpose.TAIL))


def test_draws_are_53_bits_below_one() -> None:
    """Whole multiples of 2**-53, all bits in use, never 1."""
    draws = [uniform(seed, Key(5, 0, Purpose.ACCEPT)) for seed in range(2000)]
    assert all(0 <= draw < 1 and (draw * 2**53).is_integer() for draw in draws)
    used = np.bitwise_or.reduce([int(draw * 2**53) for draw in draws])
    unused = np.bitwise_and.reduce([int(draw * 2**53) for draw in draws])
    assert (used, unused) == (2**53 - 1, 0)


def test_no_two_keys_share_a_draw() -> None:
    """Over seeds, lengths, positions and purposes: 43,200 draws, all different (probability of a collision: 1e-7)."""
    seeds = [*range(5), MAX_SEED - 1, MAX_SEED, 2**32, 2**63]
    lengths = [*range(20), 2**16, 2**32, 2**33, 2**62]
    grid = list(product(seeds, lengths, range(50), Purpose))
    draws = {uniform(seed, Key(length, position, purpose)) for seed, length, position, purpose in grid}
    assert len(draws) == len(grid)


def test_many_are_one_by_one() -> None:
    """The round's list is its single draws."""
    alone = tuple(uniform(3, Key(8, position, Purpose.ACCEPT)) for position in range(6))
    assert uniforms(3, 8, 6, Purpose.ACCEPT) == alone
    assert uniforms(3, 8, 0, Purpose.ACCEPT) == ()


@pytest.mark.parametrize("along", ["seed", "length", "position", "purpose"])
def test_draws_are_uniform_and_neighbours_independent(along: str) -> None:
    """Chi-square over a 10 x 10 grid of neighbouring draws, for neighbours in each part of the key."""
    pairs = np.array([neighbours(along, index) for index in range(4000)])
    counts = np.histogram2d(pairs[:, 0], pairs[:, 1], bins=10, range=[[0, 1], [0, 1]])[0]
    assert agreement_of_counts(counts, np.full(counts.shape, 0.01)).p_value > REJECT_BELOW


def neighbours(along: str, index: int) -> tuple[float, float]:
    """Return two draws whose keys differ by one step."""
    seed, length, position, purpose = 1000 + index, 2 * (index % 97), 2 * (index % 31), Purpose.DRAFT
    one = uniform(seed, Key(length, position, purpose))
    step = {name: int(name == along) for name in ("seed", "length", "position", "purpose")}
    key = Key(length + step["length"], position + step["position"], Purpose(purpose + step["purpose"]))
    return one, uniform(seed + step["seed"], key)


def test_draws_do_not_depend_on_earlier_draws() -> None:
    """Earlier draws, also from other threads, change nothing."""
    key, found = Key(9, 1, Purpose.CLOSE), list[float]()
    expected = uniform(11, key)
    threads = [threading.Thread(target=lambda: found.extend(uniform(11, key) for _ in range(200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 800
