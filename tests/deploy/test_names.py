"""Names of Services: what gRPC asks of the cluster's DNS."""

import os
import subprocess
import sys

import pytest

from tests.support.dns_server import dns_server
from tests.support.manifests import OVERLAYS, containers, environment, named, render

NAME = "target.specdec.svc.cluster.local"

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
