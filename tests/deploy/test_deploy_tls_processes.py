"""The overlay demo-tls-autoscaling as local processes: TLS on every hop, as many pods as autoscalers start with.

Certificates have the names of the rendered Certificates and no others, and every connection is by name. The tests share
one cluster, in the order of this file: the last ones end it.
"""

import asyncio
import http.client
import json
import signal
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.backoff import NoBackoff
from redis.retry import Retry

from specdec import AsyncClient, FinishReason, SamplingParams, SpeculationParams, UnavailableError
from specdec.tls import TlsFiles
from specdec.v1 import target_pb2, target_pb2_grpc
from tests.support.certificates import Authority
from tests.support.manifests import OVERLAYS, REPOSITORY, named, of_kind, probes, render
from tests.support.pods import LocalCluster, Pod

PROMPT = "import os\n\ndef main("
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
NUM_SESSIONS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    documents = render(OVERLAYS / "demo-tls-autoscaling")
    named(documents, "HorizontalPodAutoscaler", "target")["spec"]["minReplicas"] = 2  # one is ended below
    cluster = LocalCluster(documents, tmp_path_factory.mktemp("pods"), REPOSITORY / "models")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
def trust(cluster: LocalCluster, tmp_path: Path) -> TlsFiles:
    """Return what a client outside has: the authority alone."""
    (tmp_path / "ca.pem").write_bytes(cluster.authority.pem)
    return TlsFiles(tmp_path / "ca.pem")


@pytest.mark.long
def test_autoscalers_decide_on_the_number_of_pods(cluster: LocalCluster) -> None:
    numbers = {name: len(cluster.of(name)) for name in ("coordinator", "draft", "target", "redis", "gateway")}
    assert numbers == {"coordinator": 2, "draft": 1, "target": 2, "redis": 1, "gateway": 2}


@pytest.mark.long
def test_every_probe_answers_without_a_certificate(cluster: LocalCluster) -> None:
    asked = {(each.address, kind): each.answers(kind) for each in cluster.pods for kind in probes(each.container)}
    assert len(asked) == 3 * 7 + 2
    assert all(asked.values()), asked


async def test_a_text_is_generated_through_mutual_tls(cluster: LocalCluster, trust: TlsFiles) -> None:
    async with AsyncClient(cluster.addresses("coordinator"), tls=trust, timeout_s=60) as client:
        completion = await client.complete(PROMPT, sampling=GREEDY)
        plain = await client.complete(PROMPT, sampling=GREEDY, speculation=SpeculationParams(num_draft_tokens=0))
    assert completion.finish.reason is FinishReason.LENGTH
    assert completion.finish.statistics.num_accepted_tokens > 0
    assert (len(completion.tokens), completion.tokens, completion.text) == (24, plain.tokens, plain.text)


async def test_gateways_serve_https(cluster: LocalCluster, trust: TlsFiles) -> None:
    """Each of them, to clients that trust the authority and use the Service's name."""
    assert trust.ca
    for gateway in cluster.of("gateway"):
        answer = await asyncio.to_thread(completion_of, gateway, trust.ca)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 8


