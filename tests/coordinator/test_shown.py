"""What a coordinator keeps of sessions that were left: compared at growing ages, within a bound."""

from coordinator.generation import OutputToken
from coordinator.session_record import SessionRecord, Status
from coordinator.shown import KEPT_S, MAX_TOKENS, ShownSessions
from specdec.types import Statistics, TokenOrigin

TTL_S = 3600.0


def record(name: str, length: int = 1) -> SessionRecord:
    emitted = (OutputToken(1, TokenOrigin.BONUS),) * length
    return SessionRecord(name, b"", 1, Status.ACTIVE, b"", None, (1,), b"", emitted, b"", None, Statistics())


def test_sessions_are_compared_at_growing_ages() -> None:
    shown = ShownSessions(TTL_S)
    shown.keep(record("a"), 100.0)
    times = [second for second in range(200) if shown.due(100.0 + second)]
    assert times == [0, 1, 2, 4, 8, 16, 32, int(KEPT_S)]
    assert not len(shown)


def test_sessions_are_not_compared_near_their_end() -> None:
    """One that has expired would look as if the store had lost it."""
    shown = ShownSessions(10.0)
    shown.keep(record("a"), 100.0)
    assert [second for second in range(20) if shown.due(100.0 + second)] == [0, 1, 2, 4]
    assert not shown.all


def test_session_that_is_left_again_begins_anew() -> None:
    shown = ShownSessions(TTL_S)
    shown.keep(record("a"), 0.0)
    for second in range(20):
        shown.due(float(second))
    shown.keep(record("a", 2), 20.0)
    assert shown.due(20.0) == [record("a", 2)] == shown.all
    assert shown.get("a") == record("a", 2)
    assert shown.take("a") == record("a", 2)
    assert shown.get("a") is shown.take("a") is None


def test_oldest_is_forgotten_where_there_are_too_many_tokens() -> None:
    shown = ShownSessions(TTL_S)
    half = MAX_TOKENS // 2
    for name in "abc":
        shown.keep(record(name, half - 1), 0.0)
    assert [session.session_id for session in shown.all] == ["b", "c"]
    shown.keep(record("d", 2 * MAX_TOKENS), 0.0)
    assert [session.session_id for session in shown.all] == ["d"], "one is always kept"
