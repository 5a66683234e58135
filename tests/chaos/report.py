"""What a run is reported as: faults by kind with the gaps that clients saw, sessions, tokens, and what was wrong."""

from statistics import median

from tests.chaos.faults import Done
from tests.chaos.ledger import Ledger
from tests.chaos.run import AT_ONCE, Plan, Result

AFTER_S = 1.0  # a wait that begins so soon after a fault is counted with it
MAX_SHOWN = 20  # violations


def report(result: Result) -> str:
    """Return the whole report."""
    ledger = result.ledger
    lost = sum(session.is_lost for session in ledger.sessions)
    rolled_back = sum(session.was_rolled_back for session in ledger.sessions)
    wrong = ", ".join(f"{kind} {ledger.wrong[kind]}" for kind in ("lost", "doubled", "changed", "failed"))
    return "\n".join(
        [
            *_table(result),
            "",
            f"sessions {len(ledger.sessions)}, by {sum(len(session.views) for session in ledger.sessions)} clients; "
            f"retries {ledger.num_retries}, of these refused {ledger.num_refused}; {result.elapsed_s:.0f} s",
            f"tokens {ledger.num_tokens}, of these {ledger.num_compared} compared with a run without faults",
            "streams ended: "
            + (", ".join(f"{how} {count}" for how, count in sorted(ledger.endings.items())) or "none"),
            f"sessions that lived through a rollback {rolled_back}: whole {rolled_back - lost}, said to be lost {lost}",
            f"wrong {len(result.violations)} ({wrong}; left behind {len(result.left)})",
            *(f"  {violation}" for violation in result.violations[:MAX_SHOWN]),
            f"repeat it: {how_to_repeat(result.plan)}",
        ]
    )


def how_to_repeat(plan: Plan) -> str:
    """Return the command that draws the same faults."""
    options = [f"--at-once {plan.num_at_once}"] if plan.num_at_once != AT_ONCE else []
    options += ["--sentinels"] if plan.size.is_durable else []
    options += [f"--only '{kind}'" for kind in plan.only]
    options += [f"--mistake '{plan.mistake}'"] if plan.mistake else []
    command = f"make chaos SESSIONS={plan.num_sessions} FAULTS={plan.num_faults} SEED={plan.seed}"
    return command + (f' CHAOS_ARGS="{" ".join(options)}"' if options else "")


def _table(result: Result) -> list[str]:
    kinds = sorted({fault.kind for fault in result.faults})
    lines = [f"{'fault':<26}{'times':>6}{'streams':>9}{'gap median':>12}{'gap max':>10}"]
    for kind in kinds:
        faults = [fault for fault in result.faults if fault.kind == kind]
        waits_s = [wait_s for fault in faults for wait_s in gaps_s(result.ledger, fault)]
        shown = [f"{value:.2f} s" for value in (median(waits_s), max(waits_s))] if waits_s else ["-", "-"]
        lines.append(f"{kind:<26}{len(faults):>6}{len(waits_s):>9}{shown[0]:>12}{shown[1]:>10}")
    return lines


def gaps_s(ledger: Ledger, fault: Done) -> list[float]:
    """Return, for each client that waited then, its longest wait with a part in the fault's time."""
    views = [view for session in ledger.sessions for view in session.views]
    waits = (view.longest_wait_s(fault.begin_s, fault.end_s + AFTER_S) for view in views)
    return [wait_s for wait_s in waits if wait_s is not None]
