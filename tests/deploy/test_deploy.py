"""The overlays and the images are valid and agree with the programs; seeded mistakes are found."""

import copy
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.serving.server import STATUS_SERVICE
from tests.deploy.mistakes import MISTAKES, Change
from tests.deploy.mistakes.registry import container, deployment
from tests.support.apply_checks import always_patched
from tests.support.manifest_checks import problems
from tests.support.manifests import (
    KUBERNETES,
    OVERLAYS,
    PROGRAMS,
    REPOSITORY,
    Dockerfile,
    Document,
    compose,
    dockerfile,
    named,
    of_kind,
    pod,
    render,
    render_whole,
    title,
)
from tests.support.schema_checks import VERSIONS, schema_problems

COMBINATIONS = {
    "-".join((overlay, *components)).replace("/", "-"): (overlay, components)
    for overlay in ("demo", "gpu")
    for components in (
        (),
        ("tls",),
        ("autoscaling",),
        ("tls", "autoscaling"),
        ("autoscaling", "tls"),
        ("autoscaling", "monitoring"),
    )
}
PROGRAM_NAMES = ("coordinator", "draft", "target", "gateway")
IMAGES = ("coordinator", "draft", "target", "gateway", "demo-coordinator", "demo-draft", "demo-target")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Document]]:
    """Return the overlays, and every combination of one with components, with what is applied before them."""
    folder = tmp_path_factory.mktemp("kustomizations")
    composed = {name: compose(folder / name, *parts) for name, parts in COMBINATIONS.items()}
    overlays = {path.name: path for path in OVERLAYS.iterdir()}
    return {name: render_whole(path) for name, path in (composed | overlays).items()}


@pytest.fixture(params=sorted({*COMBINATIONS, *(path.name for path in OVERLAYS.iterdir())}))
def overlay(request: pytest.FixtureRequest, rendered: dict[str, list[Document]]) -> list[Document]:
    return rendered[request.param]


@pytest.mark.parametrize("version", VERSIONS)
def test_overlays_are_strictly_valid(overlay: list[Document], version: str) -> None:
    assert list(schema_problems(overlay, version)) == []


def test_overlays_agree_with_the_programs(overlay: list[Document]) -> None:
    assert problems(overlay) == []


def test_overlays_meet_the_documented_guarantees(overlay: list[Document]) -> None:
    kinds = {title(document).split("-")[0] for document in overlay}
    for name in PROGRAM_NAMES:
        assert {f"{kind}/{name}" for kind in ("Deployment", "Service", "ConfigMap", "PodDisruptionBudget")} <= kinds
    assert {"Namespace/specdec", "StatefulSet/redis", "Service/redis", "NetworkPolicy/default"} <= kinds


def test_the_base_is_strictly_valid() -> None:
    base = render(KUBERNETES / "base")
    assert [problem for version in VERSIONS for problem in schema_problems(base, version)] == []
    assert not any("replicas" in each["spec"] for each in of_kind(base, "Deployment"))


@pytest.mark.parametrize("name", sorted(path.name for path in OVERLAYS.iterdir()))
def test_deleting_an_overlay_keeps_data(name: str) -> None:
    documents = render(OVERLAYS / name)
    assert of_kind(documents, "Namespace", "PersistentVolumeClaim", "PersistentVolume") == []
    retained = {"whenDeleted": "Retain", "whenScaled": "Retain"}
    assert named(documents, "StatefulSet", "redis")["spec"]["persistentVolumeClaimRetentionPolicy"] == retained


def test_kubectl_sends_budgets_alone_without_a_change(overlay: list[Document]) -> None:
    assert {name.split("/")[0] for name in always_patched(overlay)} == {"PodDisruptionBudget"}


def test_services_are_named_as_in_the_protos() -> None:
    defined = set()
    for path in (REPOSITORY / "protos").rglob("*.proto"):
        (package,) = re.findall(r"^package ([\w.]+);", path.read_text(), re.M)
        defined |= {f"{package}.{name}" for name in re.findall(r"^service (\w+)", path.read_text(), re.M)}
    assert {program.service for program in PROGRAMS.values() if program.service} == defined - {STATUS_SERVICE}, (
        "all of them serve that"
    )


