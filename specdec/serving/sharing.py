"""Which sessions may draft from what others left, and from which of it.

Two sessions with the same seed make the same draws. What one of them committed was decided by the very draws that will
judge the other's drafts. Where chosen drafts are matched that changes nothing, but they may be joined with drawn ones,
and whether a round drafts what is found or what is drawn depends on what is found. So a session never drafts from what
a session with its own seed left. Texts of other seeds depend on other draws, greedy texts on none.

What the target reports of a text is another matter: a session is told of its draft tokens as well, and which those were
may have come from a third session, whose draws they depend on. So what was reported to others is for greedy sessions
alone, which no draw judges.
"""

from specdec.serving.session_stream import WorkerSession

GREEDY = None


def group_of(session: WorkerSession) -> str | None:
    """Return what sessions must have in common to share anything: the target. None: it shares nothing.

    A tenant's name belongs in here once there are tenants.
    """
    return session.target or None


def draws_of(session: WorkerSession) -> int | None:
    """Return what names the draws that a session's text depends on: its seed, or GREEDY."""
    return session.seed if session.sampling.temperature else GREEDY


def may_read_reports(session: WorkerSession) -> bool:
    """Return whether a session may draft from what the target reported to others."""
    return draws_of(session) is GREEDY
