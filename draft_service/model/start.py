"""Starting a draft model: loaded, described, and its engine running."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from draft_service.metrics import METRICS
from draft_service.model.drafter import ModelDrafter
from draft_service.model.settings import DraftModelSettings
from draft_service.model.tasks import DraftProcessor
from specdec.engine import EngineError, EngineLoop
from specdec.serving.model_worker import load_model, new_engine, running
from specdec.serving.server import Server
from specdec.types import ModelInfo


async def started_drafter(
    name: str,
    settings: DraftModelSettings,
    model: str,
    server: Server,
    stack: AsyncExitStack,
    layers: Sequence[int] = (),
) -> ModelDrafter:
    """Return a drafter called `name` that runs a model, or only some of its layers. Raises ValueError."""
    engine, info = await _started_engine(settings, model, server, stack, layers)
    return ModelDrafter(name, engine, info, settings.draft_ahead)


async def _started_engine(
    settings: DraftModelSettings, name: str, server: Server, stack: AsyncExitStack, layers: Sequence[int]
) -> tuple[EngineLoop[Any], ModelInfo]:
    """Load the model and start its engine. Raises ValueError where it cannot be served."""
    try:
        quantization = None if settings.draft_quantization == "none" else settings.draft_quantization
        model, info = await load_model(settings, name, layers, quantization)
        processor = DraftProcessor(info.vocab_size, settings.support_mass, settings.support_max)
        engine = new_engine(settings, model, processor)
    except EngineError as error:
        raise ValueError(str(error)) from error
    METRICS.watch(engine)
    await stack.enter_async_context(running(engine, server))
    return engine, info
