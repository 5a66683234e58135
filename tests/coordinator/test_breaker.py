"""The circuit breaker of one worker."""

from coordinator.pool.breaker import TRIALS, Breaker, WorkerState


def state(breaker: Breaker) -> WorkerState:
    """Return its state, which mypy would take for the last one compared."""
    return breaker.state


def in_service() -> Breaker:
    breaker = Breaker()
    breaker.probe_answered()
    return breaker


def test_a_worker_is_out_until_a_probe_is_answered() -> None:
    breaker = Breaker()
    assert state(breaker) is WorkerState.OUT
    breaker.probe_answered()
    assert state(breaker) is WorkerState.IN_SERVICE


def test_a_lost_connection_needs_a_probe_alone() -> None:
    breaker = in_service()
    breaker.lost()
    assert state(breaker) is WorkerState.OUT
    breaker.probe_answered()
    assert state(breaker) is WorkerState.IN_SERVICE


def test_a_failed_round_needs_a_round_that_succeeds() -> None:
    breaker = in_service()
    breaker.round_failed(10.0)
    assert state(breaker) is WorkerState.OUT
    breaker.probe_answered()
    assert state(breaker) is WorkerState.ON_TRIAL
    assert not breaker.is_due(10.0 + TRIALS.first_s / 2)
    assert breaker.is_due(10.0 + TRIALS.first_s)
    breaker.round_succeeded()
    assert state(breaker) is WorkerState.IN_SERVICE


def test_one_session_at_a_time_is_tried() -> None:
    breaker = in_service()
    breaker.round_failed(10.0)
    breaker.probe_answered()
    breaker.try_now(11.0)
    assert not breaker.is_due(11.5)


def test_pauses_grow_with_trials_not_with_sessions() -> None:
    """A hundred sessions that fail together are one failure."""
    breaker, now_s, pauses = in_service(), 10.0, []
    for _ in range(8):
        for _ in range(100):
            breaker.round_failed(now_s)
        breaker.probe_answered()
        begin_s = now_s
        while not breaker.is_due(now_s):
            now_s += 0.125
        pauses.append(now_s - begin_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_success_forgets_earlier_failures() -> None:
    breaker = in_service()
    for now_s in (10.0, 20.0, 30.0):
        breaker.round_failed(now_s)
    breaker.round_succeeded()
    breaker.round_failed(40.0)
    breaker.probe_answered()
    assert breaker.is_due(41.0)
