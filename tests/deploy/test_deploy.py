"""The overlays are valid Kubernetes and agree with the programs; seeded mistakes are found."""

import copy
import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

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
    containers,
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
    "-".join((overlay, *components)): (overlay, components)
    for overlay in ("demo", "gpu")
    for components in ((), ("tls",), ("autoscaling",), ("tls", "autoscaling"), ("autoscaling", "tls"))
}
IMAGES = ("coordinator", "draft", "target", "demo-coordinator", "demo-draft", "demo-target")


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
    for name in ("coordinator", "draft", "target"):
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
    assert {program.service for program in PROGRAMS.values()} == defined


def test_missing_kubectl_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(AssertionError, match="kubectl is not on PATH; install it"):
        render(OVERLAYS / "demo")


# Seeded mistakes: (what, overlay, how, the expected problem).

Change = Callable[[list[Document]], object]
MISTAKES: list[tuple[str, str, Change, str]] = []


def mistake(overlay: str, expected: str) -> Callable[[Change], Change]:
    """Register a function that breaks an overlay."""

    def register(change: Change) -> Change:
        MISTAKES.append((change.__name__, overlay, change, expected))
        return change

    return register


def deployment(documents: list[Document], name: str) -> Document:
    return named(documents, "Deployment", name)


def container(documents: list[Document], name: str) -> Document:
    return containers(deployment(documents, name))[0]


def variables(documents: list[Document], name: str) -> dict[str, str]:
    source = container(documents, name)["envFrom"][0]["configMapRef"]["name"]
    data: dict[str, str] = named(documents, "ConfigMap", source)["data"]
    return data


@mistake("demo", "Deployment/target readinessProbe: port 50052 is not the container's")
def wrong_probe_port(documents: list[Document]) -> None:
    container(documents, "target")["readinessProbe"]["grpc"]["port"] = 50052


@mistake("demo-tls", "Deployment/target: probes have no certificate, and do not ask SPECDEC_HEALTH_PORT")
def probe_of_the_port_with_tls(documents: list[Document]) -> None:
    variables(documents, "target")["SPECDEC_HEALTH_PORT"] = "50061"


@mistake("demo-tls", "Certificate/draft spec: dnsName is no field of it")
def misspelt_certificate(documents: list[Document]) -> None:
    spec = named(documents, "Certificate", "draft")["spec"]
    spec["dnsName"] = spec["dnsNames"]


@mistake("demo-tls", "Deployment/target: its certificate lacks the name target.specdec.svc.cluster.local")
def certificate_for_another_name(documents: list[Document]) -> None:
    named(documents, "Certificate", "target")["spec"]["dnsNames"] = ["target"]


@mistake("demo-tls", "Deployment/coordinator: nothing issues the secret coordinator-tls")
def certificate_that_is_not_issued(documents: list[Document]) -> None:
    named(documents, "Certificate", "coordinator")["spec"]["secretName"] = "other"


@mistake("demo", "Deployment/target: settings: --host is 0.0.0.0, where others can read and change plain text")
def plain_text_that_nobody_allowed(documents: list[Document]) -> None:
    del variables(documents, "target")["SPECDEC_INSECURE"]


@mistake("demo", "Deployment/draft: port grpc is 50052, and SPECDEC_PORT is 50062")
def wrong_listening_port(documents: list[Document]) -> None:
    variables(documents, "draft")["SPECDEC_PORT"] = "50062"


@mistake("gpu", "Service/coordinator: targetPort 50052 is not the pods' grpc")
def wrong_service_port(documents: list[Document]) -> None:
    named(documents, "Service", "coordinator")["spec"]["ports"][0]["targetPort"] = 50052


@mistake("demo", "Service/draft: is headless, so its port must be the pods'")
def headless_service_with_a_port_of_its_own(documents: list[Document]) -> None:
    named(documents, "Service", "draft")["spec"]["ports"][0]["port"] = 80


@mistake("demo", "readinessProbe.grpc.port: 'grpc' is not of type 'integer'")
def named_probe_port(documents: list[Document]) -> None:
    container(documents, "target")["readinessProbe"]["grpc"]["port"] = "grpc"


@mistake("demo", "unknown variable SPECDEC_DRAIN_SECONDS; the nearest is SPECDEC_DRAIN_S")
def unknown_variable(documents: list[Document]) -> None:
    variables(documents, "coordinator")["SPECDEC_DRAIN_SECONDS"] = "45"


@mistake("demo", "unknown variable SPECDEC_TOKENIZER")
def variable_of_another_program(documents: list[Document]) -> None:
    variables(documents, "draft")["SPECDEC_TOKENIZER"] = "/models/draft"


@mistake("gpu", "--dtype (or SPECDEC_DTYPE) is 'float16'")
def value_that_the_program_refuses(documents: list[Document]) -> None:
    variables(documents, "target")["SPECDEC_DTYPE"] = "float16"


@mistake("gpu", "unknown flag --modle; the nearest is --model")
def unknown_flag(documents: list[Document]) -> None:
    container(documents, "target")["args"] = ["--modle=/models/target"]


@mistake("gpu", "--model (or SPECDEC_MODEL) is required")
def missing_variable(documents: list[Document]) -> None:
    del variables(documents, "target")["SPECDEC_MODEL"]


