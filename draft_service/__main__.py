"""`python -m draft_service`: the one place that knows all concrete classes of the draft worker.

Without the drafter `model` nothing here imports torch.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from draft_service.drafters import Drafter
from draft_service.ngram import NgramDrafter
from draft_service.servicer import DraftServicer
from specdec.serving.server import Server, run_process
from specdec.serving.settings import DraftSettings, load
from specdec.v1 import draft_pb2_grpc

SERVICE = "specdec.v1.DraftService"
KINDS = ("model", "ngram")


def main() -> None:
    """Run the worker until it is told to stop; exit with 1 and one sentence if it cannot start."""
    settings = load(DraftSettings, "draft_service")
    try:
        drafter_names(settings)
    except ValueError as error:
        sys.exit(f"draft_service: {error}")
    run_process(settings, "draft_service", "draft", SERVICE, lambda server: built(settings, server))


def drafter_names(settings: DraftSettings) -> list[str]:
    """Return the drafters on offer, the default first. Raises ValueError for settings that clash."""
    names = list(dict.fromkeys(name.strip() for name in settings.drafters.split(",")))
    for name in names:
        if name not in KINDS:
            raise ValueError(f"--drafters names {name!r}; there are: {', '.join(KINDS)}")
    if "model" in names and not settings.model:
        raise ValueError("--model is missing: the drafter `model` needs one; or start with --drafters ngram")
    if settings.ngram_min > settings.ngram_max:
        raise ValueError(f"--ngram-min {settings.ngram_min} is more than --ngram-max {settings.ngram_max}")
    return names


@asynccontextmanager
async def built(settings: DraftSettings, server: Server) -> AsyncIterator[None]:
    """Build the worker on a listening server; yield once its drafters can work."""
    drafters: dict[str, Drafter] = {}
    async with AsyncExitStack() as stack:
        for name in drafter_names(settings):
            drafters[name] = (
                NgramDrafter(settings.ngram_min, settings.ngram_max)
                if name == "ngram"
                else await _model_drafter(settings, server, stack)
            )
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(drafters), server.grpc)
        yield


async def _model_drafter(settings: DraftSettings, server: Server, stack: AsyncExitStack) -> Drafter:
    """Load the model; everything that needs torch is imported here. Raises ValueError where it cannot be served."""
    from draft_service.metrics import METRICS
    from draft_service.model import DraftProcessor, ModelDrafter
    from specdec.engine import EngineError
    from specdec.serving.model_worker import load_model, new_engine, running

    assert settings.model, "checked at the start"
    try:
        model, info = await load_model(settings, settings.model)
        engine = new_engine(
            settings, model, DraftProcessor(info.vocab_size, settings.support_mass, settings.support_max)
        )
    except EngineError as error:
        raise ValueError(str(error)) from error
    METRICS.watch(engine)
    await stack.enter_async_context(running(engine, server))
    return ModelDrafter(engine, info, settings.draft_ahead)


if __name__ == "__main__":
    main()
