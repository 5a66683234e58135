"""Every field of a rendered document exists: by Kubernetes' own schemas, and by lists for kinds that others define."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # it ships no types

from tests.support.manifests import Document, title

VERSIONS = ("1.30", "1.32", "1.35")

Fields = Mapping[str, Any]
"""The fields of a map, those that are needed with a `!`, and theirs in turn; None: anything."""


def _any(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split())


# of the Gateway API's standard channel, version 1.3.0
PARENTS = _any("group kind namespace name! sectionName port")
BACKENDS = _any("group kind namespace name! port weight")
ISSUER_REFERENCE = _any("name! kind group")
SPECS: Mapping[tuple[str, str], Fields] = {
    ("cert-manager.io/v1", "Issuer"): _any("selfSigned ca acme vault venafi"),
    ("cert-manager.io/v1", "Certificate"): {
        **_any("secretName! duration renewBefore usages dnsNames uris isCA commonName subject ipAddresses"),
        **_any("emailAddresses revisionHistoryLimit secretTemplate"),
        "privateKey": _any("algorithm encoding rotationPolicy size"),
        "issuerRef!": ISSUER_REFERENCE,
    },
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): {
        **_any("hostnames"),
        "parentRefs": PARENTS,
        "rules": {
            **_any("name filters"),
            "matches": {"method": _any("type service method"), "headers": _any("type name! value!")},
            "backendRefs": BACKENDS,
        },
    },
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {
        **_any("hostnames"),
        "parentRefs": PARENTS,
        "rules": {
            **_any("name filters"),
            "matches": {
                "path": _any("type value"),
                "headers": _any("type name! value!"),
                "queryParams": _any("type name! value!"),
                **_any("method"),
            },
            "backendRefs": BACKENDS,
            "timeouts": _any("request backendRequest"),
        },
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        **_any("selector! jobLabel namespaceSelector podTargetLabels sampleLimit attachMetadata"),
        "podMetricsEndpoints!": _any(
            "port portNumber path scheme interval scrapeTimeout relabelings metricRelabelings"
        ),
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "groups!": {
            **_any("name! interval limit labels"),
            "rules!": _any("alert record expr! for keep_firing_for labels annotations"),
        }
    },
}


def schema_problems(documents: Sequence[Document], version: str) -> Iterator[str]:
    """Every field exists in this version of Kubernetes, and has the right type."""
    for document in documents:
        fields = SPECS.get((document["apiVersion"], document["kind"]))
        if fields is not None:
            yield from (f"{title(document)} {problem}" for problem in _field_problems(document["spec"], fields, "spec"))
        elif problem := _schema_problem(json.dumps(document), version):
            yield f"{title(document)} {problem}"


def _field_problems(value: Any, fields: Fields, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _field_problems(entry, fields, f"{path}[{number}]")
        return
    known = {name.removesuffix("!"): below for name, below in fields.items()}
    yield from (f"{path}: {name} is no field of it" for name in sorted(value.keys() - known.keys()))
    needed = (name.removesuffix("!") for name in fields if name.endswith("!"))
    yield from (f"{path}: {name} is missing" for name in needed if name not in value)
    for name in sorted(value.keys() & known.keys()):
        if known[name] is not None:
            yield from _field_problems(value[name], known[name], f"{path}.{name}")


@functools.cache  # a document takes 10 ms
def _schema_problem(document: str, version: str) -> str:
    try:
        kubernetes_validate.validate(json.loads(document), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return f"{error.api_version}: Kubernetes {version} does not know it"
    return ""
