"""Drafting with a small language model; everything that needs torch is imported when the drafter is built."""

from contextlib import AsyncExitStack

from pydantic import Field

from draft_service.drafter import Drafter, DrafterKind
from draft_service.model.settings import DraftModelSettings
from specdec.serving.server import Server


class ModelDrafterSettings(DraftModelSettings):
    """Settings of the drafter `model`."""

    model: str | None = Field(None, description="hub id or folder of the draft model; needed for the drafter `model`")
    target_tokenizer: str | None = Field(
        None, description="hub id or folder of the target; needed where the draft model has another tokenizer"
    )


def check(settings: ModelDrafterSettings) -> None:
    """Raise ValueError where there is no model."""
    if not settings.model:
        raise ValueError("--model is missing: the drafter `model` needs one; or leave --drafters unset")


async def build(settings: ModelDrafterSettings, server: Server, stack: AsyncExitStack) -> Drafter:
    """Load the model and start its engine. Raises ValueError where it cannot be served."""
    from draft_service.model.start import started_drafter

    assert settings.model, "checked at the start"
    return await started_drafter(
        KIND.name, settings, settings.model, server, stack, target_tokenizer=settings.target_tokenizer
    )


KIND = DrafterKind("model", ModelDrafterSettings, build, check, lambda settings: bool(settings.model))
