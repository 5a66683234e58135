"""Checks of what pods may do, what certificates say, and what Redis keeps: each yields the problems as text."""

import re
from collections.abc import Iterator, Sequence

from tests.support.manifests import (
    REPOSITORY,
    Document,
    container_ports,
    containers,
    has_own_redis,
    named,
    of_kind,
    pod,
    quantity,
    redis_configuration,
    title,
    workloads,
)

MADE_BY_HAND = "redis"  # the Secret with the password of a Redis that is elsewhere
# Pod Security, level restricted
RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"}


def security_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Pods satisfy Pod Security restricted, which the namespace enforces; without credentials or extra variables."""
    for namespace in of_kind(documents, "Namespace"):
        if namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"{title(namespace)}: does not enforce Pod Security restricted"
    for workload in workloads(documents):
        yield from (f"{title(workload)}: {problem}" for problem in _pod_security_problems(pod(workload)))
        for container in containers(workload):
            yield from (f"{title(workload)}: {problem}" for problem in _container_security_problems(container))


def _pod_security_problems(spec: Document) -> Iterator[str]:
    context = spec.get("securityContext", {})
    if not (context.get("runAsNonRoot") and context.get("runAsUser", 0) > 0):
        yield "runs as root"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "has no seccomp profile"
    # Kubernetes would add variables for each Service, SPECDEC_... for one named specdec: our programs refuse those
    wrong = [name for name in ("automountServiceAccountToken", "enableServiceLinks") if spec.get(name) is not False]
    yield from (f"{name} must be false" for name in wrong)
    yield from (f"{name} is set" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    kinds = {kind for volume in spec.get("volumes", []) for kind in volume if kind != "name"}
    if kinds - RESTRICTED_VOLUMES - {"secret"}:
        yield f"has volumes of the kinds {sorted(kinds)}"


def _container_security_problems(container: Document) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield "may escalate its privileges"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield "keeps capabilities"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "may write to its image"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield "has a hostPort"


def certificate_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Secrets that are mounted are issued; a service's certificate has the name by which it is reached."""
    issued = {each["spec"]["secretName"]: each["spec"] for each in of_kind(documents, "Certificate")}
    for workload in workloads(documents):
        name = f"{workload['metadata']['name']}.{workload['metadata'].get('namespace')}.svc.cluster.local"
        for volume in pod(workload).get("volumes", []):
            secret = volume.get("secret", {}).get("secretName")
            if secret == MADE_BY_HAND:
                continue
            if secret and secret not in issued:
                yield f"{title(workload)}: nothing issues the secret {secret}"
            elif secret and name not in issued[secret]["dnsNames"]:
                yield f"{title(workload)}: its certificate lacks the name {name}"


def redis_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Redis keeps commits on disk, listens on the declared port, fits into its memory, and allows our commands."""
    if not has_own_redis(documents):
        return
    lines = (
        line.split(maxsplit=1) for line in redis_configuration(documents).splitlines() if line[:1] not in ("", "#")
    )
    said = {name: value.strip() for name, value in lines}
    container = containers(named(documents, "StatefulSet", "redis"))[0]
    expected = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
    expected["port"] = str(container_ports(container)["redis"])
    yield from (f"redis.conf: {name} is {said.get(name)}" for name in expected if said.get(name) != expected[name])
    if said["dir"] not in [mount["mountPath"] for mount in container["volumeMounts"]]:
        yield f"redis.conf: dir is {said['dir']}, which no volume keeps"
    if 2 * quantity(said["maxmemory"]) > quantity(container["resources"]["limits"]["memory"]):
        yield "redis.conf: maxmemory must leave half of the limit to the fork that rewrites the file"
    missing = store_commands() - {word[1:] for word in said["user"].split() if word.startswith("+")}
    yield from (f"redis.conf: the store uses {name}, which its user may not" for name in sorted(missing))


def store_commands() -> set[str]:
    """Return the commands that the coordinator's scripts call."""
    scripts = "".join(path.read_text() for path in (REPOSITORY / "coordinator").glob("*.lua"))
    return {name.lower() for name in re.findall(r"redis\.p?call\(\s*['\"](\w+)", scripts)}


CHECKS = (security_problems, certificate_problems, redis_problems)
