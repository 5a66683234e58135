"""What was found, as a page of Markdown."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

MAX_MESSAGE = 300  # characters of an error
DRY = (
    "**A dry run on a CPU.** No GPU was at hand: all code but CUDA's own kernels and graphs ran, on models far too "
    "small for the figures to say anything about speed. Nothing here was seen on a GPU."
)


@dataclass(frozen=True, slots=True)
class Check:
    """One claim, and whether it held."""

    name: str
    holds: bool
    found: str


@dataclass(slots=True)
class Report:
    """The page while it is written."""

    place: str
    is_dry: bool
    checks: list[Check] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, holds: bool, found: str) -> None:
        """Add a check, and say so at once."""
        self.checks.append(Check(name, holds, found))
        print(f"{'ok    ' if holds else 'FAILED'}  {name}: {found}", flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count a part that raises as a failed check, and go on: a GPU may be at hand for some minutes only."""
        try:
            yield
        except Exception as error:
            self.add(name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_MESSAGE]}")

    @property
    def holds(self) -> bool:
        """Whether every check held."""
        return bool(self.checks) and all(check.holds for check in self.checks)

    def markdown(self, seconds: float) -> str:
        """Return the page."""
        failed = sum(not check.holds for check in self.checks)
        verdict = "every check held" if self.holds else f"{failed} of {len(self.checks)} checks failed"
        rows = [(check.name, "yes" if check.holds else "**no**", check.found) for check in self.checks]
        parts = [
            "# GPU check",
            *([DRY] if self.is_dry else []),
            f"`make gpu-check`, {self.place}. It took {seconds:.0f} s; {verdict}.",
            "## Checks",
            table(("what", "holds", "found"), rows),
        ]
        for title, text in self.sections:
            parts += [f"## {title}", text]
        return "\n\n".join(parts) + "\n"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
