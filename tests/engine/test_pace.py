"""How many prompt tokens share a forward with rounds, by measured costs and a clock that is handed in."""

import pytest

from specdec.engine import ContiguousPool, KvCache, LayerShape, Task
from specdec.engine.batch import ReadingBudget
from specdec.engine.pace import MAX_READING_S, SHARE, UNMEASURED_TOKENS, Pace, Piece, ReadingCost

FORWARD_S, ABSENCE_S, TOKEN_S = 0.010, 0.002, 0.001


def measured() -> Pace:
    """A pace that knows what rounds and prompts cost, and one session `a` whose last round ended at 1.0."""
    pace = Pace()
    pace.observe_end("a", 0.5)
    pace.observe_arrival("a", 0.5 + ABSENCE_S)
    for _ in range(20):
        pace.observe_forward(1, [], FORWARD_S, 0.9)
        pace.observe_forward(1, [Piece(10, 0)], FORWARD_S + 10 * TOKEN_S, 0.95)
    pace.observe_forward(1, [], FORWARD_S, 1.0)
    pace.observe_end("a", 1.0)
    return pace


class TestReadingCost:
    def test_fits_tokens_and_what_they_attend_to(self) -> None:
        cost = ReadingCost()
        for size, past in ((10, 0), (100, 50), (30, 1000), (5, 4000)):
            piece = Piece(size, past)
            cost.observe(size, piece.num_pairs, 1e-3 * size + 2e-6 * piece.num_pairs)
        assert cost.token_s(0) == pytest.approx(1e-3)
        assert cost.token_s(5000) == pytest.approx(1e-3 + 1e-2)

    def test_follows_a_slower_machine(self) -> None:
        cost = ReadingCost()
        for token_s in [1e-3] * 50 + [4e-3] * 50:
            cost.observe(10, 50.0, 10 * token_s)
        assert cost.token_s(5) == pytest.approx(4e-3, rel=0.02)

    def test_a_machine_that_stood_still_once_says_little(self) -> None:
        cost = ReadingCost()
        for _ in range(20):
            cost.observe(10, 50.0, 10 * TOKEN_S)
        cost.observe(10, 50.0, 5.0)
        assert cost.token_s(5) < 2 * TOKEN_S

    @pytest.mark.parametrize("times", [(0.01, 0.001), (0.0, 0.01)])
    def test_is_never_negative(self, times: tuple[float, float]) -> None:
        cost = ReadingCost()
        for elapsed_s, past in zip(times, (0, 5000), strict=True):
            cost.observe(10, Piece(10, past).num_pairs, elapsed_s)
        assert cost.token_s(0) >= 0
        assert cost.token_s(10_000) >= 0


class TestAllowance:
    def test_prompts_take_a_gap_beside_a_round(self) -> None:
        allowance_s = measured().allowance_s(1, [1.0 + ABSENCE_S], 1.0 + ABSENCE_S)
        assert allowance_s == pytest.approx(SHARE * (FORWARD_S + ABSENCE_S))

    def test_waiting_for_prompts_counts(self) -> None:
        pace = measured()
        pace.observe_forward(1, [Piece(8, 0)], FORWARD_S + 8 * TOKEN_S, 2.0)
        whole, waited = (pace.allowance_s(1, [arrived], 2.0) for arrived in (2.0, 2.0 - 0.005))
        assert whole is not None
        assert waited == pytest.approx(whole - 0.005)

    def test_waiting_for_other_rounds_does_not_count(self) -> None:
        pace = measured()
        pace.observe_forward(1, [], FORWARD_S, 2.0)
        assert pace.allowance_s(1, [2.0 - 0.005], 2.0) == pace.allowance_s(1, [2.0], 2.0)

    def test_rounds_of_several_forwards_are_not_delayed_in_each_by_an_absence(self) -> None:
        assert measured().allowance_s(1, [None], 1.0) == pytest.approx(SHARE * FORWARD_S)

    def test_many_prompts_get_as_much_of_the_engine_as_each_session(self) -> None:
        """Beside one session, and beside as many; never more than prompts alone may take."""
        alone = measured().allowance_s(1, [None], 1.0)
        assert alone is not None
        assert measured().allowance_s(1, [None], 1.0, num_prompts=3) == pytest.approx(3 * alone)
        assert measured().allowance_s(1, [None] * 3, 1.0, num_prompts=3) == pytest.approx(alone)
        assert measured().allowance_s(1, [None], 1.0, num_prompts=1000) == MAX_READING_S

    def test_prompts_alone_are_limited_by_a_constant(self) -> None:
        assert measured().allowance_s(0, [], 100.0) == MAX_READING_S

    def test_unmeasured_rounds_limit_tokens(self) -> None:
        pace = Pace()
        assert pace.allowance_s(1, [0.0], 0.0) is None
        budget = ReadingBudget(pace, None, 1000, beside=True)
        task = Task[None]("a", 0, [1] * 500, 1)
        task.sequence = KvCache(ContiguousPool([LayerShape(1, 1, 1)], num_bytes=1 << 16, block_tokens=8)).open("a")
        assert budget.num_tokens_for(task, 1000) == UNMEASURED_TOKENS
        budget.spend(UNMEASURED_TOKENS, 0)
        assert budget.num_tokens_for(task, 1000) == 0

    def test_tokens_follow_costs(self) -> None:
        pace = measured()
        assert pace.num_tokens_within(0.0051, 0, 1000, beside=True) == 5
        assert pace.num_tokens_within(0.0, 0, 1000, beside=True) == 0
        assert pace.num_tokens_within(1e-9, 0, 1000, beside=True) == 1, "prompts never stop"


class TestHold:
    def test_prompts_wait_for_a_session_that_is_expected(self) -> None:
        assert measured().hold_s(1.0) == pytest.approx(2 * ABSENCE_S)

    def test_prompts_wait_for_nobody_who_is_late(self) -> None:
        assert measured().hold_s(1.0 + 3 * ABSENCE_S) == 0.0

    def test_prompts_do_not_wait_for_a_session_that_is_over(self) -> None:
        pace = measured()
        pace.forget("a")
        assert pace.hold_s(1.0) == 0.0

    def test_prompts_do_not_wait_for_long_absences(self) -> None:
        pace = measured()
        for _ in range(50):
            pace.observe_end("b", 2.0)
            pace.observe_arrival("b", 2.5)
        pace.observe_end("b", 3.0)
        assert pace.hold_s(3.0) == 0.0
        assert pace.allowance_s(0, [], 3.0) == pytest.approx(FORWARD_S + 0.5, rel=0.01)
