"""`python -m draft_service`: offers the registered drafters. Without the drafter `model` nothing here imports torch."""

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import specdec.serving.process_start  # noqa: F401  # first: a package that is missing becomes one sentence
from draft_service.drafter import DrafterKind
from draft_service.registry import registered
from draft_service.servicer import DraftServicer
from draft_service.settings import DraftWorkerSettings, chosen_kinds, settings_for
from specdec.serving.process_status import StatusServicer
from specdec.serving.server import Server, run_process
from specdec.serving.settings import load
from specdec.v1 import draft_pb2_grpc, status_pb2_grpc

SERVICE = "specdec.v1.DraftService"


def main(kinds: Mapping[str, DrafterKind]) -> None:
    """Run the worker until it is told to stop; exit with 1 and one sentence if it cannot start."""
    settings = load(settings_for(kinds), "draft_service")
    try:
        chosen_kinds(settings, kinds)
    except ValueError as error:
        sys.exit(f"draft_service: {error}")
    run_process(settings, "draft_service", "draft", SERVICE, lambda server: built(settings, server, kinds))


@asynccontextmanager
async def built(settings: DraftWorkerSettings, server: Server, kinds: Mapping[str, DrafterKind]) -> AsyncIterator[None]:
    """Build the worker on a listening server; yield once its drafters can work."""
    async with AsyncExitStack() as stack:
        drafters = {kind.name: await kind.build(settings, server, stack) for kind in chosen_kinds(settings, kinds)}
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(drafters), server.grpc)
        status_pb2_grpc.add_StatusServiceServicer_to_server(StatusServicer("draft"), server.grpc)
        yield


if __name__ == "__main__":
    main(registered())