def test_missing_kubectl_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(AssertionError, match="kubectl is not on PATH; install it"):
        render(OVERLAYS / "demo")


@pytest.mark.parametrize(
    ("overlay_name", "change", "expected"),
    [pytest.param(overlay, change, expected, id=name) for name, overlay, change, expected in MISTAKES],
)
def test_seeded_mistakes_are_found(
    rendered: dict[str, list[Document]], overlay_name: str, change: Change, expected: str
) -> None:
    documents = copy.deepcopy(rendered[overlay_name])
    change(documents)
    assert any(expected in problem for problem in problems(documents)), problems(documents)


# The Dockerfile, as far as reading it shows; test_image.py executes it.
def dockerfile_problems(file: Dockerfile) -> Iterator[str]:
    """Images run our programs as a user without rights; only workers have torch."""
    for name in IMAGES:
        if name not in file.stages:
            yield f"{name}: there is no such stage"
            continue
        yield from (f"{name}: {problem}" for problem in _image_problems(file, name))
    for stage in file.stages.values():
        if stage.base not in {*file.stages, "${PYTHON_IMAGE}"}:
            yield f"the base {stage.base} cannot be pinned from outside"


def _image_problems(file: Dockerfile, name: str) -> Iterator[str]:
    instructions = [rest for stage in file.built_from(name) for _, rest in file.stages[stage].instructions]
    if any("torch" in rest or "[models]" in rest for rest in instructions) == name.endswith(("coordinator", "gateway")):
        yield "torch belongs in workers, and nowhere else"
    if file.last(name, "USER") != "10001:10001":
        yield f"runs as {file.last(name, 'USER') or 'root'}"
    if file.entrypoint(name)[:2] != ["python", "-m"] or file.entrypoint(name)[2] not in PROGRAMS:
        yield f"runs {file.entrypoint(name)}"
    if {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}.items() - file.environment(name).items():
        yield "is buffered, or may fetch models when it starts"


def test_images_are_sound() -> None:
    assert sorted(set(dockerfile_problems(dockerfile()))) == []


def test_images_hold_every_package() -> None:
    settings: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {pattern.rstrip("*") for pattern in settings["packages"]["find"]["include"]}
    copied = {source for sources, _ in dockerfile().copies("wheel") for source in sources}
    assert packages <= copied


def test_overlays_run_this_version(overlay: list[Document]) -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    for name in PROGRAM_NAMES:
        assert container(overlay, name)["image"].split(":")[1].removesuffix("-cuda") == version
    assert f'image.version="{version}"' in dockerfile().last("runtime", "LABEL")


def test_images_run_as_the_manifests_say(overlay: list[Document]) -> None:
    for name in PROGRAM_NAMES:
        context = pod(deployment(overlay, name))["securityContext"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == dockerfile().last(name, "USER")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('[server,embedded,tracing,gateway]"', '[models]"', "demo-coordinator: torch belongs in workers"),
        ("USER 10001:10001", "USER root", "draft: runs as root"),
        ('"-m", "target_service"', '"-m", "target"', "target: runs ['python', '-m', 'target']"),
        ("HF_HUB_OFFLINE=1", "HF_HUB_OFFLINE=0", "may fetch models"),
        ("AS demo-draft", "AS draft-demo", "demo-draft: there is no such stage"),
        ("FROM ${PYTHON_IMAGE} AS runtime", "FROM python:latest AS runtime", "python:latest cannot be pinned"),
    ],
)
def test_mistakes_in_the_dockerfile_are_found(old: str, new: str, expected: str) -> None:
    text = (REPOSITORY / "deploy/Dockerfile").read_text()
    assert old in text
    found = list(dockerfile_problems(Dockerfile(text.replace(old, new))))
    assert any(expected in problem for problem in found), found
