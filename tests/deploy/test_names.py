"""Names of Services: what gRPC asks of the cluster's DNS, and what it need not ask."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator.pool.watching import watching
from coordinator.target import target_watch
from specdec.serving.channels import open_worker_channel
from specdec.serving.server import Server, serving
from specdec.v1 import target_pb2, target_pb2_grpc, types_pb2
from target_service.settings import TargetSettings
from tests.support.dns_server import dns_server
from tests.support.manifests import OVERLAYS, containers, environment, named, render
from tests.support.ports import free_port

NAME = "target.specdec.svc.cluster.local"
SERVICE = "specdec.v1.TargetService"

CALL = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    try:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error  # nobody listens there
"""


def questions(address: str) -> list[tuple[str, str]]:
    """Return what gRPC asks for to find the target workers, with the kubelet's search domain and ndots."""
    resolver = {"LOCALDOMAIN": "specdec.svc.cluster.local", "RES_OPTIONS": "ndots:5"}
    with dns_server(lambda name: ["127.0.0.1"] if name == NAME else None) as dns:
        words = [sys.executable, "-c", CALL, address.replace("dns:///", dns.of(""))]
        subprocess.run(words, env=os.environ | resolver, check=True, timeout=60)
    return dns.questions


@pytest.fixture(scope="module")
def address() -> str:
    documents = render(OVERLAYS / "demo")
    (container,) = containers(named(documents, "Deployment", "coordinator"))
    return environment(container, documents)["SPECDEC_TARGET"]


def test_search_domains_are_not_asked(address: str) -> None:
    assert sorted(questions(address)) == [(NAME, "A"), (NAME, "AAAA")]


def test_a_name_without_an_end_asks_search_domains(address: str) -> None:
    """What the dot in the manifests is for."""
    asked = questions(address.replace(".:", ":"))
    assert {(f"{NAME}.specdec.svc.cluster.local", kind) for kind in ("A", "AAAA")} < set(asked)


class Listed(target_pb2_grpc.TargetServiceServicer):
    """A target worker without a model."""

    async def GetTarget(self, request: object, context: object) -> target_pb2.GetTargetResponse:
        """Describe a model."""
        model = types_pb2.ModelInfo(name="none", tokenizer_fingerprint="t", vocab_size=8, context_length=8)
        return target_pb2.GetTargetResponse(model=model)

    def Score(self, requests: object, context: object) -> AsyncIterator[target_pb2.ScoreResponse]:
        """Refuse: no test here scores."""
        raise NotImplementedError


@asynccontextmanager
async def loading_worker(loaded: asyncio.Event) -> AsyncIterator[str]:
    """Serve a worker that loads until told; give its address."""
    settings, stopping = TargetSettings(model="none", port=free_port(), drain_s=0), asyncio.Event()

    @asynccontextmanager
    async def build(server: Server) -> AsyncIterator[None]:
        target_pb2_grpc.add_TargetServiceServicer_to_server(Listed(), server.grpc)
        await loaded.wait()
        yield

    async def serve() -> None:
        async with serving(settings, SERVICE, build):
            await stopping.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(serve())
        yield f"127.0.0.1:{settings.port}"
        stopping.set()


async def test_a_listed_worker_is_found_when_it_is_ready() -> None:
    """What `publishNotReadyAddresses` is for: a worker that loads is probed, and DNS is not asked again."""
    loaded, ready, addresses = asyncio.Event(), asyncio.Event(), list[str]()

    async def resolve() -> list[str]:
        if not addresses:
            raise OSError("DNS does not answer any more")
        return [addresses.pop()]

    async with loading_worker(loaded) as address:
        addresses.append(address)
        async with watching(target_watch(resolve, open_worker_channel)) as pool:
            assert pool.pick("a session") is None
            pool.on_change.append(ready.set)
            loaded.set()
            async with asyncio.timeout(10):
                await ready.wait()
            assert pool.pick("a session")