@mistake("demo", "'failureTreshold' was unexpected")
def misspelt_field(documents: list[Document]) -> None:
    container(documents, "target")["startupProbe"]["failureTreshold"] = 240


@mistake("demo", "Deployment/draft apps/v1beta1: Kubernetes 1.30 does not know it")
def outdated_version(documents: list[Document]) -> None:
    deployment(documents, "draft")["apiVersion"] = "apps/v1beta1"


@mistake("demo", "readinessProbe: asks for specdec.v1.TargetService, not specdec.v1.DraftService")
def probe_of_another_service(documents: list[Document]) -> None:
    container(documents, "draft")["readinessProbe"]["grpc"]["service"] = "specdec.v1.TargetService"


@mistake("demo", "livenessProbe: a worker that drains must not be killed")
def liveness_that_kills_draining_workers(documents: list[Document]) -> None:
    container(documents, "draft")["livenessProbe"]["grpc"]["service"] = "specdec.v1.DraftService"


@mistake("demo", "a start may take 2000 s, longer than progressDeadlineSeconds")
def start_slower_than_the_rollout(documents: list[Document]) -> None:
    container(documents, "target")["startupProbe"]["failureThreshold"] = 400


@mistake("demo", "listens on 127.0.0.1, where nobody can reach it")
def loopback(documents: list[Document]) -> None:
    del variables(documents, "target")["SPECDEC_HOST"]


@mistake("demo", "['python', '-m', 'draft'] is none of our programs")
def module_that_does_not_exist(documents: list[Document]) -> None:
    container(documents, "draft")["command"] = ["python", "-m", "draft"]


@mistake("demo", "has no version")
def image_without_a_version(documents: list[Document]) -> None:
    container(documents, "draft")["image"] = "specdec-demo-draft:latest"


@mistake("demo", "deploy/Dockerfile has no stage 'drafter'")
def image_that_nobody_builds(documents: list[Document]) -> None:
    container(documents, "draft")["image"] = "registry.example/specdec-drafter:0.1.0"


@mistake("demo", "SPECDEC_MODEL is /models/draft, which is neither in the image nor in a volume")
def image_without_models(documents: list[Document]) -> None:
    container(documents, "draft")["image"] = "specdec-draft:0.1.0"


@mistake("gpu", "volumes ['models', 'shared-memory', 'tmp'], mounts ['shared-memory', 'tmp']")
def models_that_are_not_mounted(documents: list[Document]) -> None:
    mounts = container(documents, "draft")["volumeMounts"]
    mounts[:] = [mount for mount in mounts if mount["name"] != "models"]


@mistake("demo", "not Service/draft")
def address_of_no_service(documents: list[Document]) -> None:
    variables(documents, "coordinator")["SPECDEC_DRAFT"] = "dns:///drafter.specdec.svc.cluster.local.:50052"


@mistake("demo", "SPECDEC_TARGET is dns:///target.specdec.svc.cluster.local:50053, not Service/target")
def name_without_an_end(documents: list[Document]) -> None:
    variables(documents, "coordinator")["SPECDEC_TARGET"] = "dns:///target.specdec.svc.cluster.local:50053"


@mistake("demo", "not Service/target")
def address_balanced_by_the_service(documents: list[Document]) -> None:
    del named(documents, "Service", "target")["spec"]["clusterIP"]


@mistake("demo", "several coordinators need one store")
def a_store_in_each_coordinator(documents: list[Document]) -> None:
    del variables(documents, "coordinator")["SPECDEC_STORE"]


@mistake("demo", "PodDisruptionBudget/draft: selects the pods of nothing")
def budget_of_nothing(documents: list[Document]) -> None:
    labels = named(documents, "PodDisruptionBudget", "draft")["spec"]["selector"]["matchLabels"]
    labels["app.kubernetes.io/component"] = "drafter"


@mistake("demo", "Deployment/draft: its selector does not match its own pods")
def selector_of_other_pods(documents: list[Document]) -> None:
    deployment(documents, "draft")["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] = "target"


@mistake("demo", "there is no ConfigMap/draft-0")
def configuration_that_is_not_there(documents: list[Document]) -> None:
    container(documents, "draft")["envFrom"][0]["configMapRef"]["name"] = "draft-0"


@mistake("demo", "there is no ServiceAccount/drafter")
def account_that_is_not_there(documents: list[Document]) -> None:
    pod(deployment(documents, "draft"))["serviceAccountName"] = "drafter"


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
    if any("torch" in rest or "[models]" in rest for rest in instructions) == name.endswith("coordinator"):
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
    for name in ("coordinator", "draft", "target"):
        assert container(overlay, name)["image"].split(":")[1].removesuffix("-cuda") == version
    assert f'image.version="{version}"' in dockerfile().last("runtime", "LABEL")


def test_images_run_as_the_manifests_say(overlay: list[Document]) -> None:
    for name in ("coordinator", "draft", "target"):
        context = pod(deployment(overlay, name))["securityContext"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == dockerfile().last(name, "USER")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('[server,embedded,tracing]"', '[models]"', "demo-coordinator: torch belongs in workers"),
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
