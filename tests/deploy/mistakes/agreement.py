"""Manifests that disagree with the programs, or with each other: probes, ports, certificates, settings, addresses."""

from tests.deploy.mistakes.registry import container, deployment, mistake, variables
from tests.support.manifests import (
    Document,
    named,
    pod,
)


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


@mistake("demo-tls-autoscaling", "Deployment/gateway: probes ask by ['HTTP', 'HTTPS'], with a certificate")
def probe_of_https_in_plain_text(documents: list[Document]) -> None:
    container(documents, "gateway")["livenessProbe"]["httpGet"]["scheme"] = "HTTP"


@mistake("demo-tls-autoscaling", "Deployment/gateway livenessProbe: asks /readyz")
def liveness_that_needs_coordinators(documents: list[Document]) -> None:
    container(documents, "gateway")["livenessProbe"]["httpGet"]["path"] = "/readyz"


@mistake("demo-tls-autoscaling", "Deployment/gateway: the coordinators' TLS is True")
def gateway_without_the_authority(documents: list[Document]) -> None:
    variables(documents, "gateway")["SPECDEC_COORDINATOR_TLS"] = "true"
    del variables(documents, "gateway")["SPECDEC_COORDINATOR_TLS_CA"]


@mistake("gpu-tls-autoscaling", "network: gateway cannot reach coordinator at port 50051")
def gateway_that_may_not_reach_coordinators(documents: list[Document]) -> None:
    del named(documents, "NetworkPolicy", "coordinator")["spec"]["ingress"][0]["from"][1]
