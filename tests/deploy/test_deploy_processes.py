"""The demo overlay's containers, run as local processes from the rendered manifests, serve generations and end in time.

`pods.py` lists the replacements. The tests share one cluster, in the order of this file: the last ones end it.
"""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from specdec import AsyncClient, Chunk, FinishReason, SamplingParams, SpeculationParams
from tests.support.manifests import OVERLAYS, REPOSITORY, probes, quantity, render
from tests.support.pods import LocalCluster, Pod

MODELS = REPOSITORY / "models"
PROMPT = "import os\n\ndef main("
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    cluster = LocalCluster(render(OVERLAYS / "demo"), tmp_path_factory.mktemp("pods"), MODELS)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


def client_of(cluster: LocalCluster, coordinator: Pod) -> AsyncClient:
    return AsyncClient(f"{coordinator.address}:{cluster.addresses('coordinator').rsplit(':', 1)[1]}", timeout_s=60)


def test_every_pod_of_the_overlay_runs(cluster: LocalCluster) -> None:
    numbers = {name: len(cluster.of(name)) for name in ("coordinator", "draft", "target", "redis", "gateway")}
    assert numbers == {"coordinator": 2, "draft": 2, "target": 1, "redis": 1, "gateway": 2}
    assert sum(numbers.values()) == len(cluster.pods)


def test_every_probe_answers(cluster: LocalCluster) -> None:
    asked = {(each.name, kind): each.answers(kind) for each in cluster.pods for kind in probes(each.container)}
    assert len(asked) == 4 * 3 + 2
    assert all(asked.values()), asked


def test_only_what_waits_for_redis_is_restarted(cluster: LocalCluster) -> None:
    assert {each.name for each in cluster.pods if each.restarts} <= {"coordinator"}


async def test_a_generation_succeeds(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.addresses("coordinator"), insecure=True, timeout_s=60) as client:
        completion = await client.complete(PROMPT, sampling=GREEDY)
        plain = await client.complete(PROMPT, sampling=GREEDY, speculation=SpeculationParams(num_draft_tokens=0))
    assert completion.finish.reason is FinishReason.LENGTH
    assert completion.finish.statistics.num_draft_tokens > 0
    assert completion.finish.statistics.num_accepted_tokens > 0
    assert plain.finish.statistics.num_draft_tokens == 0
    assert (len(completion.tokens), completion.tokens, completion.text) == (24, plain.tokens, plain.text)


async def test_coordinators_share_sessions(cluster: LocalCluster) -> None:
    first, second = cluster.of("coordinator")
    async with client_of(cluster, first) as client:
        completion = await client.complete(PROMPT, sampling=GREEDY)
    async with client_of(cluster, second) as client:
        chunks = [chunk async for chunk in client.resume(completion.session_id)]
    assert "".join(chunk.text for chunk in chunks) == completion.text


def test_metrics_are_where_prometheus_looks(cluster: LocalCluster) -> None:
    for each in cluster.pods:
        annotations = each.workload["spec"]["template"]["metadata"].get("annotations", {})
        if annotations.get("prometheus.io/scrape") == "true":
            url = f"http://{each.address}:{annotations['prometheus.io/port']}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert "specdec_" in answer.read().decode(), each.name


def test_memory_is_within_the_limits(cluster: LocalCluster) -> None:
    for each in cluster.pods:
        limit_bytes = quantity(each.container["resources"]["limits"]["memory"])
        assert each.peak_memory_bytes < limit_bytes, f"{each.name} needed {each.peak_memory_bytes >> 20} MiB"


def test_redis_allows_only_the_coordinators_commands(cluster: LocalCluster) -> None:
    (server,) = cluster.of("redis")
    with redis.Redis(server.address) as client:
        for words in (["FLUSHALL"], ["CONFIG", "GET", "*"], ["KEYS", "*"], ["GET", "other"], ["ACL", "LIST"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)


async def test_generations_survive_a_coordinators_shutdown(cluster: LocalCluster) -> None:
    """A running generation ends by itself, or continues at the other coordinator; the client's text is complete."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=120, ignore_eos=True)
    async with AsyncClient(cluster.addresses("coordinator"), insecure=True, timeout_s=60) as client:
        whole = await client.complete(PROMPT, sampling=sampling)
        async with client.generate(PROMPT, sampling=sampling) as chunks:
            text = (await anext(chunks)).text
            ending = asyncio.to_thread(cluster.stop, cluster.of("coordinator")[:1])
            (text_after, endings) = await asyncio.gather(_text(chunks), ending)
    assert text + text_after == whole.text
    assert [status for status, _ in endings.values()] == [0]


async def _text(chunks: AsyncIterator[Chunk]) -> str:
    return "".join([chunk.text async for chunk in chunks])


def test_every_pod_ends_within_its_grace(cluster: LocalCluster) -> None:
    running = [each for each in cluster.pods if each.process and each.process.poll() is None]
    assert len(running) == len(cluster.pods) - 1
    endings = cluster.stop(running)
    assert {status for status, _ in endings.values()} == {0}, endings
