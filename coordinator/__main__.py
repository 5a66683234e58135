"""`python -m coordinator`: the one place that knows all concrete classes of the coordinator."""

import asyncio
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import coordinator  # noqa: F401  # sets grpc's environment before grpc is imported
from coordinator.capabilities import WorkerCapabilities
from coordinator.chat import load_chat_template
from coordinator.draft import DraftWorkers
from coordinator.draft_length import Costs
from coordinator.requests import Prompts
from coordinator.running import RunningGenerations
from coordinator.service import Coordinator
from coordinator.servicer import GenerationServicer
from coordinator.sessions import SessionStore, open_store
from coordinator.settings import CoordinatorSettings
from coordinator.target import TargetWorkers
from specdec.errors import SpecdecError
from specdec.serving.channels import open_worker_channel
from specdec.serving.server import CannotServe, Server, run_service
from specdec.serving.settings import load
from specdec.serving.tokenizer import fingerprint, load_tokenizer, tokenizer_folder
from specdec.v1 import generation_pb2_grpc

SERVICE = "specdec.v1.GenerationService"


def main() -> None:
    """Run the coordinator until it is told to stop; exit with 1 and one sentence if it cannot start."""
    settings = load(CoordinatorSettings, "coordinator")
    try:
        asyncio.run(run_service(settings, "coordinator", SERVICE, lambda server: built(settings, server)))
    except (CannotServe, SpecdecError, OSError, ValueError) as error:
        sys.exit(f"coordinator: {error}")


@asynccontextmanager
async def built(settings: CoordinatorSettings, server: Server) -> AsyncIterator[None]:
    """Build the coordinator on a listening server; yield once the store and a target worker answered."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(_opened_store(settings))
        parts = await _assembled(settings, store, stack)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(parts), server.grpc)
        await parts.models.ready()
        watching = asyncio.create_task(parts.models.watch())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await parts.running.stop()


@asynccontextmanager
async def _opened_store(settings: CoordinatorSettings) -> AsyncIterator[SessionStore]:
    store = open_store(settings.store, settings.session_ttl_s)
    try:
        await store.ping()
        yield store
    finally:
        await store.close()


async def _assembled(settings: CoordinatorSettings, store: SessionStore, stack: AsyncExitStack) -> Coordinator:
    folder = await asyncio.to_thread(tokenizer_folder, settings.tokenizer)
    tokenizer = load_tokenizer(str(folder))
    channel = await stack.enter_async_context(open_worker_channel(settings.target, "specdec.v1.TargetService"))
    target = TargetWorkers(channel, settings.score_timeout_s, settings.target_patience_s)
    draft = None
    if settings.draft:
        channel = await stack.enter_async_context(open_worker_channel(settings.draft, "specdec.v1.DraftService"))
        draft = DraftWorkers(channel, settings.draft_timeout_s)
    return Coordinator(
        models=WorkerCapabilities(target, draft, fingerprint(tokenizer)),
        target_workers=target,
        draft_workers=draft,
        prompts=Prompts(tokenizer, load_chat_template(folder)),
        store=store,
        running=RunningGenerations(settings.max_sessions),
        costs=defaultdict(Costs),
        max_new_tokens=settings.max_new_tokens,
        max_draft_tokens=settings.max_draft_tokens,
    )


if __name__ == "__main__":
    main()
