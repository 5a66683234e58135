"""Pauses before a draft worker is started again: they grow to a limit, and a stable worker resets them."""

from itertools import chain, repeat

from specdec.serving.local.restarts import POLICY, STABLE_S, Restarts


def test_pauses_grow_to_a_limit() -> None:
    restarts = Restarts(clock=lambda: 0.0, uniform=lambda: 0.0)
    pauses = [restarts.pause_s() for _ in range(100)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(pauses) == pauses[-1] == POLICY.maximum_s


def test_pauses_are_jittered() -> None:
    for uniform, expected in ((0.0, 0.5), (0.5, 0.375)):
        assert Restarts(clock=lambda: 0.0, uniform=lambda drawn=uniform: drawn).pause_s() == expected  # type: ignore[misc]


def test_stable_worker_resets_the_pauses() -> None:
    now_s = 0.0
    restarts = Restarts(clock=lambda: now_s, uniform=lambda: 0.0)
    for expected, lived_s in zip([0.5, 1.0, 2.0, 0.5, 1.0], chain([1, 1, 1, STABLE_S], repeat(1)), strict=False):
        restarts.started()
        now_s += lived_s
        assert restarts.pause_s() == expected
