"""What a person reads of one phase."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

NUMBER = re.compile(r"\b[0-9a-f]*\d[0-9a-f.]*\b")  # ids too


@dataclass(slots=True)
class Report:
    """What one phase did."""

    phase: str
    num_messages: int = 0
    elapsed_s: float = 0.0
    growth_bytes: dict[str, int] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)
    neighbour: str = ""
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)  # wrong on an idle machine

    def lines(self) -> list[str]:
        """Return what a person reads."""
        rate = self.num_messages / self.elapsed_s if self.elapsed_s else 0.0
        growth = ", ".join(f"{name} {size / 2**20:+.1f} MB" for name, size in self.growth_bytes.items())
        endings = ", ".join(f"{code} {count}" for code, count in sorted(self.codes.items()))
        return [
            f"{self.phase}: {self.num_messages} messages in {self.elapsed_s:.0f} s, {rate:.0f} a second; "
            f"{len(self.wrong)} wrong",
            f"  ended: {endings}",
            f"  memory: {growth}; neighbour: {self.neighbour}",
            *(f"  WRONG, {count} times: {sentence}" for sentence, count in _alike(self.wrong)[:10]),
            *(f"  LATE: {sentence}" for sentence in self.late),
        ]


def _alike(sentences: Sequence[str]) -> list[tuple[str, int]]:
    """Return the first of each group of sentences that differ in numbers alone, and how many there are."""
    groups: dict[str, list[str]] = {}
    for sentence in sentences:
        groups.setdefault(NUMBER.sub("", sentence), []).append(sentence)
    return [(group[0], len(group)) for group in groups.values()]
