"""What a person reads of a world that broke an invariant."""

import shlex

from tests.simulation.world import Outcome


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
