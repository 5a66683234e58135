"""Pods as local processes: rendered containers with their own commands, environments, ports and probes.

The replacements; nothing else is changed:

- a pod's network: a loopback address of its own, so ports stay as they are; a wildcard address becomes that address
- cluster DNS: a Service's name is replaced by its pods' addresses
- an image: the Dockerfile's entry point, variables and models; Python is the one that runs the tests
- a volume or writable folder: a folder
- the kubelet: start, restart, probes, SIGTERM

Linux only: elsewhere a machine has one loopback address.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.manifests import (
    REPOSITORY,
    Document,
    command,
    containers,
    dockerfile,
    environment,
    named,
    of_kind,
    pod,
    pod_labels,
    probes,
    selects,
    stage_of,
    workloads,
)

START_TIMEOUT_S = 200.0  # a limit for a hanging machine; three imports of torch take 10 s on an idle one
PAUSE_S = 0.2
MAX_RESTARTS = 5
# an absolute path: at the start of a word, or after = or a space
PATH = re.compile(r"(?<![\w.:/-])/[\w./-]+")


@dataclass
class Pod:
    """One pod, and the process that replaces its container."""

    workload: Document
    address: str
    folder: Path
    restarts: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    started: set[str] = field(default_factory=set)

    @property
    def container(self) -> Document:
        """Return the pod's one container."""
        (container,) = containers(self.workload)
        return container

    @property
    def name(self) -> str:
        return str(self.workload["metadata"]["name"])

    @property
    def grace_s(self) -> float:
        """Return how long the process has from SIGTERM to SIGKILL."""
        waits_s = self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        return float(pod(self.workload)["terminationGracePeriodSeconds"] - waits_s)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def peak_memory_bytes(self) -> int:
        """Return the process's peak resident memory."""
        assert self.process
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (peak_kb,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
        return int(peak_kb) * 1024

    def answers(self, kind: str) -> bool:
        """Return whether a probe succeeds, as the kubelet runs it; an absent probe succeeds."""
        probe = probes(self.container).get(kind)
        if probe is None:
            return True
        timeout_s = probe.get("timeoutSeconds", 1)
        if "grpc" in probe:
            return _serving(f"{self.address}:{probe['grpc']['port']}", probe["grpc"].get("service", ""), timeout_s)
        if "exec" in probe:
            return self._runs(probe["exec"]["command"], timeout_s)
        return _listens(self.address, probe["tcpSocket"]["port"], timeout_s)

    def is_ready(self) -> bool:
        """Return whether the pod is ready, with the probes in the kubelet's order."""
        if "startupProbe" not in self.started and self.answers("startupProbe"):
            self.started.add("startupProbe")
        return "startupProbe" in self.started and self.answers("readinessProbe")

    def _runs(self, words: Sequence[str], timeout_s: float) -> bool:
        # inside the pod redis-cli's default host would do
        words = [words[0], "-h", self.address, *words[1:]] if words[0] == "redis-cli" else list(words)
        return subprocess.run(words, capture_output=True, timeout=timeout_s, check=False).returncode == 0


class LocalCluster:
    """All pods of rendered manifests, with `models` instead of the repository's models/."""

    def __init__(self, documents: Sequence[Document], folder: Path, models: Path) -> None:
        self._documents = documents
        self._models = models
        # of 127.0.0.0/8, so that two test runs do not collide
        network = f"127.{1 + os.getpid() // 250 % 250}.{os.getpid() % 250}"
        numbers = count(1)
        self.pods = [
            Pod(workload, f"{network}.{number}", folder / f"{workload['metadata']['name']}-{number}")
            for workload in workloads(documents)
            for _, number in zip(range(workload["spec"]["replicas"]), numbers, strict=False)
        ]

    def of(self, name: str) -> list[Pod]:
        """Return the pods of a workload."""
        return [each for each in self.pods if each.name == name]

    def start(self) -> None:
        """Start all pods at once, and return when all are ready. Raises AssertionError with their logs."""
        for each in self.pods:
            self._prepare(each)
            self._start(each)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all([each.is_ready() for each in self.pods]):
            assert time.monotonic() < deadline, "\n".join(f"--- {each.name}\n{each.log}" for each in self.pods)
            time.sleep(PAUSE_S)
            for each in self.pods:
                self._restart_if_ended(each)

    def stop(self, pods: Sequence[Pod]) -> dict[str, tuple[int, float]]:
        """Send SIGTERM to pods; return how each ended: its exit status, and its share of the grace period."""
        begin = time.monotonic()
        for each in pods:
            assert each.process
            each.process.send_signal(signal.SIGTERM)
        endings = {}
        for each in pods:
            assert each.process
            status = each.process.wait(max(0.0, begin + each.grace_s - time.monotonic()))
            endings[f"{each.name} {each.address}"] = status, (time.monotonic() - begin) / each.grace_s
        return endings

    def kill(self) -> None:
        """Kill the remaining processes."""
        for each in self.pods:
            if each.process:
                each.process.kill()
                each.process.wait()

    def addresses(self, service: str) -> str:
        """Return the addresses that a Service's name resolves to."""
        port = named(self._documents, "Service", service)["spec"]["ports"][0]["targetPort"]
        return self._resolved(service, str(port))

    def variables(self, each: Pod) -> dict[str, str]:
        """Return the environment of a pod's process."""
        image = dockerfile().environment(stage_of(each.container))
        given = image | environment(each.container, self._documents)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        translated = {name: self._translated(each, value) for name, value in given.items()}
        return {**translated, "PATH": path, "PYTHONPATH": str(REPOSITORY)}

    def _start(self, each: Pod) -> None:
        words = [self._translated(each, word) for word in command(each.container)]
        assert shutil.which(words[0]), f"{words[0]} is not on PATH; install it (apt-get install redis-server)"
        with (each.folder / "log").open("ab") as log:
            each.process = subprocess.Popen(
                words, env=self.variables(each), cwd=each.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _restart_if_ended(self, each: Pod) -> None:
        assert each.process
        if each.process.poll() is not None:
            each.restarts += 1
            assert each.restarts <= MAX_RESTARTS, f"{each.name} does not stay up:\n{each.log}"
            self._start(each)

    def _prepare(self, each: Pod) -> None:
        """Create the pod's folders: volumes, and the models of its image."""
        for mount in each.container.get("volumeMounts", []):
            self._local(each, mount["mountPath"]).mkdir(parents=True)
            self._fill(each, mount)
        for sources, destination in dockerfile().copies(stage_of(each.container)):
            self._copy(sources, self._local(each, destination))

    def _fill(self, each: Pod, mount: Document) -> None:
        for volume in pod(each.workload).get("volumes", []):
            if volume["name"] == mount["name"] and "configMap" in volume:
                for name, text in named(self._documents, "ConfigMap", volume["configMap"]["name"])["data"].items():
                    (self._local(each, mount["mountPath"]) / name).write_text(self._translated(each, text))

    def _copy(self, sources: Sequence[str], destination: Path) -> None:
        for source in sources:
            found = list(self._models.parent.glob(source.replace("models", self._models.name, 1)))
            assert found, f"{source} is not there; the demo's images need it"
            for path in found:
                target = destination if path.is_dir() else destination / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path)

    def _local(self, each: Pod, path: str) -> Path:
        return each.folder / "root" / path.strip("/")

    def _translated(self, each: Pod, text: str) -> str:
        """Replace paths in the pod, names of Services, and wildcard addresses."""
        text = PATH.sub(lambda match: str(self._local(each, match[0])), text)
        for service in of_kind(self._documents, "Service"):
            name = service["metadata"]["name"]
            host = re.escape(f"{name}.{service['metadata']['namespace']}.svc.cluster.local")
            text = self._with_addresses(text, host, name)
        return text.replace("0.0.0.0", each.address).replace("bind * -::*", f"bind {each.address}")

    def _with_addresses(self, text: str, host: str, service: str) -> str:
        """Replace a Service's URLs and host name, which is a regular expression, by addresses of its pods."""
        text = re.sub(f"dns:///{host}:(\\d+)", lambda match: self._resolved(service, match[1]), text)
        return re.sub(host, lambda _: self._pods_of(service)[0].address, text)

    def _resolved(self, service: str, port: str) -> str:
        return "ipv4:" + ",".join(f"{each.address}:{port}" for each in self._pods_of(service))

    def _pods_of(self, service: str) -> list[Pod]:
        selector = {"matchLabels": named(self._documents, "Service", service)["spec"]["selector"]}
        return [each for each in self.pods if selects(selector, pod_labels(each.workload))]


def _serving(address: str, service: str, timeout_s: float) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _listens(host: str, port: int, timeout_s: float) -> bool:
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True
