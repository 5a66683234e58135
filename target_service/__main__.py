"""`python -m target_service`: the only module that names the concrete classes of the target worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import specdec.serving.process_start  # noqa: F401  # first: a package that is missing becomes one sentence
from specdec.engine import EngineError
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.model_worker import load_model, new_engine, running
from specdec.serving.process_status import StatusServicer
from specdec.serving.server import Server, run_process
from specdec.serving.settings import load
from specdec.serving.tokenizer import load_tokenizer
from specdec.v1 import status_pb2_grpc, target_pb2_grpc
from target_service.metrics import METRICS
from target_service.scorer import Scorer
from target_service.servicer import TargetServicer
from target_service.settings import TargetSettings

SERVICE = "specdec.v1.TargetService"


def main() -> None:
    """Run the worker until it is told to stop; exit with 1 and one sentence if it cannot start."""
    settings = load(TargetSettings, "target_service")
    run_process(settings, "target_service", "target", SERVICE, lambda server: built(settings, server), EngineError)


@asynccontextmanager
async def built(settings: TargetSettings, server: Server) -> AsyncIterator[None]:
    """Build the worker on a listening server; yield once the model is loaded."""
    quantization = None if settings.quantization == "none" else settings.quantization
    model, info = await load_model(settings, settings.model, quantization=quantization)
    scorer = Scorer(info.vocab_size, settings.observation_window, info.hidden_size)
    engine = new_engine(settings, model, scorer)
    METRICS.watch(engine)
    grammars = GrammarCompiler(lambda: load_tokenizer(settings.model).to_str(), info.vocab_size, info.eos_token_ids)
    servicer = TargetServicer(engine, scorer, info, grammars)
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
    status_pb2_grpc.add_StatusServiceServicer_to_server(StatusServicer("target"), server.grpc)
    async with running(engine, server, settings.stalled_s):
        yield


if __name__ == "__main__":
    main()
