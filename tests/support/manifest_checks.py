"""Checks of rendered manifests: each takes the documents and yields the problems as text.

Expected values are read, not repeated here: settings come from specdec.serving.settings, entry points and folders from
deploy/Dockerfile, commands of the store from coordinator/*.lua.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support import lifecycle_checks, protection_checks
from tests.support.apply_checks import apply_problems
from tests.support.manifests import (
    PROGRAMS,
    Document,
    command,
    container_ports,
    containers,
    dockerfile,
    environment,
    gpus,
    has_main,
    has_own_redis,
    max_pods,
    mounted_files,
    named,
    of_kind,
    pod,
    pod_labels,
    probes,
    programs,
    quantity,
    read_settings,
    selects,
    stage_of,
    title,
    workloads,
)
from tests.support.network_policies import network_problems
from tests.support.route_checks import route_problems
from tests.support.schema_checks import VERSIONS, schema_problems

PORT_NAMES = {"grpc": "SPECDEC_PORT", "http": "SPECDEC_PORT", "metrics": "SPECDEC_METRICS_PORT"}
HTTP_PATHS = {"startupProbe": "/healthz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}


def selector_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Selectors match the pods that they are meant for."""
    for workload in workloads(documents):
        # a job's selector is made by the API server
        if workload["kind"] != "Job" and not selects(workload["spec"]["selector"], pod_labels(workload)):
            yield f"{title(workload)}: its selector does not match its own pods"
    for document in of_kind(documents, "Service", "PodDisruptionBudget"):
        selector = document["spec"]["selector"]
        wanted = {"matchLabels": selector} if document["kind"] == "Service" else selector
        found = [w["metadata"]["name"] for w in workloads(documents) if selects(wanted, pod_labels(w))]
        if found not in _may_select(document["metadata"]["name"]):
            yield f"{title(document)}: selects the pods of {found or 'nothing'}"


def _may_select(name: str) -> tuple[list[str], ...]:
    """Return whose pods may be selected: those of the same name, and with them a canary's."""
    return [name], [name, f"{name}-canary"]


def reference_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Everything that a pod references exists, and all of it is in one namespace."""
    there = {title(document) for document in documents}
    for workload in workloads(documents):
        yield from (f"{title(workload)}: there is no {name}" for name in _named_by(workload) if name not in there)
    namespaces = {d["metadata"].get("namespace") for d in documents if d["kind"] != "Namespace"}
    declared = {document["metadata"]["name"] for document in of_kind(documents, "Namespace")}
    if namespaces != declared:
        yield f"the documents are in {namespaces}, and the declared namespace is {declared}"


def _named_by(workload: Document) -> Iterator[str]:
    yield f"ServiceAccount/{pod(workload).get('serviceAccountName', 'default')}"
    for container in containers(workload):
        yield from (f"ConfigMap/{source['configMapRef']['name']}" for source in container.get("envFrom", []))
    for volume in pod(workload).get("volumes", []):
        if "configMap" in volume:
            yield f"ConfigMap/{volume['configMap']['name']}"
        if "persistentVolumeClaim" in volume:
            yield f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}"


def mount_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Every mount has its volume, and every volume is mounted."""
    for workload in workloads(documents):
        claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])]
        volumes = {*claims, *(volume["name"] for volume in pod(workload).get("volumes", []))}
        mounts = {mount["name"] for container in containers(workload) for mount in container.get("volumeMounts", [])}
        if volumes != mounts:
            yield f"{title(workload)}: volumes {sorted(volumes)}, mounts {sorted(mounts)}"


def port_problems(documents: Sequence[Document]) -> Iterator[str]:
    """A port is one number: to the program, the container, the probes and the Service."""
    for workload in workloads(documents):
        for container in containers(workload):
            yield from _probe_port_problems(workload, container)
            yield from _service_port_problems(workload, container, documents)
    for workload, container, program in programs(documents):
        wanted = ("grpc" if program.service else "http", "metrics")
        variables = environment(container, documents)
        yield from _listening_problems(workload, container, wanted, variables)
        yield from _probe_encryption_problems(workload, container, variables)


def _probe_port_problems(workload: Document, container: Document) -> Iterator[str]:
    for kind, probe in probes(container).items():
        for action in (probe[key] for key in ("grpc", "tcpSocket", "httpGet") if key in probe):
            if action["port"] not in container_ports(container).values():
                yield f"{title(workload)} {kind}: port {action['port']} is not the container's"


def _service_port_problems(workload: Document, container: Document, documents: Sequence[Document]) -> Iterator[str]:
    for service in of_kind(documents, "Service"):
        if not selects({"matchLabels": service["spec"]["selector"]}, pod_labels(workload)):
            continue
        for port in service["spec"]["ports"]:
            if port.get("targetPort") != container_ports(container).get(port["name"]):
                yield f"{title(service)}: targetPort {port.get('targetPort')} is not the pods' {port['name']}"
            if service["spec"].get("clusterIP") == "None" and port["port"] != port["targetPort"]:
                yield f"{title(service)}: is headless, so its port must be the pods'"


