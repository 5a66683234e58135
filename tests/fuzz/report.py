"""What a person reads of one phase."""

from collections import Counter
from dataclasses import dataclass, field


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
            *(f"  WRONG: {sentence}" for sentence in self.wrong[:10]),
            *(f"  LATE: {sentence}" for sentence in self.late),
        ]
