"""The demo overlay's Deployments are rolled, one after another, while sessions run: no text is lost or changed.

`make rolling-update SESSIONS=100` is the full form: every Deployment, two pods of each, and the manifests' own times.
Here those that clients are connected with are rolled, with shorter waits; `tests/coordinator/test_rollout.py` replaces
workers. Both models are in float32, where a text does not depend on what is batched.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from specdec import SamplingParams, SpeculationParams
from tests.support.manifests import OVERLAYS, REPOSITORY, Document, containers, named, of_kind, render
from tests.support.rolling import Ending, RollingCluster
from tests.support.steady_load import Outcome, Request, SteadyLoad

NUM_SESSIONS = int(os.environ.get("ROLLING_UPDATE_SESSIONS", "0"))  # 0: the short form
IS_SHORT = not NUM_SESSIONS
DEPLOYMENTS = ("coordinator", "gateway") if IS_SHORT else ("draft", "target", "coordinator", "gateway")
NUM_PODS = {"draft": 1, "target": 1} if IS_SHORT else {"draft": 2, "target": 2}
SHORT_PRE_STOP_S = 2
NUM_TOKENS = 64 if IS_SHORT else 160
WAYS = (
    (SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True), SpeculationParams()),
    (
        SamplingParams(temperature=0.8, seed=7, max_new_tokens=NUM_TOKENS, ignore_eos=True),
        SpeculationParams(num_draft_tokens=0),
    ),
)
REQUESTS = tuple(
    Request(prompt, *way) for prompt, way in itertools.product(("import os\n\ndef main(", "class Queue:\n"), WAYS)
)


@dataclass(frozen=True, slots=True)
class Roll:
    """One Deployment's update, and how its old pods ended."""

    name: str
    endings: list[Ending]
    elapsed_s: float
    longest_wait_s: float  # of sessions that ended meanwhile


def overlay() -> list[Document]:
    documents = render(OVERLAYS / "demo")
    for name, count in NUM_PODS.items():
        workload = named(documents, "Deployment", name)
        workload["spec"]["replicas"] = count
        containers(workload)[0].setdefault("env", []).append({"name": "SPECDEC_DTYPE", "value": "float32"})
    for workload in of_kind(documents, "Deployment") if IS_SHORT else []:
        (container,) = containers(workload)
        if "lifecycle" in container:
            container["lifecycle"]["preStop"]["sleep"]["seconds"] = SHORT_PRE_STOP_S
    return documents


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RollingCluster]:
    cluster = RollingCluster(overlay(), tmp_path_factory.mktemp("pods"), REPOSITORY / "models")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.mark.timeout(300 if IS_SHORT else 1800)
@pytest.mark.long
async def test_rolling_updates_change_no_text(cluster: RollingCluster) -> None:
    addresses = cluster.service_address("coordinator"), cluster.service_address("gateway")
    load = SteadyLoad(*addresses, NUM_SESSIONS, at_once=4 if IS_SHORT else 8, requests=REQUESTS)
    await load.learn()
    running = asyncio.create_task(load.run())
    rolls = [await rolled(cluster, load, name) for name in DEPLOYMENTS]
    load.stop()
    await running
    print(report(load, rolls))
    assert load.verdicts.keys() == {"same"}, [each for each in load.outcomes if each.verdict != "same"]
    assert {each.way for each in load.outcomes} == {"gRPC", "HTTP"}
    for roll in rolls:
        assert all(num_running(load, ending) for ending in roll.endings), f"{roll.name}: nothing ran when a pod ended"
        assert [ending.status for ending in roll.endings] == [0] * len(cluster.of(roll.name)), roll


async def rolled(cluster: RollingCluster, load: SteadyLoad, name: str) -> Roll:
    begin_s, num_before = time.monotonic(), len(load.outcomes)
    endings = await asyncio.to_thread(cluster.roll, name)
    waits_s = [each.longest_wait_s for each in load.outcomes[num_before:]]
    return Roll(name, endings, time.monotonic() - begin_s, max(waits_s, default=0.0))


def num_running(load: SteadyLoad, ending: Ending) -> int:
    """Return how many sessions ran when a pod got SIGTERM."""
    return sum(each.ran_at(ending.begin_s) for each in load.outcomes)


def report(load: SteadyLoad, rolls: list[Roll]) -> str:
    by_way = {way: [each for each in load.outcomes if each.way == way] for way in ("gRPC", "HTTP")}
    lines = [
        f"sessions: {len(load.outcomes)}, of them {len(by_way['gRPC'])} by gRPC and {len(by_way['HTTP'])} by HTTP; "
        f"{dict(load.verdicts)}",
        f"HTTP requests that OpenAI's client repeated: {load.num_http_requests - len(by_way['HTTP'])}",
    ]
    for roll in rolls:
        ends = ", ".join(f"{each.elapsed_s:.1f} s ({num_running(load, each)} running)" for each in roll.endings)
        lines.append(
            f"{roll.name}: {roll.elapsed_s:.0f} s; old pods ended after SIGTERM in {ends}; "
            f"longest wait of a client {roll.longest_wait_s:.1f} s"
        )
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "error", "verdict"),
    [("abc", "", "same"), ("ab", "", "lost"), ("abd", "", "changed"), ("abcc", "", "changed"), ("abc", "x", "error")],
)
def test_differences_from_the_expected_text_are_found(text: str, error: str, verdict: str) -> None:
    assert Outcome("gRPC", "abc", text, error).verdict == verdict
