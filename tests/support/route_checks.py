"""Checks of rendered routes of the Gateway API."""

from collections.abc import Iterator, Sequence

from tests.support.manifests import Document, named, of_kind, title

PROTOCOLS = {"GRPCRoute": "grpc", "HTTPRoute": "http"}


def route_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Routes lead to Services of the right protocol at their ports, and each kind has host names of its own."""
    routes = of_kind(documents, *PROTOCOLS)
    for route in routes:
        for rule in route["spec"]["rules"]:
            yield from (f"{title(route)}: {problem}" for problem in _rule_problems(route["kind"], rule, documents))
    hosts = [
        {name for route in of_kind(routes, kind) for name in route["spec"].get("hostnames", [])} for kind in PROTOCOLS
    ]
    if routes and (not all(hosts) or hosts[0] & hosts[1]):
        yield f"routes: gRPC is at {sorted(hosts[0])} and HTTP at {sorted(hosts[1])}; a name has one kind of route"


def _rule_problems(kind: str, rule: Document, documents: Sequence[Document]) -> Iterator[str]:
    for backend in rule["backendRefs"]:
        try:
            service = named(documents, "Service", backend["name"])
        except KeyError as error:
            yield f"there is no {error.args[0]}"
            continue
        ports = {port["port"]: port["name"] for port in service["spec"]["ports"]}
        if ports.get(backend["port"]) != PROTOCOLS[kind]:
            yield f"{title(service)} has no {PROTOCOLS[kind]} at port {backend['port']}"
    if kind == "HTTPRoute" and rule.get("timeouts", {}).get("request") != "0s":
        yield "long streams are cut; say timeouts.request: 0s"
