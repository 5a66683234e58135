"""The generated files, and what is in them.

Kustomize cannot put a file into a field of a resource, so the PrometheusRule is a copy of alerts.yaml.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from deploy.observability.dashboard import dashboard

FOLDER = Path(__file__).parent
ALERTS = FOLDER / "alerts.yaml"
RULE_HEAD = """\
# Generated from alerts.yaml: python -m deploy.observability
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: specdec
  namespace: specdec
spec:
"""


def dashboard_text() -> str:
    """Return dashboard.json."""
    return json.dumps(dashboard(), indent=2) + "\n"


def rule_text() -> str:
    """Return the PrometheusRule: the lines of alerts.yaml without its comments, below `spec`."""
    lines = [line for line in ALERTS.read_text().splitlines() if not line.lstrip().startswith("#")]
    return RULE_HEAD + "".join(f"  {line}".rstrip() + "\n" for line in lines)


GENERATED: Mapping[Path, Callable[[], str]] = {
    FOLDER / "dashboard.json": dashboard_text,
    FOLDER / "rule.yaml": rule_text,
}
