"""Markdown tables of what was measured, a row for each way, for each kind of prompts and for all together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from benchmarks.measure import CHOSEN, PLAIN, Measured, ratios, speed_up

ALL = "all"
COLUMNS = (
    *("", "tokens/s", "speed-up (quartiles)", "acceptance rate", "by depth", "tokens per round"),
    *("draft ms", "score ms", "rest ms", "round ms", "commit ms, meanwhile"),
)

ByKind = Mapping[str, Sequence[Measured]]


def lines(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield line(columns)
    yield "|---" * len(columns) + "|"
    yield from map(line, rows)


def line(cells: Sequence[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def with_all(by_kind: ByKind) -> ByKind:
    """Add all kinds together, where there are several."""
    if len(by_kind) == 1:
        return by_kind
    return {**by_kind, ALL: [Measured.together(parts) for parts in zip(*by_kind.values(), strict=True)]}


def speeds(by_kind: ByKind) -> Iterator[str]:
    """Yield a row for each way of each kind; the first way is plain decoding."""
    rows = [
        row(result.configuration.name if len(by_kind) == 1 else f"{kind}: {result.configuration.name}", result, plain)
        for kind, (plain, *others) in with_all(by_kind).items()
        for result in (plain, *others)
    ]
    return lines(COLUMNS, rows)


def row(label: str, result: Measured, plain: Measured) -> list[str]:
    """Return one way's cells. A phase that took no time is a dash."""
    low, middle, high = speed_up(result, plain)
    drafting, scoring, whole, committing = map(result.ms_per_round, ("draft_s", "score_s", "total_s", "commit_s"))
    times_ms = (drafting, scoring, result.rest_ms_per_round, whole, committing)
    return [
        label,
        f"{result.median_tokens_per_s:.1f}",
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        f"{result.acceptance_rate:.2f}",
        " ".join(f"{rate:.2f}" for rate in result.acceptance_by_depth),
        f"{result.tokens_per_round:.2f}",
        *(f"{time_ms:.2f}" if time_ms else "-" for time_ms in times_ms),
    ]


def choices(by_kind: ByKind) -> Iterator[str]:
    """Yield a row for each kind: the best fixed way of the services, and what the service's own choice reached of it.

    The best of many ways, found by the runs that it is judged by, owes some of its speed to luck. So each run is judged
    a second time: by the way that was best in all other runs of its kind.
    """
    columns = (
        *("", "best fixed setting, in hindsight", "speed-up", "chosen by the service", "of the best"),
        *("best by the other runs", "of it", "worst prompt, chosen"),
    )
    return lines(columns, [choice(kind, results) for kind, results in with_all(by_kind).items()])


def choice(kind: str, results: Sequence[Measured]) -> list[str]:
    """Return one kind's cells."""
    plain, chosen = (named(results, each.name) for each in (PLAIN, CHOSEN))
    fixed = {
        each.configuration.name: ratios(each, plain)
        for each in results
        if each is not chosen and each.statistics and each.ms_per_round("total_s")
    }
    best = best_of(fixed)
    hindsight, foresight = median(fixed[best]), median(judged_by_others(fixed))
    reached = ratios(chosen, plain)
    cells = (hindsight, median(reached), median(reached) / hindsight, foresight, median(reached) / foresight)
    return [kind, best, *(f"{cell:.2f}" for cell in (*cells, min(reached)))]


def best_of(ways: Mapping[str, Sequence[float]]) -> str:
    """Return the name of the way with the highest median."""
    return max(ways, key=lambda name: median(ways[name]))


def judged_by_others(ways: Mapping[str, Sequence[float]]) -> list[float]:
    """Return of each run the value of the way that is best in all others; of a single run its own best."""
    num_runs = len(next(iter(ways.values())))
    if num_runs == 1:
        return [max(values[0] for values in ways.values())]
    others = ({name: [*each[:run], *each[run + 1 :]] for name, each in ways.items()} for run in range(num_runs))
    return [ways[best_of(each)][run] for run, each in enumerate(others)]


def named(results: Sequence[Measured], name: str) -> Measured:
    """Return the result of one way."""
    return next(each for each in results if each.configuration.name == name)
