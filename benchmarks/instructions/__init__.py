"""Instructions by kind that no draft is ever trained on: what a real target is asked in the demo and the bench.

They were written for this repository. `models/instructions.py` generates others of the same kinds for training, and
drops what is too close to one of these.
"""

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "held_out"
KINDS = ("chat", "code", "maths", "summary", "extraction", "translation")


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a user asks."""

    kind: str
    name: str  # unique among those of its kind
    prompt: str


def held_out(kind: str) -> list[Instruction]:
    """Return the held-out instructions of one of KINDS."""
    lines = (FOLDER / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Instruction(kind, **json.loads(line)) for line in lines]
