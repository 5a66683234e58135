"""Pods as local processes: rendered containers with their own commands, environments, ports and probes.

The replacements; nothing else is changed:

- a pod's network: a loopback address of its own, so ports stay as they are; a wildcard address becomes that address
- cluster DNS: a name server on loopback, which gRPC's addresses name, and a table for Python's own lookups
- cert-manager: Secrets with certificates for the names that rendered Certificates list
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
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.certificates import Authority
from tests.support.dns_server import dns_server
from tests.support.issuing import issued_secrets
from tests.support.manifests import (
    REPOSITORY,
    Document,
    command,
    containers,
    dockerfile,
    environment,
    min_pods,
    mounted_files,
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
    def pre_stop_s(self) -> float:
        """Return how long the kubelet waits before SIGTERM."""
        return float(self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))

    @property
    def grace_s(self) -> float:
        """Return how long the process has from SIGTERM to SIGKILL."""
        return float(pod(self.workload)["terminationGracePeriodSeconds"]) - self.pre_stop_s

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
        if "httpGet" in probe:
            return _succeeds(self.address, probe["httpGet"], timeout_s)
        if "exec" in probe:
            return self._runs(probe["exec"]["command"], timeout_s)
        return _listens(self.address, probe["tcpSocket"]["port"], timeout_s)

    def is_ready(self) -> bool:
        """Return whether the pod is ready, with the probes in the kubelet's order."""
        if "startupProbe" not in self.started and self.answers("startupProbe"):
            self.started.add("startupProbe")
        return "startupProbe" in self.started and self.answers("readinessProbe")

    def local(self, path: str) -> Path:
        """Return the place of one of the pod's paths."""
        return self.folder / "root" / path.strip("/")

    def with_local_paths(self, text: str) -> str:
        """Replace the pod's paths in a text."""
        return PATH.sub(lambda match: str(self.local(match[0])), text)

    def _runs(self, words: Sequence[str], timeout_s: float) -> bool:
        # inside the pod redis-cli's default host would do
        words = [words[0], "-h", self.address, *words[1:]] if words[0] == "redis-cli" else list(words)
        words = [self.with_local_paths(word) for word in words]
        try:
            return subprocess.run(words, capture_output=True, timeout=timeout_s, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False


class LocalCluster:
    """All pods of rendered manifests, with `models` instead of the repository's models/."""

    def __init__(self, documents: Sequence[Document], folder: Path, models: Path) -> None:
        self.documents = documents
        self._models = models
        self._hosts = folder / "hosts"
        self._running = ExitStack()
        self.authority = Authority()
        self._secrets = issued_secrets(documents, self.authority)
        # of 127.0.0.0/8, so that two test runs do not collide
        self.network = f"127.{1 + os.getpid() // 250 % 250}.{os.getpid() % 250}"
        self._folder, self._numbers = folder, count(1)
        self.pods = [
            self._new_pod(workload) for workload in workloads(documents) for _ in range(min_pods(workload, documents))
        ]
        self._dns = self._running.enter_context(dns_server(self._lookup, f"{self.network}.254"))

    def of(self, name: str) -> list[Pod]:
        """Return the pods of a workload."""
        return [each for each in self.pods if each.name == name]

    def start(self) -> None:
        """Start all pods at once, and return when all are ready. Raises AssertionError with their logs."""
        names = {name: self._lookup(name) for name in map(_name_of, of_kind(self.documents, "Service"))}
        self._hosts.write_text("".join(f"{name} {found[0]}\n" for name, found in names.items() if found))
        for each in self.pods:
            self._prepare(each)
            self._start(each)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all([each.is_ready() for each in self.pods]):
            assert time.monotonic() < deadline, "\n".join(f"--- {each.name}\n{each.log}" for each in self.pods)
            time.sleep(PAUSE_S)
            for each in self.pods:
                self._restart_if_ended(each)

    def run_job(self, name: str) -> tuple[int, str]:
        """Run a job's pod to its end; return its exit status and its log."""
        (job,) = self.of(name)
        self._hosts.touch()
        self._prepare(job)
        self._start(job)
        assert job.process
        return job.process.wait(START_TIMEOUT_S), job.log

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
        self._running.close()

    def addresses(self, service: str) -> str:
        """Return by which address gRPC finds all pods of a Service, by its name."""
        document = named(self.documents, "Service", service)
        return self._dns.of(f"{_name_of(document)}:{document['spec']['ports'][0]['targetPort']}")

    def variables(self, each: Pod) -> dict[str, str]:
        """Return the environment of a pod's process."""
        image = dockerfile().environment(stage_of(each.container))
        given = image | environment(each.container, self.documents)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        translated = {name: self._translated(each, value) for name, value in given.items()}
        imports = f"{REPOSITORY / 'tests/support/pod_names'}:{REPOSITORY}"
        return {**translated, "PATH": path, "PYTHONPATH": imports, "HOSTS_FILE": str(self._hosts)}

    def _new_pod(self, workload: Document) -> Pod:
        number = next(self._numbers)
        return Pod(workload, f"{self.network}.{number}", self._folder / f"{workload['metadata']['name']}-{number}")

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
            each.local(mount["mountPath"]).mkdir(parents=True)
            self._fill_with_secret(each, mount)
        for path, text in mounted_files(each.workload, each.container, self.documents).items():
            each.local(path).write_text(self._translated(each, text))
        for sources, destination in dockerfile().copies(stage_of(each.container)):
            self._copy(sources, each.local(destination))

    def _fill_with_secret(self, each: Pod, mount: Document) -> None:
        for volume in pod(each.workload).get("volumes", []):
            if volume["name"] == mount["name"] and "secret" in volume:
                for name, content in self._secrets[volume["secret"]["secretName"]].items():
                    (each.local(mount["mountPath"]) / name).write_bytes(content)

    def _copy(self, sources: Sequence[str], destination: Path) -> None:
        for source in sources:
            found = list(self._models.parent.glob(source.replace("models", self._models.name, 1)))
            assert found, f"{source} is not there; the demo's images need it"
            for path in found:
                target = destination if path.is_dir() else destination / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path)

    def _translated(self, each: Pod, text: str) -> str:
        """Replace paths in the pod, the cluster's name server, and wildcard addresses."""
        text = each.with_local_paths(text).replace("dns:///", self._dns.of(""))
        return text.replace("0.0.0.0", each.address).replace("bind * -::*", f"bind {each.address}")

    def _lookup(self, name: str) -> list[str] | None:
        """Return the addresses that the cluster's DNS has for a name: the pods of a Service, ready or not."""
        for service in of_kind(self.documents, "Service"):
            if name == _name_of(service):
                return [each.address for each in self._pods_of(service)]
        return None

    def _pods_of(self, service: Document) -> list[Pod]:
        selector = {"matchLabels": service["spec"]["selector"]}
        return [each for each in tuple(self.pods) if selects(selector, pod_labels(each.workload))]


def _name_of(service: Document) -> str:
    return f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc.cluster.local"


def _serving(address: str, service: str, timeout_s: float) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _succeeds(host: str, action: Document, timeout_s: float) -> bool:
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    url = f"{action['scheme'].lower()}://{host}:{action['port']}{action['path']}"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=unverified) as answer:
            return bool(answer.status < 400)
    except OSError:
        return False


def _listens(host: str, port: int, timeout_s: float) -> bool:
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True
