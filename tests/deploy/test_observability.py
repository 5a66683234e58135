"""The dashboard and the alerts are well-formed, generated files are current, and each metric and label is exported."""

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import yaml

from deploy.observability.dashboard import dashboard
from deploy.observability.generated import ALERTS, GENERATED
from specdec.parameters import nearest_hint
from tests.support.manifests import REPOSITORY
from tests.support.observability import Expression, alert_expressions, alert_rules, panel_expressions, panels

MODULES = ("coordinator", "draft_service", "target_service", "gateway")
UNITS = {"s", "percentunit", "reqps", "ops", "cps", "short"}
TARGET_LABELS = {"namespace", "pod", "instance", "job"}  # Prometheus sets them
OTHERS = {  # exported by Prometheus, by prometheus_client and by cert-manager
    "up": set[str](),
    "process_start_time_seconds": set[str](),
    "certmanager_certificate_expiration_timestamp_seconds": {"name", "exported_namespace"},
}
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
SELECTOR = re.compile(r"\b(specdec_\w+|up|process_start_time_seconds|certmanager_\w+)\b(?:\{([^}]*)\})?")
EXPRESSIONS = [*panel_expressions(), *alert_expressions()]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Return each series that the programs export, and its labels."""
    found: dict[str, set[str]] = dict(OTHERS)
    for module in MODULES:
        for metric in metrics_of(vars(import_module(f"{module}.metrics")).values()):
            for ending in ENDINGS[metric._type]:
                labels = {*metric._labelnames, *({"le"} if ending == "_bucket" else ())}
                found[metric._name + ending] = labels
    return found


def metrics_of(values: Any) -> Iterator[Any]:
    """Yield prometheus_client's metrics among a module's values, and those that one of our objects holds."""
    for value in values:
        if hasattr(value, "_labelnames"):
            yield value
        elif type(value).__name__ == "WorkerMetrics":
            yield from metrics_of(vars(value).values())


def label_problems(expression: Expression, exported: dict[str, set[str]]) -> Iterator[str]:
    """Metrics are exported; labels that are matched, grouped by or shown are theirs or the scrape's."""
    text, known = expression.text, set(TARGET_LABELS)
    for name, matchers in SELECTOR.findall(text):
        if name not in exported:
            yield f"{expression.where}: {name} is not exported{nearest_hint(name, list(exported))}"
            continue
        known |= exported[name]
        matched = set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', matchers))
        yield from (f"{expression.where}: {name} has no label {label}" for label in matched - exported[name] - known)
    grouped = {label for names in re.findall(r"\bby \(([^)]*)\)", text) for label in re.split(r",\s*", names)}
    yield from (f"{expression.where}: there is no label {label} to group by" for label in sorted(grouped - known))
    shown = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", expression.shown))
    kept = grouped if grouped else known
    yield from (f"{expression.where}: shows the label {label}, which is not kept" for label in sorted(shown - kept))


def test_metrics_and_labels_are_exported(exported: dict[str, set[str]]) -> None:
    assert len(exported) > 60
    assert len(EXPRESSIONS) > 60
    assert [problem for each in EXPRESSIONS for problem in label_problems(each, exported)] == []


@pytest.mark.parametrize(
    ("text", "shown", "expected"),
    [
        (
            "rate(specdec_request_total[5m])",
            "",
            "specdec_request_total is not exported; the nearest is specdec_requests",
        ),
        ('rate(specdec_requests_total{status="OK"}[5m])', "", "specdec_requests_total has no label status"),
        ("sum by (drafter) (specdec_requests_total)", "", "there is no label drafter to group by"),
        ("sum by (code) (specdec_requests_total)", "{{method}}", "shows the label method, which is not kept"),
        ("rate(specdec_store_seconds_total[5m])", "", "specdec_store_seconds_total is not exported"),
    ],
)
def test_seeded_mistakes_are_found(exported: dict[str, set[str]], text: str, shown: str, expected: str) -> None:
    found = list(label_problems(Expression("here", text, shown), exported))
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_generated_files_are_current(path: Any) -> None:
    assert path.read_text() == GENERATED[path](), "run: python -m deploy.observability"


def test_the_rule_has_the_same_alerts() -> None:
    rule = yaml.safe_load((ALERTS.parent / "rule.yaml").read_text())
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())


def test_panels_are_told_apart() -> None:
    titles = [panel["title"] for panel in panels()]
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(titles)) == len(titles) > 25
    assert len(set(numbers)) == len(numbers)


def test_panels_have_units_and_descriptions() -> None:
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in panels()} == UNITS
    assert all(panel["description"].endswith(".") for panel in panels())


def test_panels_do_not_overlap() -> None:
    cells = [
        (column, line)
        for place in (panel["gridPos"] for panel in dashboard()["panels"])
        for column in range(place["x"], place["x"] + place["w"])
        for line in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) == 23


def test_panels_follow_the_chosen_source_and_namespace() -> None:
    assert [variable["name"] for variable in dashboard()["templating"]["list"]] == ["datasource", "namespace"]
    for panel in panels():
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    for each in panel_expressions():
        assert len(SELECTOR.findall(each.text)) == each.text.count('namespace=~"$namespace"'), each.where


def test_every_alert_has_what_its_reader_needs() -> None:
    headings = re.findall(r"^#+ (.*)$", (REPOSITORY / "docs/operate.md").read_text(), re.M)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    for rule in alert_rules():
        notes = rule["annotations"]
        assert notes.keys() == {"summary", "description", "runbook"}, rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning"}
        path, _, anchor = notes["runbook"].partition("#")
        assert (path, anchor) == ("docs/operate.md", rule["alert"].lower())
        assert anchor in anchors
