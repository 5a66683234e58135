"""Logs and metrics: facts with fixed fields, and never a prompt, a token or a text.

One event a request at info, one a round at debug. Field `event` names the fact; everything else is a number, an id or a
name. Metrics are served by prometheus_client on a port of their own.
"""

import logging
import sys
from typing import Literal

import prometheus_client
import structlog

from specdec.serving.settings import ServiceSettings

# 1 ms is what a token costs on a fast GPU with a small draft; 10 s is a long prompt on a CPU
LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

Logger = structlog.stdlib.BoundLogger


def configure_logs(service: str, level: str, log_format: Literal["json", "text"]) -> None:
    """Send this process's logs to standard error, each line with the service's name."""
    render: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if log_format == "json" else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            lambda _, __, event: {"service": service, **event},
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def get_logger() -> Logger:
    """Return the process's logger."""
    logger: Logger = structlog.get_logger()
    return logger


def serve_metrics(settings: ServiceSettings) -> int | None:
    """Serve Prometheus metrics if the settings ask for it; return the port."""
    if settings.metrics_port is None:
        return None
    server, _ = prometheus_client.start_http_server(settings.metrics_port, settings.host)
    return int(server.server_port)
