"""Names of Services: what gRPC asks of the cluster's DNS, and what it need not ask."""

import os
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specdec.serving.channels import open_worker_channel
from tests.support.dns_server import dns_server
from tests.support.manifests import OVERLAYS, containers, environment, named, render

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


class Worker:
    """A server that listens, as a worker does while it loads; `become_ready` is the end of that."""

    def __init__(self) -> None:
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    async def start(self) -> None:
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def become_ready(self) -> None:
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        await self._server.stop(0)


async def test_a_listed_worker_is_found_when_it_is_ready() -> None:
    """What `publishNotReadyAddresses` is for: its readiness comes over the connection, and DNS is not asked again."""
    worker = Worker()
    await worker.start()
    with dns_server(lambda name: ["127.0.0.1"] if name == NAME else None) as dns:
        async with open_worker_channel(dns.of(f"{NAME}.:{worker.port}"), SERVICE) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            metadata = (("x-session-id", "a session"),)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=10)
            num_questions = len(dns.questions)
            waiting = stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=10, wait_for_ready=True)
            await worker.become_ready()
            assert (await waiting).status == health_pb2.HealthCheckResponse.SERVING
            assert len(dns.questions) == num_questions
    await worker.stop()
