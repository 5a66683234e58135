"""The expressions of the dashboard and of the alerts, and a Prometheus that runs for a test."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.observability.generated import ALERTS

DASHBOARD = ALERTS.parent / "dashboard.json"
START_TIMEOUT_S = 60.0
PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Expression:
    """A PromQL expression, where it stands, and the texts that show its labels."""

    where: str
    text: str
    shown: str
    has_exemplars: bool = False


def panels() -> list[dict[str, Any]]:
    """Return the committed dashboard's graphs."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def panel_expressions() -> list[Expression]:
    """Return what the panels ask for."""
    return [
        Expression(f"{panel['title']} {target['refId']}", target["expr"], target["legendFormat"], target["exemplar"])
        for panel in panels()
        for target in panel["targets"]
    ]


def alert_rules() -> list[dict[str, Any]]:
    """Return the rules of all groups."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def alert_expressions() -> list[Expression]:
    """Return what the alerts ask for."""
    return [Expression(rule["alert"], rule["expr"], " ".join(rule["annotations"].values())) for rule in alert_rules()]


def program(name: str) -> str:
    """Return where one of Prometheus' programs is, or skip the test."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not on PATH; install it (apt-get install prometheus) and run make alerts-check")
    return path


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer. Raises HTTPError with what it refused."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            content = json.load(answer)
        assert content["status"] == "success", content
        return content["data"]

    def series(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that an expression gives now."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def exemplars(self, name: str) -> list[dict[str, Any]]:
        """Return the exemplars of a metric's last minutes."""
        now_s = time.time()
        found = self.get("query_exemplars", query=name, start=str(now_s - 600), end=str(now_s + 1))
        return [each for series in found for each in series["exemplars"]]

    def wait_for(self, expression: str) -> None:
        """Wait until an expression gives a series."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers(expression):
            assert time.monotonic() < deadline, f"no series: {expression}"
            time.sleep(PAUSE_S)

    def _answers(self, expression: str) -> bool:
        try:
            return bool(self.series(expression))
        except OSError:  # it does not listen yet, or answers 503
            return False


@contextmanager
def running_prometheus(folder: Path, scraped_ports: Sequence[int]) -> Iterator[Prometheus]:
    """Run a Prometheus on loopback that scrapes ports every second, with the alerts; end it afterwards."""
    pods = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": "specdec", "pod": f"pod-{port}"}}
        for port in scraped_ports
    ]
    scrape = {"job_name": "specdec/specdec", "static_configs": pods}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [scrape],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    words = [
        program("prometheus"),
        "--enable-feature=exemplar-storage",
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/data",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*words, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            yield Prometheus(address)
        finally:
            process.kill()
            process.wait()
