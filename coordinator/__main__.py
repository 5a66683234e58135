"""`python -m coordinator`: the only module that names the concrete classes of the coordinator."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from grpc.aio import Channel

import specdec.serving.process_start  # noqa: F401  # first: a package that is missing becomes one sentence
from coordinator.capabilities import WorkerCapabilities
from coordinator.chat import load_chat_template
from coordinator.draft import DraftWorkers, draft_watch
from coordinator.fleet import worker_statuses
from coordinator.pool.resolving import host_of, resolver
from coordinator.prompts import Prompts
from coordinator.quotas import watched_quotas
from coordinator.registry import RunningGenerations
from coordinator.requests import RequestLimits
from coordinator.service import Coordinator
from coordinator.servicer import GenerationServicer
from coordinator.session_ids import SessionIds
from coordinator.session_workers import Workers
from coordinator.sessions import SessionStore, open_store
from coordinator.settings import CoordinatorSettings
from coordinator.stores.private_redis import private_redis
from coordinator.target import TargetWorkers, target_watch
from specdec.errors import SpecdecError
from specdec.serving.background import in_background
from specdec.serving.channels import open_worker_channel
from specdec.serving.memory import give_back_large_blocks
from specdec.serving.process import supervised
from specdec.serving.process_status import StatusServicer
from specdec.serving.security.tls import log_reload
from specdec.serving.server import Server, run_process
from specdec.serving.settings import load
from specdec.serving.state_folder import REDIS_SERVER, redis_server, store_folder
from specdec.serving.telemetry import get_logger
from specdec.serving.tokenizer import fingerprint, load_tokenizer, tokenizer_folder
from specdec.tls import watched
from specdec.v1 import generation_pb2_grpc, status_pb2_grpc

SERVICE = "specdec.v1.GenerationService"
BYTES_PER_TOKEN = 4  # of text, about
STORE_DELAY_S = 3.0  # then it is said that the store does not answer


def main() -> None:
    """Run the coordinator until it is told to stop; exit with 1 and one sentence if it cannot start."""
    settings = load(CoordinatorSettings, "coordinator")
    give_back_large_blocks()
    run_process(settings, "coordinator", "coordinator", SERVICE, lambda server: built(settings, server), SpecdecError)


@asynccontextmanager
async def built(settings: CoordinatorSettings, server: Server) -> AsyncIterator[None]:
    """Build the coordinator on a listening server; yield once the store and a target worker answered."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(_opened_store(settings, server))
        folder = await in_background(lambda: tokenizer_folder(settings.tokenizer))
        tokenizer = load_tokenizer(str(folder))
        workers = await _opened_workers(settings, server, fingerprint(tokenizer), stack)
        running = RunningGenerations(settings.max_sessions)
        prompts = Prompts(tokenizer, load_chat_template(folder))
        stack.callback(prompts.close)
        limits = RequestLimits(settings.max_new_tokens, settings.max_draft_tokens)
        service = Coordinator(
            workers,
            prompts,
            store,
            running,
            limits,
            detached=settings.detached_rule,
            quotas=watched_quotas(settings.quotas_file),
        )
        stack.callback(service.close)
        servicer = GenerationServicer(service, SessionIds(await store.secret()))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.grpc)
        status = StatusServicer("coordinator", lambda: worker_statuses(workers.pools), settings.operator_tenants)
        status_pb2_grpc.add_StatusServiceServicer_to_server(status, server.grpc)
        await workers.capabilities.ready()
        _warn_of_small_requests(settings.max_request_bytes, workers.capabilities.target.context_length)
        async with (
            supervised(server, "capabilities", workers.capabilities.watch()),
            supervised(server, "upkeep", service.watch()),
        ):
            yield
        await running.stop()


def _warn_of_small_requests(max_request_bytes: int, context_length: int) -> None:
    if max_request_bytes < BYTES_PER_TOKEN * context_length:
        advice = f"the model's context holds {context_length} tokens; raise --max-request-bytes to fill it with text"
        get_logger().warning("requests_smaller_than_context", max_request_bytes=max_request_bytes, advice=advice)


@asynccontextmanager
async def _opened_store(settings: CoordinatorSettings, server: Server) -> AsyncIterator[SessionStore]:
    async with _store_address(settings, server) as address:
        store = open_store(
            address,
            settings.session_ttl_s,
            settings.store_password_file,
            num_replicas=settings.store_replicas,
            patience_s=settings.store_patience_s,
            lease_s=settings.lease_s,
        )
        try:
            if not await _answer(store, settings.store_patience_s) and address != "memory":
                get_logger().warning("store_policy_unknown", advice="see to it that maxmemory-policy is noeviction")
            yield store
        finally:
            await store.close()


async def _answer(store: SessionStore, patience_s: float) -> bool:
    """Wait for the store as any call does, as it may be away for a failover; say so, as its address may be wrong."""
    answer = asyncio.create_task(store.ping())
    try:
        if not (await asyncio.wait([answer], timeout=min(STORE_DELAY_S, patience_s)))[0]:
            advice = "start the Redis of --store, or correct its address"
            get_logger().warning("store_does_not_answer", patience_s=patience_s, advice=advice)
        return await answer
    finally:
        answer.cancel()


@asynccontextmanager
async def _store_address(settings: CoordinatorSettings, server: Server) -> AsyncIterator[str]:
    """Yield where sessions are kept; the embedded store is started, where the machine has a redis-server."""
    if settings.store != "embedded":
        yield settings.store
    elif executable := redis_server():
        folder = store_folder(settings.state_dir)
        async with private_redis(folder, executable, server.fail) as address:
            get_logger().info("store", folder=str(folder))
            yield address
    else:
        advice = f"install {REDIS_SERVER} to keep sessions over restarts"
        get_logger().warning("store_in_memory", advice=advice)
        yield "memory"


async def _opened_workers(
    settings: CoordinatorSettings, server: Server, tokenizer: str, stack: AsyncExitStack
) -> Workers:
    files = settings.worker_tls
    tls = watched(files, log_reload) if files else None

    def opener(name: str, tls_name: str | None) -> Callable[[str], Channel]:
        return lambda address: open_worker_channel(address, tls, tls_name or host_of(name), settings.pings)

    targets = target_watch(resolver(settings.target), opener(settings.target, settings.target_tls_name))
    await stack.enter_async_context(supervised(server, "target pool", targets.run()))
    target = TargetWorkers(targets.pool, settings.score_timeout_s, settings.target_patience_s)
    draft = None
    if settings.draft:
        drafts = draft_watch(resolver(settings.draft), opener(settings.draft, settings.draft_tls_name))
        await stack.enter_async_context(supervised(server, "draft pool", drafts.run()))
        draft = DraftWorkers(drafts.pool, settings.draft_timeout_s)
    return Workers(target, draft, WorkerCapabilities(target, draft, tokenizer, settings.canary))


if __name__ == "__main__":
    main()
