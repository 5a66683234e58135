"""Settings of every drafter that runs a language model."""

from pydantic import Field

from draft_service.support import SupportSettings


class DraftModelSettings(SupportSettings):
    """How a draft model is run, whichever it is."""

    draft_ahead: bool = Field(True, description="draft the next round while the target scores and no session asks")
    draft_ahead_outcomes: int = Field(
        3, ge=1, description="after how many outcomes of a round, at most, the next one is drafted ahead"
    )
