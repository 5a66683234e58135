"""Turns are written down as they are taken, and a second run goes on where the first one ended."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.measure import Prompt
from benchmarks.turns import OtherMeasurement, Place, Record, Run, measured, take_turn
from specdec import SamplingParams, Statistics

PLACE = Place(0.0, "code", "sort", 0)
STATISTICS = Statistics(4, 8, 5, 9, 0.4, 0.8, 0.04, 1.6, num_drafts_per_depth=(4, 4))
FACTS = {"target": "a", "max_tokens": 8}


@dataclass
class Counting:
    """A way that counts what it was asked."""

    name: str
    prompts: list[str] = field(default_factory=list)

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Statistics:
        self.prompts.append(prompt.name)
        return STATISTICS


async def test_every_way_gets_its_turn() -> None:
    ways = [Counting("one"), Counting("two")]
    turn = await take_turn(ways, Prompt("sort", "text"), SamplingParams())
    assert [way.prompts for way in ways] == [["sort"], ["sort"]]
    assert all(run.elapsed_s > 0 and run.statistics == STATISTICS for run in turn.values())


def test_turns_are_read_again(tmp_path: Path) -> None:
    file, turn = tmp_path / "turns.jsonl", {"one": Run(2.0, STATISTICS)}
    Record(FACTS, file).add(PLACE, turn)
    again = Record(FACTS, file)
    assert again.turn(PLACE, [Counting("one")]) == turn
    assert measured([Counting("one")], [turn])[0].tokens_per_s == [4.5]


def test_missing_ways_make_a_turn_incomplete(tmp_path: Path) -> None:
    file = tmp_path / "turns.jsonl"
    Record(FACTS, file).add(PLACE, {"one": Run(2.0, STATISTICS)})
    record = Record(FACTS, file)
    assert record.turn(PLACE, [Counting("one"), Counting("two")]) is None
    assert record.turn(Place(1.0, "code", "sort", 0), [Counting("one")]) is None


def test_killed_runs_leave_whole_turns(tmp_path: Path) -> None:
    file, other = tmp_path / "turns.jsonl", Place(0.0, "code", "search", 0)
    record = Record(FACTS, file)
    record.add(PLACE, {"one": Run(2.0, STATISTICS)})
    record.add(other, {"one": Run(2.0, STATISTICS)})
    file.write_bytes(file.read_bytes()[:-20])
    resumed = Record(FACTS, file)
    assert resumed.turn(other, [Counting("one")]) is None
    resumed.add(other, {"one": Run(3.0, STATISTICS)})
    resumed.note(load={"num_sessions": 4})
    final = Record(FACTS, file)
    assert [final.turn(each, [Counting("one")]) for each in (PLACE, other)] == [
        {"one": Run(2.0, STATISTICS)},
        {"one": Run(3.0, STATISTICS)},
    ]


def test_other_measurements_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "turns.jsonl"
    Record(FACTS, file)
    with pytest.raises(OtherMeasurement, match="name another file"):
        Record({**FACTS, "target": "b"}, file)


def test_without_a_file_turns_are_kept() -> None:
    record = Record(FACTS)
    record.add(PLACE, {"one": Run(2.0, STATISTICS)})
    assert record.turn(PLACE, [Counting("one")]) is not None
