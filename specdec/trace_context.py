"""The caller's trace, as W3C Trace Context has it, where the caller uses OpenTelemetry; imports nothing of it."""

import sys
from collections.abc import Iterable

Pairs = tuple[tuple[str, str], ...]


def current_trace(given: Iterable[str] = ()) -> Pairs:
    """Return metadata that continues the trace of the caller's current span; empty where there is none.

    `given` are the names of metadata that are sent anyway: a caller may bring a trace of another origin.
    """
    trace = sys.modules.get("opentelemetry.trace")  # a caller that has a span has imported it
    if trace is None or "traceparent" in given:
        return ()
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return ()
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    state = span.trace_state.to_header()
    return (("traceparent", parent), *((("tracestate", state),) if state else ()))
