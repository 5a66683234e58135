"""`python -m target_service`: the only module that names the concrete classes of the target worker."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import specdec.serving.process_start  # noqa: F401  # first: a package that is missing becomes one sentence
from specdec.engine import EngineError, LanguageModel, Quantization
from specdec.engine.parallel import Group, place_in
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.model_worker import language_model, load_model, new_engine, running
from specdec.serving.process import unless_failed
from specdec.serving.process_status import StatusServicer
from specdec.serving.server import Server, run_process
from specdec.serving.settings import load
from specdec.serving.shared_model import follow_worker, shared
from specdec.serving.tokenizer import load_tokenizer
from specdec.v1 import status_pb2_grpc, target_pb2_grpc
from target_service.ahead import look_ahead
from target_service.loading import load_head
from target_service.metrics import METRICS
from target_service.offering import SharedSuccessors
from target_service.scorer import Scorer
from target_service.servicer import TargetServicer
from target_service.settings import TargetSettings

SERVICE = "specdec.v1.TargetService"


def main() -> None:
    """Run the worker, or a follower of one, until told to stop; exit with 1 and one sentence if it cannot start."""
    settings = load(TargetSettings, "target_service")
    place = place_in(os.environ)
    if place is not None and place.rank > 0:
        follow_worker(settings, "target_service", place, lambda group: _share(settings, group))
        return
    run_process(settings, "target_service", "target", SERVICE, lambda server: built(settings, server), EngineError)


@asynccontextmanager
async def built(settings: TargetSettings, server: Server) -> AsyncIterator[None]:
    """Build the worker on a listening server; yield once the model is loaded."""
    async with shared(settings, server, "target_service", settings.model) as group:
        loading = load_model(settings, settings.model, quantization=_quantization(settings), group=group)
        model, info = await unless_failed(server, loading)
        head = await unless_failed(server, load_head(settings, model, info)) if settings.head else None
        own_layers = head.layers if head else ()
        scorer = Scorer(info.vocab_size, settings.observation_window, info.hidden_size, own_layers, look_ahead)
        engine = new_engine(settings, model, scorer)
        METRICS.watch(engine)
        grammars = GrammarCompiler(lambda: load_tokenizer(settings.model).to_str(), info.vocab_size, info.eos_token_ids)
        successors = SharedSuccessors(settings.offers_shared)
        servicer = TargetServicer(engine, scorer, info, grammars, settings.score_ahead, successors, head)
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
        status_pb2_grpc.add_StatusServiceServicer_to_server(StatusServicer("target"), server.grpc)
        async with running(engine, server, settings.stalled_s):
            yield


def _share(settings: TargetSettings, group: Group) -> LanguageModel:
    """Load a follower's share of the model."""
    return language_model(settings, settings.model, quantization=_quantization(settings), group=group)


def _quantization(settings: TargetSettings) -> Quantization | None:
    return None if settings.quantization == "none" else settings.quantization


if __name__ == "__main__":
    main()
