"""`specdec watch`: what two looks at the metrics say, and how it is drawn."""

import io
import os
from collections.abc import Mapping

import pytest

from specdec.process_status import ProcessStatus, WorkerState
from specdec.watching.command import CLEAR_BELOW, HOME, LEAVE, Screen
from specdec.watching.page import page
from specdec.watching.readings import reading


def status(
    values: Mapping[str, float],
    kind: str = "coordinator",
    address: str = "",
    state: WorkerState | None = None,
    reason: str = "",
) -> ProcessStatus:
    """Return a process; `name{label=value}` has a label."""
    samples = {}
    for key, value in values.items():
        name, _, rest = key.partition("{")
        pairs = tuple(sorted(tuple(pair.split("=", 1)) for pair in rest.rstrip("}").split(",") if pair))
        samples[name, pairs] = value
    return ProcessStatus(kind, address, state, reason, 2, samples)  # type: ignore[arg-type]


def coordinator(scale: float) -> ProcessStatus:
    """A coordinator that has done `scale` times as much."""
    return status(
        {
            "specdec_num_sessions_running": 3,
            "specdec_num_sessions_paused": 1,
            "specdec_generation_tokens_total": 300 * scale,
            "specdec_num_rounds_total": 100 * scale,
            "specdec_spec_decode_num_draft_tokens_total": 400 * scale,
            "specdec_spec_decode_num_accepted_tokens_total": 200 * scale,
            "specdec_drafter_rounds_total{drafter=model}": 60 * scale,
            "specdec_drafter_rounds_total{drafter=none}": 40 * scale,
            "specdec_drafter_draft_tokens_total{drafter=model}": 400 * scale,
            "specdec_drafter_accepted_tokens_total{drafter=model}": 200 * scale,
            "specdec_drafter_tokens_total{drafter=model}": 260 * scale,
            "specdec_drafter_tokens_total{drafter=none}": 40 * scale,
            "specdec_store_seconds_sum{call=commit}": 0.05 * scale,
            "specdec_store_seconds_count{call=commit}": 100 * scale,
            "specdec_refusals_total{limit=sessions}": 5,
            "specdec_worker_lost_streams_total{kind=target,cause=ping}": 2,
            "specdec_worker_lost_streams_total{kind=target,cause=connection}": 9,
        }
    )


def worker(scale: float, address: str = "ipv4:10.0.0.1:1") -> ProcessStatus:
    values = {
        "specdec_target_num_sessions_waiting": 2,
        "specdec_target_kv_cache_usage": 0.5,
        "specdec_target_batch_sessions_sum": 30 * scale,
        "specdec_target_batch_sessions_count": 10 * scale,
        "specdec_target_queue_seconds_sum": 0.2 * scale,
        "specdec_target_queue_seconds_count": 100 * scale,
    }
    return status(values, "target", address, WorkerState.IN_SERVICE)


def test_rates_are_of_the_time_in_between() -> None:
    seen = reading([coordinator(1), worker(1)], [coordinator(3), worker(3)], 2.0)
    assert (seen.tokens_per_s, seen.rounds_per_s, seen.tokens_per_round) == (300, 100, 3)
    assert seen.acceptance_rate == 0.5
    assert seen.store_ms == pytest.approx(0.5)
    assert (seen.num_running, seen.num_waiting, seen.num_paused, seen.num_lost_pings) == (3, 2, 1, 2)
    assert seen.refusals == {"sessions": 5}
    model, plain = seen.drafters
    assert (model.drafter, model.rounds_per_s, model.acceptance_rate) == ("model", 60, 0.5)
    assert model.tokens_per_round == pytest.approx(260 / 60)
    assert (plain.drafter, plain.acceptance_rate, plain.tokens_per_round) == ("none", None, 1)
    (target,) = seen.workers
    assert target.batch_sessions == 3
    assert target.queue_ms == pytest.approx(2)


def test_a_process_that_began_again_counts_from_zero() -> None:
    assert reading([coordinator(9)], [coordinator(1)], 1.0).tokens_per_s == 300
    (target,) = reading([coordinator(1)], [coordinator(1), worker(1)], 1.0).workers
    assert target.batch_sessions == 3


def test_nothing_in_between_is_no_rate() -> None:
    seen = reading([coordinator(1)], [coordinator(1)], 1.0)
    assert (seen.tokens_per_s, seen.tokens_per_round, seen.store_ms) == (0, None, None)


def test_the_page_says_why_a_worker_is_out() -> None:
    out = status({}, "draft", "ipv4:10.0.0.2:1", WorkerState.OUT, "no specdec answers there")
    draining = "the server is loading or shutting down; try again soon"
    leaving = status({}, "target", "ipv4:10.0.0.3:1", WorkerState.OUT, draining)
    processes = [coordinator(1), worker(1), out, leaving]
    lines = page(reading(processes, processes, 1.0))
    assert "ipv4:10.0.0.2:1: no specdec answers there" in lines
    states = {line.split()[1]: line for line in lines if line.startswith(("target ", "draft "))}
    assert "in service" in states["ipv4:10.0.0.1:1"]
    assert "out " in states["ipv4:10.0.0.2:1"]
    assert "loading or draining" in states["ipv4:10.0.0.3:1"]
    assert any("refused: 5 sessions" in line for line in lines)


class Terminal(io.StringIO):
    """A terminal of 20 columns."""

    def fileno(self) -> int:
        return 0


def test_pages_are_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((20, 4)))
    terminal = Terminal()
    with Screen(terminal, is_coloured=False) as screen:
        screen.draw([f"line {number} {'x' * 40}" for number in range(9)])
        screen.note("no answer")
    drawn = terminal.getvalue().split(HOME)
    assert [len(line.removesuffix("\x1b[K")) for line in drawn[1].split("\n")[:3]] == [20, 20, 20]
    assert drawn[1].endswith(CLEAR_BELOW)
    assert drawn[1].count("\n") == 3
    assert "no answer" in drawn[2]
    assert terminal.getvalue().endswith(LEAVE)
