"""The plots of docs/benchmarks.md, as SVG for light and dark pages, from that page's own tables."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

WIDTH = 860
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours: contrast with the page is at least 4.5 for words, and 3 for series."""

    words: str
    faint: str
    lines: str
    series: tuple[str, ...]


MEASURED_ON = {0: "2026-11-24", 1: "2026-11-23"}  # by temperature
THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d1d9e0", ("#0757ba", "#b35900", "#1a7f37", "#8250df", "#bf3989", "#59636e")),
    "dark": Theme("#f0f6fc", "#9198a1", "#3d444d", ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#f778ba", "#9198a1")),
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A bar chart: groups of bars along the page, a bar for each series."""

    title: str
    hardware: str
    unit: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float, ...]], ...]  # name, a value for each group
    step: float  # between lines
    reference: float | None = None  # a value that a line marks


def table(page: str, heading: str, after: str = "") -> list[list[str]]:
    """Return the cells of the first table below a heading, after a sentence; the head is its first row."""
    text = page[page.index(f"\n{heading}\n") :]
    text = text[text.index(after) :]
    match = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert match, f"no table below {heading!r}"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in match[0].splitlines()]
    return [rows[0], *rows[2:]]


def by_kind(page: str, temperature: int) -> Plot:
    """Return the speed-up by drafter and kind of prompt: the better of K automatic and K = 8."""
    head, *rows = table(page, "## A real target", f"\nTemperature {temperature} (plain")
    kinds = head[1 : head.index("all")]
    values: dict[str, list[float]] = {}
    for name, *cells in rows:
        drafter = name.split(",")[0]
        if drafter in ("plain", "transformers"):
            continue
        row = [float(cell) for cell in cells[: len(kinds)]]
        values[drafter] = [max(pair) for pair in zip(row, values.get(drafter, row), strict=True)]
    return Plot(
        title=f"Speed-up by drafter and kind of prompt, temperature {temperature}",
        hardware=f"SmolLM2-135M in bfloat16, one session, two cores of an AMD EPYC, {MEASURED_ON[temperature]}; "
        "of K automatic and K = 8 the better",
        unit="times plain decoding",
        groups=tuple(kinds),
        series=tuple((name, tuple(row)) for name, row in values.items()),
        step=0.5,
        reference=1.0,
    )


def by_sessions(page: str) -> Plot:
    """Return tokens per second by number of sessions."""
    head, *rows = table(page, "### Many sessions at once, temperature 0, 64 tokens each")
    columns = list(zip(*rows, strict=True))
    return Plot(
        title="Tokens per second of all sessions together, temperature 0",
        hardware="the demo pair in bfloat16, services and client on two cores of an AMD EPYC, 2026-11-21",
        unit="tokens per second",
        groups=tuple(f"{count} session{'s' if count != '1' else ''}" for count in columns[0]),
        series=tuple(
            (name.removesuffix(", tokens/s"), tuple(map(float, columns[place])))
            for place, name in enumerate(head)
            if name.endswith("tokens/s")
        ),
        step=100,
    )


def plots(page: str) -> dict[str, Plot]:
    """Return the plots by the names of their files."""
    return {
        "speed-up-greedy": by_kind(page, 0),
        "speed-up-sampled": by_kind(page, 1),
        "sessions": by_sessions(page),
    }


def svg(plot: Plot, theme: Theme) -> str:
    """Draw a plot. It has no background: the page's own is behind it."""
    return "\n".join([*_frame(plot, theme), *_bars(plot, theme), "</svg>\n"])


LEFT, TOP, PLOT_HEIGHT = 46, 92, 220
HEIGHT = TOP + PLOT_HEIGHT + 30


def _top_of(plot: Plot) -> float:
    highest = max(value for _, values in plot.series for value in values)
    return (int(highest / plot.step) + 1) * plot.step


def _y(plot: Plot, value: float) -> float:
    return TOP + PLOT_HEIGHT * (1 - value / _top_of(plot))


def _text(x: float, y: float, words: str, colour: str, size: int = 13, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def _frame(plot: Plot, theme: Theme) -> Iterator[str]:
    """Give title, hardware, legend and lines."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="{FONT}">'
    )
    yield f"<title>{plot.title}</title>"
    yield _text(0, 18, plot.title, theme.words, 16)
    yield _text(0, 38, plot.hardware, theme.faint, 12)
    x = 0.0
    for (name, _), colour in zip(plot.series, _colours(plot, theme), strict=True):
        yield f'<rect x="{x:.1f}" y="54" width="12" height="12" rx="2" fill="{colour}"/>'
        yield _text(x + 17, 65, name, theme.words)
        x += 17 + 7.4 * len(name) + 18
    yield _text(WIDTH, 65, plot.unit, theme.faint, 12, "end")
    value = 0.0
    while value <= _top_of(plot):
        width = 2 if value == plot.reference else 1
        y = _y(plot, value)
        colour = theme.faint if value == plot.reference else theme.lines
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH}" stroke="{colour}" stroke-width="{width}"/>'
        yield _text(LEFT - 8, y + 4, f"{value:g}", theme.faint, 12, "end")
        value += plot.step


def _colours(plot: Plot, theme: Theme) -> Sequence[str]:
    """Return a colour for each series; a seventh has that of words."""
    return [*theme.series, theme.words][: len(plot.series)]


def _bars(plot: Plot, theme: Theme) -> Iterator[str]:
    group = (WIDTH - LEFT) / len(plot.groups)
    width = min(34.0, group * 0.8 / len(plot.series))
    for place, name in enumerate(plot.groups):
        middle = LEFT + group * (place + 0.5)
        begin = middle - width * len(plot.series) / 2
        yield _text(middle, TOP + PLOT_HEIGHT + 20, name, theme.words, 13, "middle")
        edges = [begin + width * index for index in range(len(plot.series) + 1)]
        bars = zip(pairwise(edges), plot.series, _colours(plot, theme), strict=True)
        for (left, right), (series, values), colour in bars:
            y = _y(plot, values[place])
            yield (
                f'<rect x="{left + 1:.1f}" y="{y:.1f}" width="{right - left - 2:.1f}" '
                f'height="{TOP + PLOT_HEIGHT - y:.1f}" fill="{colour}">'
                f"<title>{series}, {name}: {values[place]:g} {plot.unit}</title></rect>"
            )