def _listening_problems(
    workload: Document, container: Document, wanted: Sequence[str], variables: Mapping[str, str]
) -> Iterator[str]:
    ports = container_ports(container)
    exposed = dockerfile().last(stage_of(container), "EXPOSE").split()
    for name, variable in ((name, PORT_NAMES[name]) for name in wanted):
        if str(ports.get(name)) != variables.get(variable):
            yield f"{title(workload)}: port {name} is {ports.get(name)}, and {variable} is {variables.get(variable)}"
        if str(ports.get(name)) not in exposed:
            yield f"{title(workload)}: port {name} is {ports.get(name)}, and its image exposes {exposed}"
    annotations = workload["spec"]["template"]["metadata"].get("annotations", {})
    if annotations.get("prometheus.io/port") != variables.get("SPECDEC_METRICS_PORT"):
        yield f"{title(workload)}: Prometheus is sent to another port than SPECDEC_METRICS_PORT"


def _probe_encryption_problems(workload: Document, container: Document, variables: Mapping[str, str]) -> Iterator[str]:
    has_tls = "SPECDEC_TLS_CERTIFICATE" in variables
    probed = {probe["grpc"]["port"] for probe in probes(container).values() if "grpc" in probe}
    if has_tls and probed and probed != {int(variables.get("SPECDEC_HEALTH_PORT", 0))}:
        yield f"{title(workload)}: probes have no certificate, and do not ask SPECDEC_HEALTH_PORT"
    schemes = {probe["httpGet"].get("scheme", "HTTP") for probe in probes(container).values() if "httpGet" in probe}
    if schemes - {"HTTPS" if has_tls else "HTTP"}:
        yield f"{title(workload)}: probes ask by {sorted(schemes)}, {'with' if has_tls else 'without'} a certificate"


def probe_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Readiness probes the service, liveness the process; the service is one that protos/ defines."""
    for workload, container, program in programs(documents):
        probed = {kind: probe.get("grpc", {}).get("service", "") for kind, probe in probes(container).items()}
        if probed.keys() != {"startupProbe", "readinessProbe", "livenessProbe"}:
            yield f"{title(workload)}: has only the probes {sorted(probed)}"
        if not program.service:
            paths = {kind: probe.get("httpGet", {}).get("path") for kind, probe in probes(container).items()}
            yield from (
                f"{title(workload)} {kind}: asks {paths[kind]}" for kind in paths if paths[kind] != HTTP_PATHS[kind]
            )
        if probed.get("readinessProbe") != program.service:
            yield f"{title(workload)} readinessProbe: asks for {probed.get('readinessProbe')}, not {program.service}"
        if probed.get("startupProbe") not in ("", program.service):
            yield f"{title(workload)} startupProbe: asks for {probed.get('startupProbe')}, not {program.service}"
        if probed.get("livenessProbe"):
            yield f"{title(workload)} livenessProbe: a worker that drains must not be killed; ask for the process"


def settings_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Every program accepts its variables and arguments."""
    for workload, container, program in programs(documents):
        given = dockerfile().environment(stage_of(container)) | environment(container, documents)
        settings = read_settings(program, given, command(container)[3:])
        if isinstance(settings, str):
            yield f"{title(workload)}: {settings}"
        elif settings.host not in ("0.0.0.0", "[::]"):
            yield f"{title(workload)}: listens on {settings.host}, where nobody can reach it"


def image_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Every image has a version; ours are stages of the Dockerfile, whose entry points exist."""
    for workload in workloads(documents):
        for container in containers(workload):
            stage = stage_of(container)
            if not re.search(r":[\d.]+[\w.-]*$|@sha256:", container["image"]):
                yield f"{title(workload)}: the image {container['image']} has no version"
            if "specdec" in container["image"] and stage not in dockerfile().stages:
                yield f"{title(workload)}: deploy/Dockerfile has no stage {stage!r}"
            elif stage and not (has_main(container) or _runs_mounted_script(workload, container, documents)):
                yield f"{title(workload)}: {command(container)} is none of our programs"


def _runs_mounted_script(workload: Document, container: Document, documents: Sequence[Document]) -> bool:
    """Return whether a container runs a script that a ConfigMap brings."""
    words = command(container)
    return words[0] == "python" and words[1] in mounted_files(workload, container, documents)


def model_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Folders of models are in the image or in a volume; an image that may not fetch needs them to be folders."""
    for workload, container, _ in programs(documents):
        mounts = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        copied = [destination for _, destination in dockerfile().copies(stage_of(container))]
        variables = environment(container, documents)
        for name in ("SPECDEC_MODEL", "SPECDEC_TOKENIZER"):
            folder = variables.get(name)
            if folder and not any(Path(folder).is_relative_to(place) for place in (*mounts, *copied)):
                yield f"{title(workload)}: {name} is {folder}, which is neither in the image nor in a volume"


