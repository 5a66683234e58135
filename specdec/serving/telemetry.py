"""Logs and metrics: facts with fixed fields, and never a prompt, a token or a text.

One event a request at info, one a round at debug. Field `event` names the fact; everything else is a number, an id or a
name. What libraries, the event loop, warnings and uncaught exceptions have to say takes the same way, one line each.
Metrics are served by prometheus_client on a port of their own.
"""

import asyncio
import logging
import sys
import threading
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any, Literal

import prometheus_client
import structlog

from specdec.serving.settings import ProcessSettings

# 1 ms is what a token costs on a fast GPU with a small draft; 10 s is a long prompt on a CPU
LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MAX_MESSAGE_CHARACTERS = 300  # of an exception; a longer one might quote what it was given
MAX_FRAMES = 30
OURS = "specdec"  # the loggers of our own packages that log by the standard library are below it

Logger = structlog.stdlib.BoundLogger
Event = MutableMapping[str, Any]


def configure_logs(service: str, level: str, log_format: Literal["json", "text"]) -> None:
    """Send all of this process's logs to standard error, one line an event, each with the service's name."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        lambda _, __, event: {"service": service, **event},
        describe_exception,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: logging.getLogger(OURS),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(shared, log_format))
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    logging.getLogger(OURS).setLevel(number)
    logging.captureWarnings(True)
    # our handlers come after the server's start, when the service can work; grpc finds them by name then
    logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "register method handlers" not in record.msg)
    sys.excepthook = log_uncaught
    sys.unraisablehook = log_unraisable
    threading.excepthook = lambda given: log_uncaught(given.exc_type, given.exc_value, given.exc_traceback)


def _formatter(
    shared: list[structlog.typing.Processor], log_format: Literal["json", "text"]
) -> structlog.stdlib.ProcessorFormatter:
    render: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(default=str)
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=False)
    )
    # the engine logs by the standard library: its fields are the record's extra ones
    from_libraries: list[structlog.typing.Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        *shared,
    ]
    remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=from_libraries, processors=[remove, render])


def describe_exception(_: Any, __: str, event: Event) -> Event:
    """Replace an event's exception by fields of one line: its type, the beginning of its message, its frames."""
    given = event.pop("exc_info", None)
    error = sys.exc_info()[1] if given is True else given[1] if isinstance(given, tuple) else given
    if isinstance(error, BaseException):
        event["error"] = type(error).__name__
        event["message"] = str(error)[:MAX_MESSAGE_CHARACTERS]
        event["frames"] = _frames(error.__traceback__)
    return event


def _frames(trace: TracebackType | None) -> list[str]:
    """Return file, line and function of each frame, the innermost last."""
    frames = []
    while trace:
        code = trace.tb_frame.f_code
        frames.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return frames[-MAX_FRAMES:]


def log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Log an uncaught exception; in the main thread it ends the process."""
    if not issubclass(kind, KeyboardInterrupt | SystemExit):
        get_logger().critical("uncaught", exc_info=(kind, error or kind(), trace))


def log_unraisable(given: "sys.UnraisableHookArgs") -> None:
    """Log an exception that could not be raised, as in a finaliser."""
    error = given.exc_value or given.exc_type()
    where = getattr(given.object, "__qualname__", type(given.object).__name__)
    what = given.err_msg or f"exception ignored in {where}"
    get_logger().error("unraisable", what=what, exc_info=(given.exc_type, error, given.exc_traceback))


def log_unhandled(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what no task of the event loop caught."""
    get_logger().error("unhandled", what=context["message"], exc_info=context.get("exception"))


def get_logger() -> Logger:
    """Return the process's logger."""
    logger: Logger = structlog.get_logger()
    return logger


def serve_metrics(settings: ProcessSettings) -> int | None:
    """Serve Prometheus metrics if the settings ask for it; return the port."""
    if settings.metrics_port is None:
        return None
    server, _ = prometheus_client.start_http_server(settings.metrics_port, settings.host)
    return int(server.server_port)
