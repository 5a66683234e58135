"""What a person reads of a world."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from tests.simulation.world import Outcome, run_world


@dataclass(frozen=True, slots=True)
class Told:
    """What is printed and counted of a world."""

    text: str
    is_broken: bool
    went_back: Mapping[str, int]


def told(hazards: frozenset[str], verbose: bool, keep_going: bool, seed: int) -> Told:
    """Run a seed, and tell what is asked for: the trace of every world, or only what was broken."""
    outcome = run_world(seed, hazards)
    is_broken = bool(outcome.violations)
    text = (summary if keep_going and not verbose else report)(outcome) if verbose or is_broken else ""
    return Told(text, is_broken, outcome.went_back)


def how_to_repeat(outcome: Outcome) -> str:
    """Return the line that runs a world again."""
    hazards = "".join(f" --hazard {shlex.quote(name)}" for name in sorted(outcome.hazards))
    return f"python -m tests.simulation --first {outcome.seed} --seeds 1 --verbose{hazards}"


def summary(outcome: Outcome) -> str:
    """Return a line for each violation, and one on the whole."""
    facts = f"{outcome.endings or 'no clients'}; {outcome.virtual_s:.0f} virtual s, {outcome.num_steps} steps"
    lines = [f"seed {outcome.seed}: {violation}" for violation in outcome.violations]
    return "\n".join([*lines, f"seed {outcome.seed}: {facts}; again: {how_to_repeat(outcome)}"])


def report(outcome: Outcome) -> str:
    """Return the trace and the summary."""
    return "\n".join([*outcome.trace.lines(), summary(outcome)])
