"""Metrics that documents, alerts and autoscalers name are exported by running services; all of these are documented.

`specdec watch` and `specdec trace` are run against the same processes.
"""

import asyncio
import json
import re
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from specdec import AsyncClient
from tests.support.command_line import start
from tests.support.measured_services import Services, measured_services
from tests.support.ports import free_ports
from tests.support.running_up import children_of, is_alive

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
NAMING = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("deploy/**/*.yaml"), *ROOT.glob("deploy/**/*.json")]
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum", "")}
NOT_METRICS = {"specdec_demo", "specdec_", "specdec_pb2"}
PATTERNS = {"specdec_draft_", "specdec_target_"}  # in texts: "the same of `specdec_draft_...`"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    async with measured_services(tmp_path_factory.mktemp("model")) as running:
        async with AsyncClient(running.address) as client:
            await client.complete("t5 t7", max_new_tokens=32, ignore_eos=True)
        yield running


def exported(services: Services) -> dict[str, str]:
    """Return the metrics of all processes, as Prometheus reads them: their names without an ending, and kinds."""
    kinds: dict[str, str] = {}
    for port in services.metrics_ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        kinds |= dict(re.findall(r"^# TYPE (specdec_\w+) (counter|gauge|histogram)$", text, re.M))
    return {name: kind for name, kind in kinds.items() if not name.endswith("_created")}


def sampled(kinds: dict[str, str]) -> set[str]:
    """Return the names that an expression may use."""
    return {name.removesuffix("_total") + ending for name, kind in kinds.items() for ending in ENDINGS[kind]}


def named() -> Iterator[tuple[str, str]]:
    for file in NAMING:
        for name in re.findall(r"\bspecdec_\w+", file.read_text()):
            if name not in NOT_METRICS | PATTERNS:
                yield file.name, name


async def test_what_is_named_is_exported(services: Services) -> None:
    known = sampled(await asyncio.to_thread(exported, services))
    found = set(named())
    assert len(found) > 40
    assert sorted((file, name) for file, name in found if name not in known) == []


async def test_what_is_exported_is_documented(services: Services) -> None:
    kinds = await asyncio.to_thread(exported, services)
    text = (ROOT / "docs/operate.md").read_text()
    documented = set(re.findall(r"\bspecdec_\w+", text))
    documented |= {name.replace("specdec_target_", "specdec_draft_") for name in documented}
    assert len(kinds) > 30
    assert sorted(name for name in kinds if name not in documented) == []


async def command(*words: str) -> tuple[int | None, str, str]:
    """Run the command; return its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specdec", *words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def page_of(*words: str) -> str:
    """Return what `specdec watch` prints."""
    code, out, err = await command("watch", *words)
    assert (code, err) == (0, "")
    return out


async def test_watch_prints_one_page(services: Services) -> None:
    out = await page_of(services.address, "--once")
    states = {line.split()[0]: line for line in out.splitlines() if line.startswith(("target ", "draft "))}
    assert set(states) == {"target", "draft"}
    assert all("in service" in line for line in states.values())
    assert re.search(r"^model\b", out, re.M), "the drafter that worked is missing"


async def test_watch_prints_json_where_it_is_no_terminal(services: Services) -> None:
    seen = json.loads(await page_of("--address", services.address, "--json"))
    states = {worker["kind"]: worker["state"] for worker in seen["workers"]}
    assert states == {"target": "in_service", "draft": "in_service"}


async def test_a_server_that_is_not_there_gives_one_sentence() -> None:
    port = free_ports(1)
    code, out, err = await command("watch", f"127.0.0.1:{port}", "--once")
    assert (code, out) == (1, "")
    assert err.startswith(f"specdec: no specdec answers on 127.0.0.1:{port}")
    assert len(err.splitlines()) == 1


async def test_a_port_of_metrics_gives_one_sentence(services: Services) -> None:
    code, out, err = await command("watch", f"127.0.0.1:{services.metrics_ports[0]}", "--once")
    assert (code, out) == (1, "")
    assert err.startswith(f"specdec: no specdec answers on 127.0.0.1:{services.metrics_ports[0]}")
    assert len(err.splitlines()) == 1


@pytest.mark.long
async def test_trace_says_that_no_spans_came(
    services: Services, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_ports(1)
    words = ["trace", "t5", "--address", services.address, "--listen", f"127.0.0.1:{port}"]
    code, out, err = await command(*words, "--output", str(tmp_path / "trace.json"))
    assert (code, out) == (1, "")
    assert f"start its services with --otlp-endpoint http://127.0.0.1:{port}" in err
    assert len(err.splitlines()) == 1


@pytest.mark.long
async def test_trace_of_services_that_it_starts(services: Services, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    models = ["--target", str(services.model), "--draft", str(services.model)]
    code, out, err = await command(
        "trace", "t5 t7", *models, "--output", str(file), "--max-new-tokens", "24", "--ignore-eos", "--drafter", "model"
    )
    assert (code, err) == (0, ""), out
    assert "incomplete" not in out
    phases = [line.split()[0] for line in out.splitlines()[1:] if line and line.split()[-1].isdigit()]
    assert {"propose", "score", "accept", "commit", "round", "forwards", "tax"} <= set(phases)
    events = json.loads(file.read_text())["traceEvents"]
    names = {each["args"]["name"] for each in events if each["ph"] == "M"}
    assert names == {"client", "specdec-coordinator", "specdec-target", "specdec-draft"}
    assert min(each["dur"] for each in events if each["ph"] == "X") >= 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_services_of_a_trace_end_with_it(services: Services, number: signal.Signals) -> None:
    tracing = await start("trace", "t5", "--target", str(services.model), "--draft", "none")
    async with asyncio.timeout(60.0):
        while not (started := children_of(tracing.pid)):  # noqa: ASYNC110  # a process sends no events
            await asyncio.sleep(0.02)
        tracing.send_signal(number)
        await tracing.communicate()
        while any(map(is_alive, started)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
