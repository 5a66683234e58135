"""Spans that are recorded, and sent to an OpenTelemetry collector over OTLP/gRPC; imported where traces are on."""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specdec.serving.tracing.spans import NOTHING, Attribute, Current, Span, hashed
from specdec.trace_context import Pairs

NAMESPACE = "specdec"
FIRST_ROUNDS = 8  # of a session, traced whatever comes after: they show the prompt and the first choices
ALL_ROUNDS = "all"  # as our member of `tracestate` says: a caller wants every round of this request
MAX_TIMES_S = 3600.0  # larger values that a worker reports are ignored
_PROPAGATOR = TraceContextTextMapPropagator()


class OtlpTracer:
    """Sends the spans of one process to a collector.

    Of a request's rounds the first ones are traced, then one in `every`; 0: none after the first.
    """

    def __init__(self, service: str, endpoint: str | None, every: int) -> None:
        """`endpoint` None: that of the standard variables. Raises ValueError for one that cannot be used."""
        self._provider = TracerProvider(resource=_process(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer(NAMESPACE)
        self._every = every

    def request(self, name: str, metadata: Mapping[str, str]) -> Span:
        """Return the span of a client's request: in the client's trace, if it brings one."""
        parent = _PROPAGATOR.extract(metadata)
        given = trace.get_current_span(parent).get_span_context().trace_state
        every = 1 if given.get(NAMESPACE) == ALL_ROUNDS else self._every
        begun = self._tracer.start_span(name, parent, SpanKind.SERVER)
        return RecordedSpan(self._tracer, begun, every) if begun.is_recording() else NOTHING

    def answer(self, name: str, context: bytes) -> Span:
        """Return the span of an answer to another process."""
        trace_id, span_id = int.from_bytes(context[:16], "big"), int.from_bytes(context[16:], "big")
        sampled = TraceFlags(TraceFlags.SAMPLED)
        parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=sampled, trace_state=TraceState())
        begun = self._tracer.start_span(name, _within(NonRecordingSpan(parent)), SpanKind.SERVER)
        return RecordedSpan(self._tracer, begun) if begun.is_recording() else NOTHING

    def close(self) -> None:
        """Send what is left; may take as long as the collector."""
        self._provider.shutdown()


class RecordedSpan(Span):
    """A span that is sent when it has ended."""

    __slots__ = ("_current", "_every", "_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, begun: trace.Span, every: int = 0) -> None:
        self._tracer, self._span, self._every = tracer, begun, every
        self._current = Current(self)

    def __enter__(self) -> Self:
        """Be the current span."""
        self._current.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; of an error its type is told, as its message might quote what it was given."""
        self._current.leave()
        if kind is not None and kind is not GeneratorExit:
            self.fail(kind.__name__)
        self.end()

    def set(self, **attributes: Attribute) -> None:
        """Add facts."""
        self._span.set_attributes({f"{NAMESPACE}.{name}": value for name, value in attributes.items()})

    def set_session(self, session_id: str) -> None:
        """Add which session it is about, as a hash."""
        self.set(session=hashed(session_id))

    def begin(self, name: str, **attributes: Attribute) -> Span:
        """Return a span within this one that has begun."""
        child = RecordedSpan(self._tracer, self._tracer.start_span(name, _within(self._span)), self._every)
        child.set(**attributes)
        return child

    def begin_round(self, number: int) -> Span:
        """Return the span of a round, or one that hides what is in it."""
        if number < FIRST_ROUNDS or (self._every and number % self._every == 0):
            child = RecordedRound(self._tracer, self._tracer.start_span("round", _within(self._span)))
            child.set(round=number)
            return child
        return HiddenRound(self.exemplar())

    def end(self) -> None:
        """End it now."""
        self._span.end()

    def end_after(self, future: "asyncio.Future[Any]") -> None:
        """End it when a future is done."""
        future.add_done_callback(lambda _: self.end())

    def fail(self, code: str) -> None:
        """Mark it as failed."""
        self._span.set_status(Status(StatusCode.ERROR, code))

    def add_times(self, answer: Any) -> None:
        """Add the parts of an answer, one after the other: forwards, of which a draft takes several, as one.

        Those of a round that was scored ahead begin before it was asked for.
        """
        timing = answer.timing
        queue_s, forward_s, total_s = timing.queue_s, timing.forward_s, timing.total_s
        if not isinstance(self._span, ReadableSpan) or not 0 <= queue_s + forward_s <= total_s <= MAX_TIMES_S:
            return
        now_ns = time.time_ns()
        begin_ns = min(self._span.start_time or now_ns, now_ns - round(1e9 * total_s))
        for name, seconds in (("queue", queue_s), ("forward", forward_s), ("sampling", total_s - queue_s - forward_s)):
            part = self._tracer.start_span(name, _within(self._span), start_time=begin_ns)
            begin_ns += round(1e9 * seconds)
            part.end(begin_ns)

    def metadata(self) -> Pairs:
        """Return what continues the trace within this span, as metadata."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, _within(self._span))
        return tuple(carrier.items())

    def context(self) -> bytes:
        """Return the trace's id and the span's, as W3C Trace Context orders their bytes."""
        own = self._span.get_span_context()
        return own.trace_id.to_bytes(16, "big") + own.span_id.to_bytes(8, "big")

    def exemplar(self) -> dict[str, str]:
        """Return the trace's id and the span's, as Grafana finds them."""
        own = self._span.get_span_context()
        return {"trace_id": trace.format_trace_id(own.trace_id), "span_id": trace.format_span_id(own.span_id)}


class RecordedRound(RecordedSpan):
    """A round's span: the round goes on after its `with` block, until its commit (`end_after`)."""

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it, and end it if the round failed."""
        if kind is None:
            self._current.leave()
        else:
            super().__exit__(kind, error, trace)


class Hidden(Span):
    """Nothing, within a request that is traced: values of metrics lead to the request."""

    __slots__ = ("_exemplar",)

    def __init__(self, exemplar: dict[str, str]) -> None:
        self._exemplar = exemplar

    def exemplar(self) -> dict[str, str]:
        """Return the trace's id and the request's span."""
        return self._exemplar


class HiddenRound(Span):
    """A round that is not traced: while it is current, nothing is."""

    __slots__ = ("_current",)

    def __init__(self, exemplar: dict[str, str]) -> None:
        self._current = Current(Hidden(exemplar))

    def __enter__(self) -> Self:
        """Hide what follows."""
        self._current.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hide no more."""
        self._current.leave()


def _within(span: trace.Span) -> Context:
    return trace.set_span_in_context(span, Context())


def _process(service: str) -> Resource:
    """Return what this process is called; the standard variables may say otherwise (OTEL_SERVICE_NAME)."""
    own = {"service.instance.id": uuid.uuid4().hex}
    if str(Resource.create().attributes["service.name"]).startswith("unknown_service"):
        own["service.name"] = f"{NAMESPACE}-{service}"
    return Resource.create(own)


def quieten() -> None:
    """Keep what the exporter says about every attempt out of the logs; that a batch was lost stays."""
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
