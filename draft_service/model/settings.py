"""Settings of every drafter that runs a language model."""

from typing import Literal

from pydantic import Field

from specdec.exact.values import MAX_SUPPORT_TOKENS
from specdec.serving.settings import ModelSettings


class DraftModelSettings(ModelSettings):
    """How a draft model is run, whichever it is."""

    support_mass: float = Field(0.99, gt=0, le=1, description="a distribution is cut to the fewest tokens of this mass")
    support_max: int = Field(64, ge=1, le=MAX_SUPPORT_TOKENS, description="maximum number of tokens of a support")
    draft_quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="bits of the draft model's weights, on the CPU; fewer are faster, and accepted less often"
    )
    draft_ahead: bool = Field(True, description="draft the next round while the target scores and no session asks")
