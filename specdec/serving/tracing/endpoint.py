"""Where traces go: our flag, else the standard variables of OpenTelemetry."""

from collections.abc import Mapping
from urllib.parse import urlsplit

STANDARD_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
STANDARD_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "grpc"


class CannotTrace(ValueError):
    """Traces are asked for and cannot be sent. The message is for the operator."""


def endpoint_of(given: str | None, environment: Mapping[str, str]) -> str | None:
    """Return where traces go: as given, else as the standard variables say; None: nowhere. Raises CannotTrace."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    endpoint = given or next((environment[name] for name in STANDARD_ENDPOINTS if environment.get(name)), None)
    if endpoint is None:
        return None
    for name in STANDARD_PROTOCOLS:
        if not given and environment.get(name, PROTOCOL) != PROTOCOL:
            problem = f"{name} is {environment[name]}, and specdec sends traces by {PROTOCOL} alone"
            raise CannotTrace(f"{problem}; give the collector's gRPC port by --otlp-endpoint, as http://127.0.0.1:4317")
    return endpoint


def endpoint_problem(endpoint: str) -> str | None:
    """Return what is wrong with an endpoint and what would be right, or None."""
    parts = urlsplit(endpoint)
    if parts.scheme in ("http", "https") and parts.hostname and not parts.path.strip("/"):
        return None
    return f"is {endpoint!r}; give http://HOST:PORT or https://HOST:PORT of a collector's OTLP/gRPC port (4317)"
