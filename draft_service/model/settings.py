"""Settings of every drafter that runs a language model."""

from pydantic import Field

from draft_service.support import SupportSettings
from specdec.serving.settings import DraftQuantization


class DraftModelSettings(SupportSettings):
    """How a draft model is run, whichever it is."""

    draft_quantization: DraftQuantization = Field(
        "none", description="bits of the draft model's weights, on the CPU; fewer are faster, and accepted less often"
    )
    draft_ahead: bool = Field(True, description="draft the next round while the target scores and no session asks")
