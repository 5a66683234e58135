"""The generated files of docs/, and what is in them."""

from collections.abc import Iterator
from pathlib import Path

from documentation import configuration, plots

DOCS = Path(__file__).parents[1] / "docs"


def generated() -> Iterator[tuple[Path, str]]:
    """Give each file with its text."""
    yield DOCS / "configuration.md", configuration.text()
    for name, plot in plots.plots((DOCS / "benchmarks.md").read_text()).items():
        for theme, colours in plots.THEMES.items():
            yield DOCS / f"images/benchmarks/{name}-{theme}.svg", plots.svg(plot, colours)
