"""Pauses before a process is started again grow to a limit; one that served for long resets them and the count."""

from specdec.serving.restarts import MAX_DEATHS, POLICY, STABLE_S, Restarts


class Clock:
    """Time that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_pauses_grow_to_a_limit() -> None:
    restarts = Restarts(max_deaths=None, uniform=lambda: 0.0)
    pauses = [restarts.pause_s() for _ in range(100)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(filter(None, pauses)) == pauses[-1] == POLICY.maximum_s


def test_pauses_are_jittered() -> None:
    for uniform, expected in ((0.0, 0.5), (0.5, 0.375)):
        assert Restarts(uniform=lambda drawn=uniform: drawn).pause_s() == expected  # type: ignore[misc]


def test_deaths_in_a_row_end_the_restarts() -> None:
    restarts = Restarts(clock=Clock())
    pauses = []
    for _ in range(MAX_DEATHS):
        restarts.ready()
        pauses.append(restarts.pause_s())
    assert [pause is None for pause in pauses] == [False] * (MAX_DEATHS - 1) + [True]


def test_process_that_served_for_long_begins_anew() -> None:
    clock = Clock()
    restarts = Restarts(clock=clock, uniform=lambda: 0.0)
    pauses = []
    for served_s in (1, 1, 1, STABLE_S, 1, 1, 1, STABLE_S):
        restarts.ready()
        clock.now_s += served_s
        pauses.append(restarts.pause_s())
    assert pauses == [0.5, 1.0, 2.0, 0.5, 1.0, 2.0, 4.0, 0.5]


def test_time_to_load_is_not_time_served() -> None:
    """A model that takes minutes to load, and then does not fit, never serves."""
    clock = Clock()
    restarts = Restarts(clock=clock)
    for _ in range(MAX_DEATHS):
        clock.now_s += 10 * STABLE_S
        pause_s = restarts.pause_s()
    assert pause_s is None
