"""Settings of every drafter that runs a language model."""

from typing import Literal

from pydantic import Field

from draft_service.support import SupportSettings


class DraftModelSettings(SupportSettings):
    """How a draft model is run, whichever it is."""

    draft_quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="bits of the draft model's weights, on the CPU; fewer are faster, and accepted less often"
    )
    draft_ahead: bool = Field(True, description="draft the next round while the target scores and no session asks")
