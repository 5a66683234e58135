"""Checks of how pods start, are found, scale and end: each takes the documents and yields the problems as text."""

import functools
from collections.abc import Iterator, Sequence
from importlib import import_module

from prometheus_client import REGISTRY

from specdec.serving.settings import ProcessSettings
from tests.support.manifests import (
    PROGRAMS,
    Document,
    container_ports,
    containers,
    environment,
    gpus,
    named,
    of_kind,
    pod,
    pod_labels,
    probes,
    programs,
    read_settings,
    selects,
    title,
)

DRAIN_MARGIN_S = 10  # to close sockets and free a model after the drain
MAX_HANG_S = 120


def startup_problems(documents: Sequence[Document]) -> Iterator[str]:
    """A rollout's deadline is longer than the slowest start."""
    for workload, container, _ in programs(documents):
        startup = probes(container).get("startupProbe", {})
        allowed_s = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
        if workload["spec"].get("progressDeadlineSeconds", 600) <= allowed_s:
            yield f"{title(workload)}: a start may take {allowed_s} s, longer than progressDeadlineSeconds"


def liveness_problems(documents: Sequence[Document]) -> Iterator[str]:
    """A process that hangs is told to end within two minutes."""
    for workload, container, _ in programs(documents):
        probe = probes(container).get("livenessProbe", {})
        allowed_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
        if allowed_s > MAX_HANG_S:
            yield f"{title(workload)} livenessProbe: a process that hangs is left alone for {allowed_s} s"


def discovery_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Coordinators hear of every worker from its first moment to its last; clients of ready coordinators alone."""
    for workload, _, program in programs(documents):
        is_worker = program not in (PROGRAMS["coordinator"], PROGRAMS["gateway"])
        for service in _services_of(workload, documents):
            if service["spec"].get("publishNotReadyAddresses", False) != is_worker:
                yield f"{title(service)}: publishNotReadyAddresses should be {str(is_worker).lower()}"


def lookup_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Redis' whole name, which has no dot at its end, is asked for before any search domain."""
    for workload, _, program in programs(documents):
        if program is not PROGRAMS["coordinator"]:
            continue
        options = {each["name"]: each.get("value") for each in pod(workload).get("dnsConfig", {}).get("options", [])}
        if options.get("ndots") != "1":
            yield f"{title(workload)}: dnsConfig needs ndots 1; search domains come before whole names otherwise"


def drain_problems(documents: Sequence[Document]) -> Iterator[str]:
    """The grace period covers the wait before SIGTERM, the drain, and a margin."""
    for workload, container, program in programs(documents):
        settings = read_settings(program, environment(container, documents), [])
        waits_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        grace_s = pod(workload).get("terminationGracePeriodSeconds", 30)
        yield from _waiting_problems(workload, waits_s, documents)
        if isinstance(settings, ProcessSettings) and grace_s < waits_s + settings.drain_s + DRAIN_MARGIN_S:
            yield f"{title(workload)}: {grace_s} s of grace; preStop takes {waits_s}, the drain {settings.drain_s}"


def _waiting_problems(workload: Document, waits_s: int, documents: Sequence[Document]) -> Iterator[str]:
    balances = any(service["spec"].get("clusterIP") != "None" for service in _services_of(workload, documents))
    if balances and not waits_s:
        yield f"{title(workload)}: preStop does not wait; calls still arrive when it stops accepting them"
    if not balances and waits_s:
        yield f"{title(workload)}: preStop waits, and callers that watch its health hear of its end later"


def _services_of(workload: Document, documents: Sequence[Document]) -> list[Document]:
    labels = pod_labels(workload)
    return [
        service
        for service in of_kind(documents, "Service")
        if selects({"matchLabels": service["spec"]["selector"]}, labels)
    ]


def disruption_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Nodes can be drained, one pod at a time; a rollout never stops all pods of a service, except with GPUs."""
    budgets = {budget["metadata"]["name"]: budget["spec"] for budget in of_kind(documents, "PodDisruptionBudget")}
    for workload in of_kind(documents, "Deployment"):
        rolling = workload["spec"].get("strategy", {}).get("rollingUpdate", {})
        expected = (0, 1) if gpus(workload) else (1, 0)
        if (rolling.get("maxSurge"), rolling.get("maxUnavailable")) != expected:
            yield f"{title(workload)}: maxSurge and maxUnavailable should be {expected}"
        budget = budgets.get(workload["metadata"]["name"], {})
        if budget.get("maxUnavailable") != 1:
            yield f"{title(workload)}: has no PodDisruptionBudget with maxUnavailable 1"
        if budget.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"{title(workload)}: its pods that are not ready keep a node from being drained; say AlwaysAllow"
        if not pod(workload).get("topologySpreadConstraints"):
            yield f"{title(workload)}: its pods are not spread over nodes"


def scaling_problems(documents: Sequence[Document]) -> Iterator[str]:
    """One owner decides on a number of pods; an autoscaler follows metrics that exist, and takes pods one by one."""
    autoscalers = of_kind(documents, "HorizontalPodAutoscaler")
    scaled = [each["spec"]["scaleTargetRef"] for each in autoscalers]
    for workload in of_kind(documents, "Deployment"):
        reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": workload["metadata"]["name"]}
        owners = scaled.count(reference) + ("replicas" in workload["spec"])
        if owners != 1:
            yield f"{title(workload)}: {owners} of an autoscaler and `replicas` decide on its number of pods"
    for autoscaler in autoscalers:
        yield from (f"{title(autoscaler)}: {problem}" for problem in _autoscaler_problems(autoscaler, documents))


def _autoscaler_problems(autoscaler: Document, documents: Sequence[Document]) -> Iterator[str]:
    spec = autoscaler["spec"]
    try:
        workload = named(documents, spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
    except KeyError as error:
        yield f"there is no {error.args[0]}"
        return
    if not 1 <= spec.get("minReplicas", 1) < spec["maxReplicas"]:
        yield f"scales from {spec.get('minReplicas')} to {spec['maxReplicas']}"
    for metric in spec["metrics"]:
        name = metric.get("pods", {}).get("metric", {}).get("name")
        if name and name not in _metrics_of(workload):
            yield f"{name} is no metric of {title(workload)}"
        if metric["type"] == "Pods" and "metrics" not in container_ports(containers(workload)[0]):
            yield f"{title(workload)} has no port metrics"
    down = spec.get("behavior", {}).get("scaleDown", {})
    grace_s = pod(workload).get("terminationGracePeriodSeconds", 30)
    slow = [each for each in down.get("policies", []) if each["type"] == "Pods" and each["periodSeconds"] > grace_s]
    if [each["value"] for each in slow] != [1]:
        yield "should take one pod at a time, and no other before that one has drained"


@functools.cache
def _registered() -> frozenset[str]:
    for module in PROGRAMS:
        import_module(f"{module}.metrics")
    return frozenset(metric.name for metric in REGISTRY.collect() if metric.type == "gauge")


def _metrics_of(workload: Document) -> set[str]:
    """Return the gauges that a worker exports under its own name."""
    return {name for name in _registered() if name.startswith(f"specdec_{workload['metadata']['name']}_")}


CHECKS = (
    startup_problems,
    liveness_problems,
    discovery_problems,
    lookup_problems,
    drain_problems,
    disruption_problems,
    scaling_problems,
)
