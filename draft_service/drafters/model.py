"""Drafting with a small language model; everything that needs torch is imported when the drafter is built."""

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from pydantic import Field

from draft_service.drafter import DrafterKind
from draft_service.support import SupportSettings
from specdec.serving.server import Server

if TYPE_CHECKING:
    from draft_service.model.drafter import ModelDrafter


class ModelDrafterSettings(SupportSettings):
    """Settings of the drafter `model`."""

    model: str | None = Field(None, description="hub id or folder of the draft model; needed for the drafter `model`")
    draft_ahead: bool = Field(True, description="draft the next round while the target scores and no session asks")


def check(settings: ModelDrafterSettings) -> None:
    """Raise ValueError where there is no model."""
    if not settings.model:
        raise ValueError("--model is missing: the drafter `model` needs one; or leave --drafters unset")


async def build(settings: ModelDrafterSettings, server: Server, stack: AsyncExitStack) -> "ModelDrafter":
    """Load the model and start its engine. Raises ValueError where it cannot be served."""
    from draft_service.metrics import METRICS
    from draft_service.model.drafter import ModelDrafter
    from draft_service.model.tasks import DraftProcessor
    from specdec.engine import EngineError
    from specdec.serving.model_worker import load_model, new_engine, running

    assert settings.model, "checked at the start"
    try:
        model, info = await load_model(settings, settings.model)
        processor = DraftProcessor(info.vocab_size, settings.support_mass, settings.support_max)
        engine = new_engine(settings, model, processor)
    except EngineError as error:
        raise ValueError(str(error)) from error
    METRICS.watch(engine)
    await stack.enter_async_context(running(engine, server))
    return ModelDrafter(engine, info, settings.draft_ahead)


KIND = DrafterKind("model", ModelDrafterSettings, build, check, lambda settings: bool(settings.model))
