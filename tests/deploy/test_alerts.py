"""Alerts and dashboard in a real Prometheus: rules are valid and fire in time, every expression is answered."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
import yaml

from deploy.observability.generated import ALERTS
from specdec import AsyncClient
from tests.support.measured_services import traced_services
from tests.support.observability import (
    Expression,
    Prometheus,
    alert_expressions,
    alert_rules,
    panel_expressions,
    program,
    running_prometheus,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TESTS = ALERTS.parent / "alerts_test.yaml"
# labelled counters that exist from their first event on, which a healthy service does not have; no Redis is used here
EVENTS = re.compile(r"specdec_(refusals|draft_failures|worker_\w+|store_went_back)_total|specdec_store_seconds")


def promtool(*words: str) -> str:
    """Run promtool; return what it says. Raises AssertionError."""
    done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_rules_are_valid() -> None:
    assert f"SUCCESS: {len(alert_rules())} rules found" in promtool("check", "rules", str(ALERTS))


async def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", str(TESTS))


async def test_every_alert_is_seen_to_fire_and_to_be_quiet() -> None:
    """One case an alert: at some time nothing fires, at another this alert and no other."""
    shown = []
    for case in yaml.safe_load(TESTS.read_text())["tests"]:
        labels = [[sample["labels"] for sample in each["exp_samples"]] for each in case["promql_expr_test"]]
        names = {name for some in labels for label in some for name in re.findall(r'alertname="(\w+)"', label)}
        assert [] in labels, names
        shown += sorted(names)
    assert shown == [rule["alert"] for rule in alert_rules()]


@pytest.mark.parametrize(
    ("old", "new"),
    [("> 0.02 *", "> 0.5 *"), ("for: 10m", "for: 1h"), ("== bool 2", "== bool 1"), (" offset 15m", " offset 1s")],
)
async def test_changed_alerts_fail_their_tests(tmp_path: Path, old: str, new: str) -> None:
    text = ALERTS.read_text()
    assert old in text
    (tmp_path / ALERTS.name).write_text(text.replace(old, new))
    shutil.copy(TESTS, tmp_path)
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", str(tmp_path / TESTS.name))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prometheus(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prometheus]:
    """Give a Prometheus that has scraped services after a text by gRPC and one by HTTP."""
    program("prometheus")
    async with traced_services(tmp_path_factory.mktemp("model")) as (services, _):
        async with AsyncClient(services.address) as client:
            await client.complete("t5 t7", max_new_tokens=32, ignore_eos=True)
        async with openai.AsyncOpenAI(base_url=services.http_address, api_key="none", max_retries=0) as http:
            await http.completions.create(model=services.model.name, prompt="t5 t7", max_tokens=8)
        with running_prometheus(tmp_path_factory.mktemp("prometheus"), services.metrics_ports) as running:
            await asyncio.to_thread(running.wait_for, "count_over_time(specdec_generation_tokens_total[1m]) >= 3")
            yield running


def evaluated(prometheus: Prometheus, each: Expression) -> bool:
    """Return whether an expression gives a series, with Grafana's variables filled in."""
    return bool(prometheus.series(each.text.replace("$__rate_interval", "1m").replace("$namespace", ".*")))


async def test_every_expression_is_answered(prometheus: Prometheus) -> None:
    """Panels show something where services are healthy, except those of what went wrong."""
    expressions = panel_expressions()
    seen = [await asyncio.to_thread(evaluated, prometheus, each) for each in expressions]
    empty = [each.where for each, found in zip(expressions, seen, strict=True) if not found]
    rare = [each.where for each in expressions if EVENTS.search(each.text)]
    assert [where for where in empty if where not in rare] == []
    for each in alert_expressions():
        await asyncio.to_thread(evaluated, prometheus, each)


async def test_prometheus_evaluates_every_rule(prometheus: Prometheus) -> None:
    await asyncio.to_thread(prometheus.wait_for, "prometheus_rule_evaluations_total or up")
    groups = (await asyncio.to_thread(prometheus.get, "rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(alert_rules())
    assert {rule.get("lastError", "") for rule in rules} == {""}


async def test_prometheus_keeps_the_traces_of_slow_values(prometheus: Prometheus) -> None:
    """Each panel that asks for exemplars gets some."""
    shown = {each.text for each in panel_expressions() if each.has_exemplars}
    names = {name for text in shown for name in re.findall(r"specdec_\w+_bucket", text)}
    assert len(names) >= 4
    for name in names - {"specdec_store_seconds_bucket"}:  # no Redis is used here
        kept = await asyncio.to_thread(prometheus.exemplars, name)
        assert kept, name
        assert all(re.fullmatch("[0-9a-f]{32}", each["labels"]["trace_id"]) for each in kept), name


async def test_healthy_services_raise_no_alert(prometheus: Prometheus) -> None:
    assert await asyncio.to_thread(prometheus.series, 'ALERTS{alertstate="firing"}') == []
