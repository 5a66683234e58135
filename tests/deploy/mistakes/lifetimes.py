"""Pods that start, end, are balanced or are scaled when they should not."""

from tests.deploy.mistakes.registry import container, deployment, mistake, variables
from tests.support.manifests import (
    Document,
    named,
    pod,
)


@mistake("demo", "45 s of grace; preStop takes 0, the drain 60.0")
def drain_longer_than_the_grace(documents: list[Document]) -> None:
    variables(documents, "target")["SPECDEC_DRAIN_S"] = "60"


@mistake("demo", "Deployment/coordinator: preStop does not wait")
def calls_after_the_end(documents: list[Document]) -> None:
    del container(documents, "coordinator")["lifecycle"]


@mistake("demo", "Deployment/target: preStop waits, and callers that watch its health hear of its end later")
def worker_that_ends_late(documents: list[Document]) -> None:
    container(documents, "target")["lifecycle"] = {"preStop": {"sleep": {"seconds": 5}}}


@mistake("demo", "Service/target: publishNotReadyAddresses should be true")
def workers_that_are_found_late(documents: list[Document]) -> None:
    del named(documents, "Service", "target")["spec"]["publishNotReadyAddresses"]


@mistake("demo", "Service/coordinator: publishNotReadyAddresses should be false")
def clients_sent_to_coordinators_that_start(documents: list[Document]) -> None:
    named(documents, "Service", "coordinator")["spec"]["publishNotReadyAddresses"] = True


@mistake("demo", "Deployment/coordinator: dnsConfig needs ndots 1")
def names_looked_up_in_every_domain(documents: list[Document]) -> None:
    del pod(deployment(documents, "coordinator"))["dnsConfig"]


@mistake("demo", "Deployment/draft: its pods that are not ready keep a node from being drained")
def node_that_cannot_be_drained(documents: list[Document]) -> None:
    del named(documents, "PodDisruptionBudget", "draft")["spec"]["unhealthyPodEvictionPolicy"]


@mistake("demo", "Deployment/target livenessProbe: a process that hangs is left alone for 600 s")
def liveness_that_never_ends_a_hanging_process(documents: list[Document]) -> None:
    container(documents, "target")["livenessProbe"]["failureThreshold"] = 60


@mistake("demo-autoscaling", "Deployment/draft: 2 of an autoscaler and `replicas` decide")
def two_owners_of_a_number(documents: list[Document]) -> None:
    deployment(documents, "draft")["spec"]["replicas"] = 2


@mistake("demo", "Deployment/draft: 0 of an autoscaler and `replicas` decide")
def number_that_nobody_decides(documents: list[Document]) -> None:
    del deployment(documents, "draft")["spec"]["replicas"]


def autoscaler(documents: list[Document], name: str) -> Document:
    spec: Document = named(documents, "HorizontalPodAutoscaler", name)["spec"]
    return spec


@mistake("gpu-autoscaling", "HorizontalPodAutoscaler/target: specdec_target_queue_depth is no metric of")
def metric_that_nobody_exports(documents: list[Document]) -> None:
    autoscaler(documents, "target")["metrics"][0]["pods"]["metric"]["name"] = "specdec_target_queue_depth"


@mistake("gpu-autoscaling", "specdec_draft_num_sessions_waiting is no metric of Deployment/target")
def metric_of_another_service(documents: list[Document]) -> None:
    autoscaler(documents, "target")["metrics"] = autoscaler(documents, "draft")["metrics"]


@mistake("gpu-autoscaling", "HorizontalPodAutoscaler/draft: there is no Deployment/drafter")
def autoscaler_of_nothing(documents: list[Document]) -> None:
    autoscaler(documents, "draft")["scaleTargetRef"]["name"] = "drafter"


@mistake("gpu-autoscaling", "HorizontalPodAutoscaler/target: scales from 0 to 8")
def autoscaler_that_ends_every_worker(documents: list[Document]) -> None:
    autoscaler(documents, "target")["minReplicas"] = 0


@mistake("gpu-autoscaling", "should take one pod at a time, and no other before that one has drained")
def autoscaler_that_outruns_the_drain(documents: list[Document]) -> None:
    autoscaler(documents, "coordinator")["behavior"]["scaleDown"]["policies"][0]["periodSeconds"] = 60


@mistake("gpu-autoscaling", "metrics.0.pods.target.averageValue")
def misspelt_autoscaler(documents: list[Document]) -> None:
    autoscaler(documents, "target")["metrics"][0]["pods"]["target"]["averageValue"] = ["4"]
