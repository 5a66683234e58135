"""Objects that a cluster takes otherwise than meant, pods with too few resources or too many rights, and the store."""

from tests.deploy.mistakes.registry import container, deployment, mistake, variables
from tests.support.manifests import (
    Document,
    containers,
    named,
    pod,
)


@mistake("demo", "Deployment/draft spec.strategy.type is left out, and has a default")
def strategy_without_a_type(documents: list[Document]) -> None:
    del deployment(documents, "draft")["spec"]["strategy"]["type"]


@mistake("demo", "NetworkPolicy/coordinator spec.egress[0].ports[0].protocol is left out, and has a default")
def port_without_a_protocol(documents: list[Document]) -> None:
    del named(documents, "NetworkPolicy", "coordinator")["spec"]["egress"][0]["ports"][0]["protocol"]


@mistake("demo", "StatefulSet/redis spec.volumeClaimTemplates[0].spec.volumeMode is left out, and has a default")
def claim_without_a_mode(documents: list[Document]) -> None:
    del named(documents, "StatefulSet", "redis")["spec"]["volumeClaimTemplates"][0]["spec"]["volumeMode"]


@mistake("gpu", "maxSurge and maxUnavailable should be (0, 1)")
def rollout_that_needs_a_spare_gpu(documents: list[Document]) -> None:
    deployment(documents, "target")["spec"]["strategy"]["rollingUpdate"] = {"maxSurge": 1, "maxUnavailable": 0}


@mistake("gpu", "nvidia.com/gpu belongs in limits only")
def gpu_in_requests(documents: list[Document]) -> None:
    container(documents, "target")["resources"]["requests"]["nvidia.com/gpu"] = "1"


@mistake("gpu", "does not tolerate the taint of GPU nodes")
def intolerant_gpu_pod(documents: list[Document]) -> None:
    del pod(deployment(documents, "target"))["tolerations"]


@mistake("gpu", "SPECDEC_DEVICE is cuda, and it has 0 GPUs")
def cuda_without_a_gpu(documents: list[Document]) -> None:
    del container(documents, "target")["resources"]["limits"]["nvidia.com/gpu"]


@mistake("demo", "cpu and memory need requests and limits")
def no_limits(documents: list[Document]) -> None:
    del container(documents, "target")["resources"]["limits"]["cpu"]


@mistake("demo", "the KV cache fills the memory")
def cache_larger_than_the_memory(documents: list[Document]) -> None:
    variables(documents, "target")["SPECDEC_KV_CACHE_BYTES"] = str(1 << 30)


@mistake("demo", "Deployment/target: runs as root")
def root(documents: list[Document]) -> None:
    pod(deployment(documents, "target"))["securityContext"]["runAsUser"] = 0


@mistake("demo", "enableServiceLinks must be false")
def variables_of_services(documents: list[Document]) -> None:
    del pod(deployment(documents, "coordinator"))["enableServiceLinks"]


@mistake("demo", "StatefulSet/redis: may write to its image")
def writable_image(documents: list[Document]) -> None:
    del containers(named(documents, "StatefulSet", "redis"))[0]["securityContext"]["readOnlyRootFilesystem"]


@mistake("demo", "Namespace/specdec: does not enforce Pod Security restricted")
def lenient_namespace(documents: list[Document]) -> None:
    del named(documents, "Namespace", "specdec")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]


@mistake("demo", "network: coordinator cannot reach redis at port 6379")
def closed_edge(documents: list[Document]) -> None:
    del named(documents, "NetworkPolicy", "redis")["spec"]["ingress"]


@mistake("demo", "network: draft can reach redis at port 6379")
def open_edge(documents: list[Document]) -> None:
    named(documents, "NetworkPolicy", "redis")["spec"]["ingress"][0]["from"] = [{"podSelector": {}}]
    named(documents, "NetworkPolicy", "default-deny")["spec"]["policyTypes"] = ["Ingress"]


@mistake("gpu", "network: fill-models can reach the cloud's metadata at port 443")
def filler_that_reads_the_clouds_metadata(documents: list[Document]) -> None:
    egress = named(documents, "NetworkPolicy", "fill-models")["spec"]["egress"]
    egress[0]["to"][0]["ipBlock"]["except"].remove("169.254.0.0/16")


@mistake("gpu", "network: fill-models cannot reach the internet at port 443")
def filler_without_a_way_out(documents: list[Document]) -> None:
    del named(documents, "NetworkPolicy", "fill-models")["spec"]["egress"]


@mistake(
    "gpu", "Job/fill-models: ['python', '/fill/filler.py', '/fill/models.toml', '/models'] is none of our programs"
)
def filler_without_its_script(documents: list[Document]) -> None:
    containers(named(documents, "Job", "fill-models"))[0]["command"][1] = "/fill/filler.py"


@mistake("gpu", "there is no PersistentVolumeClaim/models")
def claim_that_is_not_there(documents: list[Document]) -> None:
    documents.remove(named(documents, "PersistentVolumeClaim", "models"))


@mistake("gpu", "Job/fill-models: automountServiceAccountToken must be false")
def filler_with_a_token(documents: list[Document]) -> None:
    del pod(named(documents, "Job", "fill-models"))["automountServiceAccountToken"]


@mistake("demo", "network: coordinator cannot reach DNS at port 53")
def no_names(documents: list[Document]) -> None:
    named(documents, "NetworkPolicy", "coordinator")["spec"]["egress"].pop()


def redis_configuration(documents: list[Document]) -> Document:
    return next(document["data"] for document in documents if "redis.conf" in document.get("data", {}))


@mistake("demo", "redis.conf: maxmemory-policy is allkeys-lru")
def redis_that_forgets(documents: list[Document]) -> None:
    data = redis_configuration(documents)
    data["redis.conf"] = data["redis.conf"].replace("noeviction", "allkeys-lru")


@mistake("demo", "redis.conf: appendfsync is everysec")
def redis_that_answers_before_it_has_written(documents: list[Document]) -> None:
    data = redis_configuration(documents)
    data["redis.conf"] = data["redis.conf"].replace("appendfsync always", "appendfsync everysec")


@mistake("demo", "redis.conf: the store uses hincrby, which its user may not")
def command_that_is_not_allowed(documents: list[Document]) -> None:
    data = redis_configuration(documents)
    data["redis.conf"] = data["redis.conf"].replace("+hincrby ", "")
