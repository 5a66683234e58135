"""The caller's trace, as W3C Trace Context has it, where the caller uses OpenTelemetry; imports nothing of it."""

import re
import sys
from collections.abc import Iterable, Mapping
from contextvars import ContextVar

Pairs = tuple[tuple[str, str], ...]

PARENT, STATE = "traceparent", "tracestate"
PARENT_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
STATE_FORM = re.compile(r"[ -~]{1,512}")
_continued: ContextVar[Pairs] = ContextVar("continued trace", default=())


def trace_of(headers: Mapping[str, str]) -> Pairs:
    """Return the trace in a request's headers (names in lower case); empty where there is none, or a wrong one."""
    parent, state = headers.get(PARENT, ""), headers.get(STATE, "")
    if not PARENT_FORM.fullmatch(parent):
        return ()
    return ((PARENT, parent), *(((STATE, state),) if STATE_FORM.fullmatch(state) else ()))


def continue_trace(trace: Pairs) -> None:
    """Let the calls of this task, and of tasks that it makes, continue this trace, not OpenTelemetry's current one."""
    _continued.set(trace)


def current_trace(given: Iterable[str] = ()) -> Pairs:
    """Return metadata that continues the trace of the caller's current span; empty where there is none.

    `given` are the names of metadata that are sent anyway: a caller may bring a trace of another origin.
    """
    continued = _continued.get()
    if continued:
        return () if PARENT in given else continued
    trace = sys.modules.get("opentelemetry.trace")  # a caller that has a span has imported it
    if trace is None or PARENT in given:
        return ()
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return ()
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    state = span.trace_state.to_header()
    return ((PARENT, parent), *(((STATE, state),) if state else ()))
