"""Settings of the target worker."""

from pydantic import Field

from specdec.serving.settings import ModelSettings, Port, TargetQuantization


class TargetSettings(ModelSettings):
    """The target worker: `python -m target_service`."""

    model: str = Field(..., description="hub id or folder of the target model")
    port: Port = Field(50053, description="port to listen on; 0 takes a free one and logs it")
    quantization: TargetQuantization = Field(
        "none",
        description="int8, on the CPU: weights of 8 bits: another model, which computes the same at any load",
    )
    observation_window: int = Field(
        256, ge=1, le=4096, description="maximum number of prompt tokens that are observed for drafters that ask for it"
    )


SETTINGS = TargetSettings
