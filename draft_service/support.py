"""Settings of drafters with weights: how these are rounded, and how far a distribution is cut that is drawn from."""

from pydantic import Field

from specdec.exact.values import MAX_SUPPORT_TOKENS
from specdec.serving.settings import DraftQuantization, ModelSettings


class SupportSettings(ModelSettings):
    """Settings of draft models and heads alike."""

    support_mass: float = Field(0.99, gt=0, le=1, description="a distribution is cut to the fewest tokens of this mass")
    support_max: int = Field(64, ge=1, le=MAX_SUPPORT_TOKENS, description="maximum number of tokens of a support")
    draft_quantization: DraftQuantization = Field(
        "none", description="bits of the draft's weights, on the CPU; fewer are faster, and accepted less often"
    )
