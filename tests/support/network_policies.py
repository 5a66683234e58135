"""Which connections the rendered NetworkPolicies allow, and which they must allow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from tests.support.manifests import (
    Document,
    container_ports,
    containers,
    named,
    of_kind,
    pod_labels,
    selects,
    workloads,
)


@dataclass(frozen=True)
class Peer:
    """One end of a connection, as policies see it."""

    labels: Mapping[str, str]
    namespace: Mapping[str, str]
    address: str = ""  # of a peer outside the cluster


OUTSIDE = {
    "the internet": Peer({}, {}, "203.0.113.1"),
    "the cloud's metadata": Peer({}, {}, "169.254.169.254"),
    "a private network": Peer({}, {}, "10.1.2.3"),
}
FILLER = "fill-models"


def network_problems(documents: Sequence[Document]) -> Iterator[str]:
    """The connections that a round needs are allowed; all others are denied."""
    peers = {workload["metadata"]["name"]: _peer_of(workload, documents) for workload in workloads(documents)}
    peers |= OUTSIDE | {
        "a client": Peer({}, {"specdec-client": "true"}),
        "another pod": Peer({}, {}),
        "Prometheus": Peer({}, {"kubernetes.io/metadata.name": "monitoring"}),
        "DNS": Peer({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"}),
    }
    policies = of_kind(documents, "NetworkPolicy")
    for (source, destination, port), wanted in _edges(documents).items():
        if _open(policies, peers[source], peers[destination], port) != wanted:
            yield f"network: {source} {'cannot' if wanted else 'can'} reach {destination} at port {port}"


def _edges(documents: Sequence[Document]) -> dict[tuple[str, str, int], bool]:
    """Return which connections must be possible, and which must not."""
    names = [workload["metadata"]["name"] for workload in workloads(documents)]
    ports = {
        workload["metadata"]["name"]: container_ports(containers(workload)[0]) for workload in workloads(documents)
    }
    needed = {("coordinator", "DNS", 53), ("a client", "coordinator", ports["coordinator"]["grpc"])}
    needed |= {("coordinator", name, ports[name]["grpc"]) for name in ("draft", "target")}
    needed |= {("coordinator", name, ports[name]["grpc"]) for name in {"target-canary"} & ports.keys()}
    needed |= {("coordinator", name, ports[name]["redis"]) for name in {"redis"} & ports.keys()}
    needed |= {("Prometheus", name, ports[name]["metrics"]) for name in ports if "metrics" in ports[name]}
    needed |= {("gateway", "DNS", 53), ("gateway", "coordinator", ports["coordinator"]["grpc"])}
    needed |= {("a client", "gateway", ports["gateway"]["http"])}
    others = ("a client", "another pod", "Prometheus")
    possible = {(source, name, port) for source in (*names, *others) for name in names for port in ports[name].values()}
    possible |= {(name, other, 443) for name in names for other in ("another pod", *OUTSIDE)}
    needed |= {(FILLER, "the internet", 443), (FILLER, "DNS", 53)} if FILLER in names else set()
    return {edge: edge in needed for edge in possible | needed}


def _peer_of(workload: Document, documents: Sequence[Document]) -> Peer:
    name = workload["metadata"]["namespace"]
    labels = named(documents, "Namespace", name)["metadata"].get("labels", {})
    return Peer(pod_labels(workload), {**labels, "kubernetes.io/metadata.name": name})


def _open(policies: Sequence[Document], source: Peer, destination: Peer, port: int) -> bool:
    leaves = _passes(policies, "Egress", source, destination, port)
    return leaves and _passes(policies, "Ingress", destination, source, port)


def _passes(policies: Sequence[Document], direction: str, subject: Peer, other: Peer, port: int) -> bool:
    """Return whether the policies of one end let a connection through; pods that none selects are open."""
    ours = subject.namespace.get("kubernetes.io/metadata.name")
    applying = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == ours
        and direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], subject.labels)
    ]
    rules = [rule for spec in applying for rule in spec.get(direction.lower(), [])]
    return not applying or any(_rule_matches(rule, direction, subject, other, port) for rule in rules)


def _rule_matches(rule: Document, direction: str, subject: Peer, other: Peer, port: int) -> bool:
    matches_port = "ports" not in rule or any(each["port"] == port for each in rule["ports"])
    entries = rule.get("to" if direction == "Egress" else "from")
    return matches_port and (not entries or any(_entry_matches(entry, subject, other) for entry in entries))


def _entry_matches(entry: Document, subject: Peer, other: Peer) -> bool:
    if "ipBlock" in entry:
        return _block_matches(entry["ipBlock"], other.address)
    if other.address:
        return False
    if "namespaceSelector" in entry:
        return selects(entry["namespaceSelector"], other.namespace) and selects(entry.get("podSelector"), other.labels)
    return subject.namespace == other.namespace and selects(entry["podSelector"], other.labels)


def _block_matches(block: Document, address: str) -> bool:
    if not address:
        return False
    excluded = any(ip_address(address) in ip_network(each) for each in block.get("except", []))
    return ip_address(address) in ip_network(block["cidr"]) and not excluded
