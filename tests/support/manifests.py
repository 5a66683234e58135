"""The deployment as data: rendered manifests, the Dockerfile of their images, and the program of each container."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from coordinator.settings import CoordinatorSettings
from draft_service.settings import SETTINGS as DraftSettings
from gateway.settings import GatewaySettings
from specdec.serving.settings import ProcessSettings, load
from target_service.settings import TargetSettings

REPOSITORY = Path(__file__).parents[2]
KUBERNETES = REPOSITORY / "deploy/kubernetes"
OVERLAYS, COMPONENTS = KUBERNETES / "overlays", KUBERNETES / "components"
APART = ("namespace", "models")  # what is applied before an overlay, and outlives it
UNITS = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "kb": 2**10, "mb": 2**20, "gb": 2**30}

Document = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A runnable module: its settings and the gRPC service that it offers; "": it speaks HTTP."""

    settings: type[ProcessSettings]
    service: str


PROGRAMS = {
    "coordinator": Program(CoordinatorSettings, "specdec.v1.GenerationService"),
    "draft_service": Program(DraftSettings, "specdec.v1.DraftService"),
    "target_service": Program(TargetSettings, "specdec.v1.TargetService"),
    "gateway": Program(GatewaySettings, ""),
}


def render(folder: Path) -> list[Document]:
    """Return the documents of a kustomization. Raises AssertionError with the remedy."""
    kubectl = shutil.which("kubectl")
    assert kubectl, "kubectl is not on PATH; install it: https://kubernetes.io/docs/tasks/tools (1.30 or newer)"
    result = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"kubectl kustomize {folder}: {result.stderr}"
    return list(yaml.safe_load_all(result.stdout))


def render_whole(folder: Path) -> list[Document]:
    """Return the documents of a kustomization, and of those that are applied before it."""
    return [document for each in (*(KUBERNETES / name for name in APART), folder) for document in render(each)]


def compose(folder: Path, overlay: str, components: Sequence[str]) -> Path:
    """Write a kustomization of an overlay and components, as a user would; return its folder."""
    folder.mkdir(exist_ok=True)
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(OVERLAYS / overlay, folder)],
        "components": [os.path.relpath(COMPONENTS / name, folder) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


def of_kind(documents: Sequence[Document], *kinds: str) -> list[Document]:
    """Return the documents of these kinds."""
    return [document for document in documents if document["kind"] in kinds]


def named(documents: Sequence[Document], kind: str, name: str) -> Document:
    """Return one document. Raises KeyError."""
    for document in of_kind(documents, kind):
        if document["metadata"]["name"] == name:
            return document
    raise KeyError(f"{kind}/{name}")


def title(document: Document) -> str:
    """Return kind/name."""
    return f"{document['kind']}/{document['metadata']['name']}"


def workloads(documents: Sequence[Document]) -> list[Document]:
    """Return the documents that create pods."""
    return of_kind(documents, "Deployment", "StatefulSet", "DaemonSet", "Job")


def pod(workload: Document) -> Document:
    """Return the specification of a workload's pods."""
    spec: Document = workload["spec"]["template"]["spec"]
    return spec


def pod_labels(workload: Document) -> dict[str, str]:
    """Return the labels of a workload's pods."""
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def containers(workload: Document) -> list[Document]:
    """Return all containers of a workload's pods."""
    return [*pod(workload).get("initContainers", []), *pod(workload)["containers"]]


def environment(container: Document, documents: Sequence[Document]) -> dict[str, str]:
    """Return the variables that a container gets from the manifests."""
    maps = {document["metadata"]["name"]: document.get("data", {}) for document in of_kind(documents, "ConfigMap")}
    result: dict[str, str] = {}
    for source in container.get("envFrom", []):
        result |= maps.get(source["configMapRef"]["name"], {})
    return result | {entry["name"]: entry["value"] for entry in container.get("env", []) if "value" in entry}


def mounted_files(workload: Document, container: Document, documents: Sequence[Document]) -> dict[str, str]:
    """Return the files that ConfigMaps bring into a container, by path."""
    maps = {document["metadata"]["name"]: document.get("data", {}) for document in of_kind(documents, "ConfigMap")}
    volumes = {volume["name"]: volume for volume in pod(workload).get("volumes", [])}
    return {
        f"{mount['mountPath']}/{name}": text
        for mount in container.get("volumeMounts", [])
        for name, text in maps.get(volumes.get(mount["name"], {}).get("configMap", {}).get("name"), {}).items()
    }


def min_pods(workload: Document, documents: Sequence[Document]) -> int:
    """Return how many pods a workload starts with: its own number, else its autoscaler's minimum."""
    return int(workload["spec"].get("replicas") or _autoscaled(workload, documents).get("minReplicas", 1))


def max_pods(workload: Document, documents: Sequence[Document]) -> int:
    """Return how many pods a workload may have."""
    return int(workload["spec"].get("replicas") or _autoscaled(workload, documents).get("maxReplicas", 1))


def _autoscaled(workload: Document, documents: Sequence[Document]) -> Document:
    for autoscaler in of_kind(documents, "HorizontalPodAutoscaler"):
        if autoscaler["spec"]["scaleTargetRef"]["name"] == workload["metadata"]["name"]:
            spec: Document = autoscaler["spec"]
            return spec
    return {}


def gpus(workload: Document) -> int:
    """Return how many GPUs a pod has."""
    return sum(int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) for container in containers(workload))


