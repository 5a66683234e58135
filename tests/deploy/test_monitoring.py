"""The component monitoring: metrics of every pod are scraped, alerts read what exists, Grafana finds its dashboard."""

import re
from collections.abc import Iterator
from importlib import import_module

import grpc
import pytest
from prometheus_client import REGISTRY

from tests.support.manifest_checks import problems
from tests.support.manifests import (
    PROGRAMS,
    REPOSITORY,
    Document,
    compose,
    container_ports,
    containers,
    named,
    of_kind,
    pod_labels,
    render_whole,
    selects,
)
from tests.support.schema_checks import VERSIONS, schema_problems

SAMPLES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    return render_whole(compose(tmp_path_factory.mktemp("monitored"), "demo-tls-autoscaling", ("monitoring",)))


def samples() -> set[str]:
    """Return the names of everything that the programs export."""
    for module in PROGRAMS:
        import_module(f"{module}.metrics")
    return {metric.name + ending for metric in REGISTRY.collect() for ending in SAMPLES.get(metric.type, ())}


def expressions(documents: list[Document]) -> Iterator[tuple[str, str]]:
    for group in named(documents, "PrometheusRule", "specdec")["spec"]["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])


def test_it_joins_other_components(documents: list[Document]) -> None:
    assert problems(documents) == []


def test_every_service_is_scraped(documents: list[Document]) -> None:
    monitor = named(documents, "PodMonitor", "specdec")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    scraped = [each for each in of_kind(documents, "Deployment") if selects(monitor["selector"], pod_labels(each))]
    assert {each["metadata"]["name"] for each in scraped} == {"coordinator", "draft", "gateway", "target"}
    assert all(endpoint["port"] in container_ports(containers(each)[0]) for each in scraped)


def test_alerts_read_metrics_that_exist(documents: list[Document]) -> None:
    known = samples()
    read = {(alert, name) for alert, text in expressions(documents) for name in re.findall(r"\bspecdec_\w+", text)}
    assert len(read) >= 8
    assert {(alert, name) for alert, name in read if name not in known} == set()


def test_alerts_name_codes_that_exist(documents: list[Document]) -> None:
    matched = [value for _, text in expressions(documents) for value in re.findall(r'code=~?"([^"]+)"', text)]
    codes = {code for value in matched for code in value.split("|")}
    assert {"DATA_LOSS", "UNAVAILABLE"} <= codes <= {code.name for code in grpc.StatusCode}


def test_the_dashboard_is_there_for_grafanas_sidecar(documents: list[Document]) -> None:
    found = named(documents, "ConfigMap", "specdec-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["data"] == {"dashboard.json": (REPOSITORY / "deploy/observability/dashboard.json").read_text()}


def test_misspelt_monitors_are_found(documents: list[Document]) -> None:
    rule = named(documents, "PrometheusRule", "specdec")["spec"]["groups"][0]["rules"][0]
    rule["expression"] = rule.pop("expr")
    assert list(schema_problems(documents, VERSIONS[0])) == [
        "PrometheusRule/specdec spec.groups[0].rules[0]: expression is no field of it",
        "PrometheusRule/specdec spec.groups[0].rules[0]: expr is missing",
    ]
    rule["expr"] = rule.pop("expression")
