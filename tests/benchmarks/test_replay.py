"""The replay: what a chooser costs on texts whose every proposal is known."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import recording, replay, served
from coordinator.choosing.plans import PLAIN, DraftPlan
from specdec.serving.local import CannotRun

TEXT = [1, *range(2, 42)]  # a prompt of one token
FORWARD_S, SLOPE_S, DRAFT_S = 0.02, 0.0002, 0.001


def line(kind: str, right: str, temperature: float = 0.0) -> recording.Line:
    """Return a recording of a text that one of two drafters knows, and the other one never guesses."""
    steps = []
    for length in range(2, len(TEXT) + 1):
        following = (TEXT[length:] + [0] * 32)[:32]
        wrong = [token + 1 for token in following]
        chains = {name: following if name == right else wrong for name in ("recycle", "suffix")}
        steps.append(
            {
                name: {"tokens": chain, "parents": list(range(32)), "seconds": [DRAFT_S, DRAFT_S]}
                for name, chain in chains.items()
            }
        )
    scoring = [(count, FORWARD_S + SLOPE_S * count) for count in recording.SCORED]
    return {
        "kind": kind,
        "prompt": kind,
        "temperature": temperature,
        "num_prompt": 1,
        "tokens": TEXT,
        "steps": steps,
        "scoring": scoring,
    }


def rows(lines: list[recording.Line], kind: str) -> list[str]:
    """Return what the table says of a kind."""
    costs = replay.Costs.of(lines)
    texts = [replay.Text(each) for each in lines]
    return list(replay.Played.of(texts, costs, replay.names_of(costs.drafting), num_orders=2).row(kind))


def test_each_text_gets_the_drafter_that_knows_it() -> None:
    """Even though all sessions together accept half of what either drafts."""
    lines = [line("first", "recycle"), line("second", "suffix")] * 3
    for kind, drafter in (("first", "recycle"), ("second", "suffix")):
        _, best, best_gain, chosen, _, worst, _ = rows(lines, kind)
        assert best.startswith(f"{drafter}, K = ")
        assert float(best_gain) > 4
        assert float(chosen) > 2
        assert float(worst) > 1.5


def test_drafters_that_never_guess_cost_little() -> None:
    assert float(rows([line("hard", "nobody")] * 8, "all")[3]) > 0.96


def test_a_replay_repeats_itself() -> None:
    lines = [line("first", "recycle"), line("hard", "nobody")]
    assert rows(lines, "all") == rows(lines, "all")


def test_a_fixed_plan_costs_what_arithmetic_says() -> None:
    """Rounds of 8 draft tokens, all accepted: 39 tokens after the prefill's in 4 rounds of 9 and one of 3."""
    lines = [line("first", "recycle")]
    seconds = replay.play(replay.Text(lines[0]), replay.Fixed(DraftPlan("recycle", 8)), replay.Costs.of(lines))
    assert seconds == pytest.approx(
        5 * (FORWARD_S + replay.WOKEN_S + DRAFT_S + replay.OBSERVED_S) + (4 * 8 + 2) * SLOPE_S
    )


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="is no recording"):
        replay.lines_of(tmp_path / "missing.jsonl")
    (tmp_path / "text").write_text("not JSON")
    with pytest.raises(CannotRun, match="is no recording"):
        replay.lines_of(tmp_path / "text")


@pytest.mark.long
async def test_the_demo_pair_can_be_recorded(tmp_path: Path) -> None:
    """Every token has every drafter's proposal, and the text is the target's own."""
    pair = served.demo_pair()
    few = {"Python": pair.prompts["Python"][:1]}
    short = replace(pair, prompts=few, num_prompts=1, num_tokens=recording.TIMED_EVERY)
    await recording.record(short, (0.0,), tmp_path / "texts.jsonl")
    (recorded,) = replay.lines_of(tmp_path / "texts.jsonl")
    assert len(recorded["steps"]) == len(recorded["tokens"]) - recorded["num_prompt"] == recording.TIMED_EVERY
    assert all(set(step) >= {"model", "recycle", "ngram", "suffix"} for step in recorded["steps"])
    assert [count for count, _ in recorded["scoring"]] == list(recording.SCORED)
    text, costs = replay.Text(recorded), replay.Costs.of([recorded])
    assert replay.play(text, replay.Fixed(PLAIN), costs) > 0
    assert json.dumps(recorded)