def container_ports(container: Document) -> dict[str, int]:
    """Return a container's ports by name."""
    return {port["name"]: port["containerPort"] for port in container.get("ports", [])}


def probes(container: Document) -> dict[str, Document]:
    """Return a container's probes by kind."""
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    return {kind: container[kind] for kind in kinds if kind in container}


def quantity(text: str) -> float:
    """Return a Kubernetes quantity, or one of redis.conf, as a number."""
    number = text.rstrip("KMGimkgb")
    return float(number) * UNITS.get(text[len(number) :], 1)


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches; an empty one matches all."""
    selector = selector or {}
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", []) if _is_in(each)
    )


def _is_in(expression: Mapping[str, Any]) -> bool:
    assert expression["operator"] == "In", f"these checks do not know the operator {expression['operator']}"
    return True


@dataclass
class Stage:
    """One stage of a Dockerfile: its base, and its instructions."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)


class Dockerfile:
    """A Dockerfile's stages, parsed as far as the checks need."""

    def __init__(self, text: str) -> None:
        self.stages: dict[str, Stage] = {}
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        stage = Stage("")
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            keyword, rest = line.split(maxsplit=1)
            if keyword == "FROM":
                base, _, name = rest.split()
                stage = self.stages[name] = Stage(base)
            stage.instructions.append((keyword, rest))

    def lineage(self, name: str) -> list[tuple[str, str]]:
        """Return the instructions that make a stage's image, its bases' first."""
        stage = self.stages.get(name)
        return [*self.lineage(stage.base), *stage.instructions] if stage else []

    def built_from(self, name: str) -> set[str]:
        """Return every stage that an image takes anything from."""
        if name not in self.stages:
            return set()
        copies = [rest for keyword, rest in self.stages[name].instructions if keyword == "COPY"]
        inputs = {self.stages[name].base, *(source for rest in copies for source in re.findall(r"--from=(\S+)", rest))}
        return {name}.union(*map(self.built_from, inputs))

    def last(self, name: str, keyword: str) -> str:
        """Return the arguments of the last such instruction of an image."""
        return next((rest for each, rest in reversed(self.lineage(name)) if each == keyword), "")

    def entrypoint(self, name: str) -> list[str]:
        """Return an image's command. Raises ValueError unless it is in exec form."""
        command: list[str] = json.loads(self.last(name, "ENTRYPOINT"))
        return command

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables that an image sets."""
        words = [word for keyword, rest in self.lineage(name) if keyword == "ENV" for word in shlex.split(rest)]
        return dict(word.split("=", 1) for word in words)

    def copies(self, name: str) -> Iterator[tuple[list[str], str]]:
        """Yield (sources in the repository, destination) of what an image copies."""
        for keyword, rest in self.lineage(name):
            if keyword == "COPY" and "--from" not in rest:
                *sources, destination = rest.split()
                yield sources, destination


def dockerfile() -> Dockerfile:
    """Return deploy/Dockerfile."""
    return Dockerfile((REPOSITORY / "deploy/Dockerfile").read_text())


def stage_of(container: Document) -> str:
    """Return the Dockerfile's stage that a container's image is built from; empty for images of others."""
    name = container["image"].rsplit("/", 1)[-1].split(":")[0]
    return name.removeprefix("specdec-") if name.startswith("specdec-") else ""


def command(container: Document) -> list[str]:
    """Return what a container runs: the manifest's command, or else its image's, and the manifest's arguments."""
    stage = stage_of(container)
    image = dockerfile().entrypoint(stage) if stage in dockerfile().stages else []
    return [*container.get("command", image), *container.get("args", [])]


def module_of(container: Document) -> str:
    """Return the module that a container runs with python -m; empty if it does not."""
    words = command(container)
    return words[2] if words[:2] == ["python", "-m"] and len(words) > 2 else ""


def has_main(container: Document) -> bool:
    """Return whether a container runs a program of this repository."""
    module = module_of(container)
    return module in PROGRAMS and (REPOSITORY / module / "__main__.py").exists()


def programs(documents: Sequence[Document]) -> Iterator[tuple[Document, Document, Program]]:
    """Yield (workload, container, program) for every container that runs one of ours."""
    for workload in workloads(documents):
        for container in containers(workload):
            if module_of(container) in PROGRAMS:
                yield workload, container, PROGRAMS[module_of(container)]


def read_settings(program: Program, variables: Mapping[str, str], arguments: list[str]) -> ProcessSettings | str:
    """Return the settings that a program reads from these, or its error message."""
    said = io.StringIO()
    with mock.patch.dict(os.environ, variables, clear=True), contextlib.redirect_stderr(said):
        try:
            return load(program.settings, "settings", arguments)
        except SystemExit:
            return said.getvalue().strip()


def has_own_redis(documents: Sequence[Document]) -> bool:
    """Return whether Redis is among the documents; else it is elsewhere."""
    return any(document["metadata"]["name"] == "redis" for document in of_kind(documents, "StatefulSet"))


def redis_configuration(documents: Sequence[Document]) -> str:
    """Return redis.conf as the pod reads it."""
    volumes = pod(named(documents, "StatefulSet", "redis"))["volumes"]
    names = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    text: str = named(documents, "ConfigMap", names[0])["data"]["redis.conf"]
    return text
