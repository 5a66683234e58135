"""How fast a bandwidth allows plain decoding and rounds to be."""

from dataclasses import dataclass

from specdec.accounting.traffic import Stored, Traffic


@dataclass(frozen=True, slots=True)
class Setting:
    """What is decoded with."""

    target: Stored
    draft: Stored | None
    bandwidth: float  # bytes a second
    num_sessions: int
    context: int  # tokens of each session
    num_draft_tokens: int
    tokens_per_round: float  # of a session, expected


@dataclass(frozen=True, slots=True)
class Bound:
    """What a plain forward, or a round, reads, and the tokens a second that the bandwidth allows."""

    scored: Traffic
    drafted_bytes: float
    tokens_per_s: float  # of all sessions

    @property
    def total(self) -> float:
        """All bytes."""
        return self.scored.total + self.drafted_bytes


def plain(setting: Setting) -> Bound:
    """Return the bound of plain decoding."""
    traffic = setting.target.forward(setting.num_sessions, 1, setting.context)
    return Bound(traffic, 0.0, setting.num_sessions * setting.bandwidth / traffic.total)


def of_round(setting: Setting) -> Bound:
    """Return the bound of rounds: one forward over K + 1 positions, and K forwards of the draft."""
    traffic = setting.target.forward(setting.num_sessions, setting.num_draft_tokens + 1, setting.context)
    one = setting.draft.forward(setting.num_sessions, 1, setting.context).total if setting.draft else 0.0
    drafted_bytes = setting.num_draft_tokens * one
    tokens = setting.num_sessions * setting.tokens_per_round
    return Bound(traffic, drafted_bytes, tokens * setting.bandwidth / (traffic.total + drafted_bytes))
