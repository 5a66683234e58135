"""Take turns: every way of completing a prompt, one after the other, and write each turn down as soon as it is over.

A machine's slow minute slows all ways of a turn. The file has a JSON object a line: what was measured on, then each
turn. A run that finds turns of the same measurement there does not repeat them.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.measure import Configuration, Measured, Named, Prompt
from specdec import AsyncClient, SamplingParams, Statistics


class Way(Named, Protocol):
    """One way of completing prompts."""

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Statistics:
        """Complete a prompt; `num_tokens` counts the completion."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceWay:
    """A configuration of the services."""

    client: AsyncClient
    configuration: Configuration

    @property
    def name(self) -> str:
        """The configuration's name."""
        return self.configuration.name

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Statistics:
        """Complete a prompt as a new session."""
        return (await prompt.complete(self.client, sampling, self.configuration.speculation)).statistics


@dataclass(frozen=True, slots=True)
class Run:
    """One completion."""

    elapsed_s: float
    statistics: Statistics

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens a second, the prompt's time included."""
        return self.statistics.num_tokens / self.elapsed_s


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn belongs."""

    temperature: float
    kind: str
    prompt: str
    repetition: int


Turn = Mapping[str, Run]  # by the names of the ways


async def take_turn(ways: Sequence[Way], prompt: Prompt, sampling: SamplingParams) -> Turn:
    """Complete a prompt in every way."""
    runs = {}
    for way in ways:
        begin = time.perf_counter()
        statistics = await way.complete(prompt, sampling)
        runs[way.name] = Run(time.perf_counter() - begin, statistics)
    return runs


def measured(ways: Sequence[Named], turns: Iterable[Turn]) -> list[Measured]:
    """Return what each way did over some turns."""
    taken = list(turns)
    return [
        Measured(way, [turn[way.name].tokens_per_s for turn in taken], [turn[way.name].statistics for turn in taken])
        for way in ways
    ]


class OtherMeasurement(ValueError):
    """A file has turns of something else. The message says of what."""


class Record:
    """The turns that were taken, and the file that keeps them, if there is one."""

    def __init__(self, facts: Mapping[str, Any], file: Path | None = None) -> None:
        """Read the turns that the file has; raises OtherMeasurement where `facts` differ from those in it."""
        self._file = file
        self._turns: dict[Place, Turn] = {}
        lines = whole_lines(file)
        if lines:
            self._read(facts, [json.loads(line) for line in lines])
        else:
            self._write({"facts": facts})

    def turn(self, place: Place, ways: Sequence[Named]) -> Turn | None:
        """Return the turn that was taken there, if it has all of these ways."""
        turn = self._turns.get(place, {})
        return turn if all(way.name in turn for way in ways) else None

    def add(self, place: Place, turn: Turn) -> None:
        """Keep a turn."""
        self._turns[place] = {**self._turns.get(place, {}), **turn}
        self._write({"place": asdict(place), "runs": {name: asdict(run) for name, run in turn.items()}})

    def note(self, **facts: Any) -> None:
        """Write down what is no turn."""
        self._write(facts)

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")

    def _read(self, facts: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
        if entries[0].get("facts") != facts:
            raise OtherMeasurement(f"{self._file} is of {entries[0].get('facts')}, not of {facts}; name another file")
        for entry in entries[1:]:
            if "place" in entry:
                place = Place(**entry["place"])
                runs = {name: run_of(value) for name, value in entry["runs"].items()}
                self._turns[place] = {**self._turns.get(place, {}), **runs}


def whole_lines(file: Path | None) -> list[str]:
    """Return a file's lines, and cut off what a run that was killed left of a line."""
    if file is None or not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    return whole.splitlines()


def run_of(value: Mapping[str, Any]) -> Run:
    """Return the run that JSON describes."""
    entries = value["statistics"].items()
    statistics: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in entries}
    return Run(value["elapsed_s"], Statistics(**statistics))
