"""A toy coordinator behind a real server and its gate: who is let in, and for how long."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.quotas import watched_quotas
from coordinator.servicer import GenerationServicer
from coordinator.session_ids import SECRET_BYTES, SessionIds
from coordinator.sessions import open_store
from coordinator.settings import CoordinatorSettings
from specdec.serving.server import Server, serving
from specdec.v1 import generation_pb2_grpc
from tests.support.toy_coordinator import ToyCoordinator

SERVICE = "specdec.v1.GenerationService"


@asynccontextmanager
async def guarded_coordinator(**settings: object) -> AsyncIterator[tuple[ToyCoordinator, Server, str]]:
    """Serve a toy coordinator with these settings; yield it, its server and its address."""
    own = CoordinatorSettings.model_validate({"tokenizer": "none", "port": 0, "drain_s": 0} | settings)
    store = open_store("memory", 1000.0)
    coordinator = ToyCoordinator(store, own.max_sessions, quotas=watched_quotas(own.quotas_file))

    @asynccontextmanager
    async def built(server: Server) -> AsyncIterator[None]:
        servicer = GenerationServicer(coordinator, SessionIds(bytes(SECRET_BYTES)))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.grpc)
        yield

    async with serving(own, SERVICE, built) as server:
        yield coordinator, server, f"127.0.0.1:{server.port}"
    await store.close()
