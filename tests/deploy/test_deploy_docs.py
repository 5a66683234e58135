"""docs/deploy.md: its paths exist, and its example of a platform's own kustomization is valid."""

import os
import re
from pathlib import Path

import pytest
import yaml

from tests.support.manifest_checks import problems
from tests.support.manifests import REPOSITORY, Document, containers, environment, named, pod, render_whole

TEXT = (REPOSITORY / "docs/deploy.md").read_text()
(EXAMPLE,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    folder = tmp_path_factory.mktemp("platform")
    (folder / "kustomization.yaml").write_text(
        EXAMPLE.replace("deploy/kubernetes", os.path.relpath(REPOSITORY / "deploy/kubernetes", folder))
    )
    return render_whole(folder)


def test_paths_in_the_text_exist() -> None:
    paths = re.findall(r"deploy/(?:kubernetes|Dockerfile)[\w/.-]*", TEXT)
    assert len(set(paths)) >= 8
    assert [path for path in paths if not (REPOSITORY / path.rstrip(".")).exists()] == []


def test_the_platforms_example_is_valid(example: list[Document]) -> None:
    assert problems(example) == []


def test_the_platforms_example_has_its_effects(example: list[Document]) -> None:
    target = named(example, "Deployment", "target")
    (container,) = containers(target)
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 40 * 60
    assert environment(container, example)["SPECDEC_DRAIN_S"] == "300"
    assert pod(target)["priorityClassName"] == "specdec"
    spread = {each["topologyKey"] for each in pod(target)["topologySpreadConstraints"]}
    assert spread == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}


def test_documented_metrics_are_those_of_the_autoscalers() -> None:
    (rules,) = re.findall(r"```yaml\n(rules:.*?)```", TEXT, re.DOTALL)
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', yaml.safe_load(rules)["rules"]["custom"][0]["seriesQuery"])
    folder: Path = REPOSITORY / "deploy/kubernetes/components/autoscaling"
    followed = {name for file in folder.glob("*.yaml") for name in re.findall(r"name: (specdec_\w+)", file.read_text())}
    assert len(followed) == 4
    assert all(re.fullmatch(pattern, name) for name in followed)
