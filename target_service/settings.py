"""Settings of the target worker."""

from collections.abc import Iterator

from pydantic import Field

from specdec.serving.settings import HeadKind, Port, SharedModelSettings, TargetQuantization


class TargetSettings(SharedModelSettings):
    """The target worker: `python -m target_service`."""

    model: str = Field(..., description="hub id or folder of the target model")
    port: Port = Field(50053, description="port to listen on; 0 takes a free one and logs it")
    quantization: TargetQuantization = Field(
        "none",
        description="int8, on the CPU: weights of 8 bits: another model, which computes the same at any load",
    )
    score_ahead: bool = Field(
        True, description="score the round that will most likely follow while the answer before it is on its way"
    )
    offers_shared: bool = Field(
        True,
        description="what it drafts itself for greedy sessions it learns from all of a tenant",
    )
    head: str | None = Field(
        None,
        description="hub id or folder of a head, trained for the model, that it drafts with itself between forwards",
    )
    head_kind: HeadKind = Field("eagle3", description="what --head is")
    observation_window: int = Field(
        256, ge=1, le=4096, description="maximum number of prompt tokens that are observed for drafters that ask for it"
    )

    def problems(self) -> Iterator[str]:
        """Give a sentence for each combination of settings that is refused."""
        yield from super().problems()
        if self.head and not self.score_ahead:
            yield "--head drafts for rounds that are scored ahead; leave out --head or --no-score-ahead"
        if self.tensor_parallel > 1 and self.quantization != "none":
            yield f"--tensor-parallel shares weights as they are, not in {self.quantization}; leave one of the two out"


SETTINGS = TargetSettings