def completion_of(gateway: Pod, authority: str | Path) -> Any:
    """Ask one gateway for a text, under the name of its Service."""
    connection = http.client.HTTPSConnection("gateway.specdec.svc", 8000, timeout=60)
    encryption = ssl.create_default_context(cafile=str(authority))
    plain = socket.create_connection((gateway.address, 8000), 60)
    connection.sock = encryption.wrap_socket(plain, server_hostname="gateway.specdec.svc")
    content = {"model": "target", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    try:
        connection.request("POST", "/v1/completions", json.dumps(content), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        return json.loads(text)
    finally:
        connection.close()


@pytest.mark.parametrize("service", ["coordinator", "draft", "target"])
def test_plain_text_is_not_answered(cluster: LocalCluster, service: str) -> None:
    with grpc.insecure_channel(cluster.addresses(service)) as channel, pytest.raises(grpc.RpcError) as raised:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_workers_hear_the_coordinator_alone(cluster: LocalCluster) -> None:
    assert ask_target(cluster, cluster.of("coordinator")[0]) is grpc.StatusCode.OK
    assert ask_target(cluster, cluster.of("draft")[0]) is grpc.StatusCode.PERMISSION_DENIED
    assert ask_target(cluster, None) is grpc.StatusCode.UNAVAILABLE


def ask_target(cluster: LocalCluster, caller: Pod | None) -> grpc.StatusCode:
    """Ask a target worker with a pod's own certificate, or without one; return the answer's code."""
    own = [(caller.local("/tls") / name).read_bytes() for name in ("tls.key", "tls.crt")] if caller else []
    credentials = grpc.ssl_channel_credentials(cluster.authority.pem, *own)
    with grpc.secure_channel(cluster.addresses("target"), credentials) as channel:
        try:
            target_pb2_grpc.TargetServiceStub(channel).GetTarget(target_pb2.GetTargetRequest(), timeout=10)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


async def test_a_certificate_counts_for_its_name_alone(cluster: LocalCluster, trust: TlsFiles) -> None:
    by_address = f"{cluster.of('coordinator')[0].address}:50051"
    async with AsyncClient(by_address, tls=trust, timeout_s=10, max_retries=0) as client:
        with pytest.raises(UnavailableError, match="its certificate is for another name"):
            await client.complete(PROMPT, sampling=GREEDY)


async def test_another_authority_is_not_trusted(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(Authority("other").pem)
    other = TlsFiles(tmp_path / "ca.pem")
    async with AsyncClient(cluster.addresses("coordinator"), tls=other, timeout_s=10, max_retries=0) as client:
        with pytest.raises(UnavailableError, match="an authority that is not trusted here"):
            await client.complete(PROMPT, sampling=GREEDY)


def test_redis_needs_a_certificate(cluster: LocalCluster) -> None:
    (server,) = cluster.of("redis")
    without_one = {"ssl": True, "ssl_ca_data": cluster.authority.pem.decode(), "ssl_check_hostname": False}
    ways: list[dict[str, Any]] = [{}, without_one]
    for encryption in ways:
        with (
            redis.Redis(server.address, retry=Retry(NoBackoff(), 0), **encryption) as client,
            pytest.raises((redis.ConnectionError, ssl.SSLError)),
        ):
            client.ping()


def test_pods_export_what_autoscalers_follow(cluster: LocalCluster) -> None:
    followed = {
        (autoscaler["metadata"]["name"], metric["pods"]["metric"]["name"])
        for autoscaler in of_kind(cluster.documents, "HorizontalPodAutoscaler")
        for metric in autoscaler["spec"]["metrics"]
        if metric["type"] == "Pods"
    }
    assert len(followed) == 4
    for service, name in followed:
        for each in cluster.of(service):
            with urllib.request.urlopen(f"http://{each.address}:9090/metrics", timeout=10) as answer:
                assert f"\n{name} " in answer.read().decode(), each.name


def test_a_hanging_worker_fails_its_liveness(cluster: LocalCluster) -> None:
    worker = cluster.of("draft")[0]
    assert worker.process
    worker.process.send_signal(signal.SIGSTOP)
    try:
        assert not worker.answers("livenessProbe")
    finally:
        worker.process.send_signal(signal.SIGCONT)
    assert worker.answers("livenessProbe")


async def test_sessions_leave_a_worker_that_drains(cluster: LocalCluster, trust: TlsFiles) -> None:
    """A target worker is ended under load: it says so to who watches its health, and no text changes."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    async with AsyncClient(cluster.addresses("coordinator"), tls=trust, timeout_s=90) as client:
        whole = await client.complete(PROMPT, sampling=sampling)
        running = [asyncio.create_task(client.complete(PROMPT, sampling=sampling)) for _ in range(NUM_SESSIONS)]
        said, endings = await asyncio.to_thread(end_and_watch, cluster, cluster.of("target")[0])
        texts = {completion.text for completion in await asyncio.gather(*running)}
        after = await client.complete(PROMPT, sampling=sampling)
    serving = health_pb2.HealthCheckResponse
    assert said == [serving.SERVING, serving.NOT_SERVING]
    assert [status for status, _ in endings.values()] == [0]
    assert {*texts, after.text} == {whole.text}


def end_and_watch(cluster: LocalCluster, worker: Pod) -> tuple[list[int], dict[str, tuple[int, float]]]:
    """End a pod; return what it says about its health, and how it ended."""
    probe = probes(worker.container)["readinessProbe"]["grpc"]
    with grpc.insecure_channel(f"{worker.address}:{probe['port']}") as channel:
        request = health_pb2.HealthCheckRequest(service=probe["service"])
        statuses = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=60)
        said = [next(statuses).status]
        assert worker.process
        worker.process.send_signal(signal.SIGTERM)
        said.append(next(statuses).status)
    return said, cluster.stop([worker])


def test_every_pod_ends_within_its_grace(cluster: LocalCluster) -> None:
    running = [each for each in cluster.pods if each.process and each.process.poll() is None]
    assert len(running) == len(cluster.pods) - 1
    endings = cluster.stop(running)
    assert {status for status, _ in endings.values()} == {0}, endings