def address_problems(documents: Sequence[Document]) -> Iterator[str]:
    """The coordinator's addresses are Services of these manifests; workers by the headless name and the pods' port."""
    for workload, container, program in programs(documents):
        if program is not PROGRAMS["coordinator"]:
            continue
        variables = environment(container, documents)
        ours = [("target", "SPECDEC_TARGET"), ("draft", "SPECDEC_DRAFT")]
        if has_own_redis(documents):
            ours.append(("redis", "SPECDEC_STORE"))
        elif not variables.get("SPECDEC_STORE", "").startswith(("rediss://", "rediss+")):
            yield f"{title(workload)}: a Redis that is elsewhere is asked in plain text"
        for name, variable in ours:
            if variables.get(variable, "").partition("?")[0] not in _addresses(named(documents, "Service", name)):
                yield f"{title(workload)}: {variable} is {variables.get(variable)}, not Service/{name}"
        if max_pods(workload, documents) > 1 and variables.get("SPECDEC_STORE", "embedded") == "embedded":
            yield f"{title(workload)}: several coordinators need one store"


def gateway_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Gateways ask the coordinators' Service, with TLS where that has a certificate."""
    for workload, container, program in programs(documents):
        if program is not PROGRAMS["gateway"]:
            continue
        service, variables = named(documents, "Service", "coordinator"), environment(container, documents)
        host = f"coordinator.{service['metadata']['namespace']}.svc.cluster.local"
        expected = f"dns:///{host}.:{service['spec']['ports'][0]['port']}"
        if variables.get("SPECDEC_COORDINATOR") != expected:
            yield f"{title(workload)}: SPECDEC_COORDINATOR is {variables.get('SPECDEC_COORDINATOR')}, not {expected}"
        coordinator = containers(named(documents, "Deployment", "coordinator"))[0]
        is_encrypted = "SPECDEC_TLS_CERTIFICATE" in environment(coordinator, documents)
        if is_encrypted != ("SPECDEC_COORDINATOR_TLS_CA" in variables):
            yield f"{title(workload)}: the coordinators' TLS is {is_encrypted}, and the gateway disagrees"


def _addresses(service: Document) -> list[str]:
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc.cluster.local"
    port = service["spec"]["ports"][0]["port"]
    if service["spec"].get("clusterIP") == "None":
        return [f"dns:///{host}.:{port}"]
    return [f"{scheme}://{host}:{port}/0" for scheme in ("redis", "rediss")]


def gpu_problems(documents: Sequence[Document]) -> Iterator[str]:
    """GPUs are in limits only, come with the toleration and with SPECDEC_DEVICE=cuda; without, no cuda."""
    for workload in workloads(documents):
        if any("nvidia.com/gpu" in container["resources"].get("requests", {}) for container in containers(workload)):
            yield f"{title(workload)}: nvidia.com/gpu belongs in limits only"
        tolerated = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        if gpus(workload) and tolerated not in pod(workload).get("tolerations", []):
            yield f"{title(workload)}: does not tolerate the taint of GPU nodes"
    for workload, container, program in programs(documents):
        device = environment(container, documents).get("SPECDEC_DEVICE", "cpu")
        if (device == "cuda") != bool(gpus(workload)) and "device" in program.settings.model_fields:
            yield f"{title(workload)}: SPECDEC_DEVICE is {device}, and it has {gpus(workload)} GPUs"


def resource_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Requests and limits are set, and the program's settings fit into them."""
    for workload in workloads(documents):
        for container in containers(workload):
            resources = container.get("resources", {})
            if not all({"cpu", "memory"} <= resources.get(part, {}).keys() for part in ("requests", "limits")):
                yield f"{title(workload)}: cpu and memory need requests and limits"
    for workload, container, program in programs(documents):
        settings = read_settings(program, environment(container, documents), [])
        if getattr(settings, "num_threads", 1) > _limit(container, "cpu"):
            yield f"{title(workload)}: more threads than processors"
        if not gpus(workload) and 2 * getattr(settings, "kv_cache_bytes", 0) > _limit(container, "memory"):
            yield f"{title(workload)}: the KV cache fills the memory"


def _limit(container: Document, resource: str) -> float:
    return quantity(container.get("resources", {}).get("limits", {}).get(resource, "inf"))


CHECKS = (
    *lifecycle_checks.CHECKS,
    apply_problems,
    selector_problems,
    reference_problems,
    mount_problems,
    port_problems,
    probe_problems,
    settings_problems,
    image_problems,
    model_problems,
    address_problems,
    gateway_problems,
    gpu_problems,
    resource_problems,
    network_problems,
    route_problems,
    *protection_checks.CHECKS,
)


def problems(documents: Sequence[Document]) -> list[str]:
    """Return all problems of the documents; schema problems alone if there are any."""
    found = [problem for version in VERSIONS for problem in schema_problems(documents, version)]
    return found or [problem for check in CHECKS for problem in check(documents)]
