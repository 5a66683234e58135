"""Where a round's time goes: milliseconds by phase, and what is left of a round besides the forwards."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from specdec.timeline.recorded import PROPOSE, ROUND, SCORE, Recorded, SpanTree

PARTS = ("queue", "forward", "sampling")
WAY = "way"  # what is left of a call: messages, and what both ends do with them
TOTALS = ("round", "forwards", "tax")


@dataclass(frozen=True, slots=True)
class Phase:
    """One line of the table."""

    name: str
    depth: int  # under how many others
    ms: tuple[float, ...]  # of each round that has it

    @property
    def median_ms(self) -> float:
        """The median of the rounds that have it."""
        return median(self.ms)


def phases(tree: SpanTree) -> list[Phase]:
    """Return the table's lines; the first round, which reads the prompt, is left out where there are others.

    A round lasts until the next one begins, the last one until its commit ends. The commit and what is sent to clients
    run beside the next round, so they are no part of it unless it waits for them.
    """
    rounds = tree.named(ROUND)
    lasting = [*pairwise(rounds), (rounds[-1], None)] if rounds else []
    measured = [_measured(tree, each, following) for each, following in lasting]
    return list(_lines(measured[1:] or measured))


def _measured(tree: SpanTree, round_: Recorded, following: Recorded | None) -> dict[str, float]:
    """Return one round's milliseconds, by the path of each phase."""
    end_ns = following.begin_ns if following else round_.end_ns
    ms = {"round": (end_ns - round_.begin_ns) / 1e6}
    for name in (PROPOSE, SCORE):
        ms |= _call(tree, name, tree.children(round_, name))
    for name in ("accept", "commit", "emit"):
        if found := tree.children(round_, name):
            ms[name] = _sum(found)
    ms["forwards"] = ms.get(f"{PROPOSE}/forward", 0.0) + ms.get(f"{SCORE}/forward", 0.0)
    ms["tax"] = ms["round"] - ms["forwards"]
    return ms


def _call(tree: SpanTree, name: str, calls: Sequence[Recorded]) -> dict[str, float]:
    """Return the parts of calls to workers, and what is left of them."""
    if not calls:
        return {}
    answers = [child for call in calls for child in tree.children(call) if child.process != call.process]
    parts = {part: _sum(each for answer in answers for each in tree.children(answer, part)) for part in PARTS}
    whole = _sum(calls)
    return {
        name: whole,
        **{f"{name}/{part}": ms for part, ms in parts.items()},
        f"{name}/{WAY}": whole - sum(parts.values()),
    }


def _sum(spans: Iterable[Recorded]) -> float:
    return sum(span.elapsed_ms for span in spans)


def _lines(measured: Sequence[dict[str, float]]) -> Iterator[Phase]:
    calls = [path for name in (PROPOSE, SCORE) for path in (name, *(f"{name}/{part}" for part in (*PARTS, WAY)))]
    for path in (*calls, "accept", "commit", "emit", *TOTALS):
        values = tuple(ms[path] for ms in measured if path in ms)
        if values:
            parent, _, name = path.rpartition("/")
            yield Phase(name, 1 if parent else 0, values)


def table(lines: Sequence[Phase]) -> list[str]:
    """Return the table as text."""
    head = f"{'phase':<14}{'median ms':>10}{'max ms':>10}{'rounds':>8}"
    rows = [
        f"{'  ' * line.depth + line.name:<14}{line.median_ms:>10.2f}{max(line.ms):>10.2f}{len(line.ms):>8}"
        for line in lines
    ]
    return [head, *rows]
