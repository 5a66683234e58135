"""Spans: nothing where traces are off, which rounds are traced, what is taken of other processes' contexts."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specdec.serving.tracing import spans
from specdec.serving.tracing.endpoint import CannotTrace, endpoint_of, endpoint_problem
from specdec.serving.tracing.otlp import FIRST_ROUNDS, OtlpTracer, RecordedSpan
from specdec.serving.tracing.spans import NOTHING
from specdec.trace_context import Pairs, continue_trace, current_trace, trace_of

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
NOT_SAMPLED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}


class Memory:
    """What was recorded."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def span(self, every: int = 4) -> RecordedSpan:
        """Return a request's span."""
        tracer = self.provider.get_tracer("test")
        return RecordedSpan(tracer, tracer.start_span("request"), every)

    @property
    def names(self) -> list[str]:
        """The names of the spans that have ended, in that order."""
        return [span.name for span in self.exporter.get_finished_spans()]

    def one(self, name: str) -> ReadableSpan:
        """Return the span of a name."""
        (found,) = (span for span in self.exporter.get_finished_spans() if span.name == name)
        return found


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def tracer() -> Iterator[OtlpTracer]:
    """A process's tracer, whose collector does not answer."""
    tracer = OtlpTracer("test", "http://127.0.0.1:1", every=4)
    spans.turn_on(tracer)
    yield tracer
    spans.turn_on(None)


def call(metadata: dict[str, str]) -> SimpleNamespace:
    """Return the context of a call with this metadata."""
    return SimpleNamespace(invocation_metadata=lambda: tuple(metadata.items()))


def test_nothing_is_imported_and_nothing_sent_where_traces_are_off() -> None:
    """redis-py imports OpenTelemetry by itself where it is installed; ours sends by the exporter."""
    for module, forbidden in (("coordinator.__main__", "opentelemetry.exporter"), ("specdec.cli", "opentelemetry")):
        program = f"import sys, {module}; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert not [name for name in done.stdout.split() if name.startswith((forbidden, f"{spans.__package__}.otlp"))]
    assert spans.request("Generate", call(PARENT)) is NOTHING
    assert spans.answer("Score", bytes(range(24))) is NOTHING
    with spans.span("phase") as phase:
        assert phase is spans.current() is NOTHING
    assert (NOTHING.context(), NOTHING.begin_round(0), NOTHING.exemplar()) == (b"", NOTHING, None)


def test_a_span_is_within_the_one_that_its_task_is_in(memory: Memory) -> None:
    with memory.span(), spans.span("outer"), spans.span("inner"):
        pass
    inner, outer = memory.one("inner"), memory.one("outer")
    assert memory.names == ["inner", "outer", "request"]
    assert inner.parent
    assert outer.context
    assert inner.parent.span_id == outer.context.span_id
    assert spans.current() is NOTHING


async def test_a_task_is_in_the_span_that_made_it(memory: Memory) -> None:
    async def work() -> None:
        with spans.span("work"):
            await asyncio.sleep(0)

    with memory.span():
        task = asyncio.create_task(work())
    await task
    assert memory.one("work").parent


async def test_rounds_after_the_first_are_traced_one_in_so_many(memory: Memory) -> None:
    async def publish() -> None:
        with spans.span("commit"):
            pass

    with memory.span(every=5):
        for number in range(20):
            with spans.current().begin_round(number) as tracing:
                with spans.span("score"):
                    pass
                committing = asyncio.ensure_future(publish())
            tracing.end_after(committing)
            await committing
            await asyncio.sleep(0)
    traced = [span.attributes["specdec.round"] for span in memory.exporter.get_finished_spans() if span.name == "round"]  # type: ignore[index]
    assert traced == [*range(FIRST_ROUNDS), 10, 15]
    assert memory.names.count("score") == memory.names.count("commit") == len(traced)


def test_a_round_that_fails_has_ended(memory: Memory) -> None:
    with pytest.raises(KeyError), memory.span(), spans.current().begin_round(0):
        raise KeyError("text of a client")
    span = memory.one("round")
    assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, "KeyError")
    assert spans.current() is NOTHING


@pytest.mark.parametrize("context", [b"", b"x", bytes(23), bytes(25), bytes(1000)])
def test_a_context_that_cannot_be_one_is_ignored(context: bytes, tracer: OtlpTracer) -> None:
    assert spans.answer("Score", context) is NOTHING


@pytest.mark.parametrize("value", ["", "00", "00-zz-b7ad6b7169203331-01", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
def test_a_malformed_parent_begins_a_new_trace(value: str, tracer: OtlpTracer) -> None:
    context = spans.request("Generate", call({"traceparent": value})).context()
    assert len(context) == 24
    assert any(context[:16])


def test_a_request_continues_its_clients_trace(tracer: OtlpTracer) -> None:
    assert spans.request("Generate", call(PARENT)).context()[:16].hex() == "0af7651916cd43dd8448eb211c80319c"


def test_a_client_that_does_not_sample_is_not_traced(tracer: OtlpTracer) -> None:
    assert spans.request("Generate", call(NOT_SAMPLED)) is NOTHING


def test_calls_within_a_span_continue_its_trace(tracer: OtlpTracer) -> None:
    parent, state = dict(spans.http_request("POST", {**PARENT, "tracestate": "specdec=all"}).metadata()).values()
    assert parent.split("-")[1] == PARENT["traceparent"].split("-")[1]
    assert parent.split("-")[2] != PARENT["traceparent"].split("-")[2]
    assert state == "specdec=all"
    assert spans.NOTHING.metadata() == ()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (PARENT, (("traceparent", PARENT["traceparent"]),)),
        ({**PARENT, "tracestate": "a=1"}, (("traceparent", PARENT["traceparent"]), ("tracestate", "a=1"))),
        ({**PARENT, "tracestate": "a\n"}, (("traceparent", PARENT["traceparent"]),)),
        ({"tracestate": "a=1"}, ()),
        ({"traceparent": "00-xyz"}, ()),
        ({"traceparent": f"00-{'0' * 32}-{'1' * 16}-01"}, ()),
        ({"traceparent": f"ff-{'1' * 32}-{'1' * 16}-01"}, ()),
    ],
)
async def test_a_brought_trace_is_continued_as_it_is(headers: dict[str, str], expected: Pairs) -> None:
    """Also where nothing is traced here; what is no trace is not passed on."""

    async def calls() -> Pairs:
        continue_trace(trace_of(headers))
        return await asyncio.create_task(own())

    async def own() -> Pairs:
        return current_trace()

    assert await asyncio.create_task(calls()) == expected
    assert current_trace() == ()


def test_an_answer_is_in_the_trace_of_the_question(tracer: OtlpTracer) -> None:
    request = spans.request("Generate", call(PARENT))
    assert spans.answer("Score", request.context()).context()[:16] == request.context()[:16]


@pytest.mark.parametrize(
    ("timing", "expected"),
    [
        ((0.5, 1.0, 2.0), ["queue", "forward", "sampling"]),
        ((float("nan"), 1.0, 2.0), []),
        ((0.0, 3.0, 2.0), []),
        ((-1.0, 0.0, 1.0), []),
        ((0.0, 0.0, 1e9), []),
    ],
)
def test_an_answers_parts_follow_each_other(timing: tuple[float, ...], expected: list[str], memory: Memory) -> None:
    queue_s, forward_s, total_s = timing
    answer = SimpleNamespace(timing=SimpleNamespace(queue_s=queue_s, forward_s=forward_s, total_s=total_s))
    memory.span().add_times(answer)
    assert memory.names == expected
    ends = [(span.start_time, span.end_time) for span in memory.exporter.get_finished_spans()]
    assert all(one[1] == next_[0] for one, next_ in pairwise(ends))


def test_the_sdk_sends_the_callers_span_alone() -> None:
    assert current_trace() == ()
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("caller")
    with tracer.start_as_current_span("caller") as caller:
        own = caller.get_span_context()
        expected = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"
        assert current_trace() == (("traceparent", expected),)
        assert current_trace(["traceparent"]) == ()


@pytest.mark.parametrize(
    ("given", "variables", "expected"),
    [
        (None, {}, None),
        ("http://a:1", {}, "http://a:1"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:1"}, "http://b:1"),
        ("http://a:1", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:1"}, "http://a:1"),
        ("http://a:1", {"OTEL_SDK_DISABLED": "true"}, None),
        ("http://a:1", {"OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_endpoints(given: str | None, variables: dict[str, str], expected: str | None) -> None:
    assert endpoint_of(given, variables) == expected


def test_other_protocols_are_refused() -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    with pytest.raises(CannotTrace, match="OTEL_EXPORTER_OTLP_PROTOCOL is http/protobuf"):
        endpoint_of(None, variables)


@pytest.mark.parametrize("endpoint", ["localhost:4317", "http://", "grpc://a:1", "http://a:4318/v1/traces"])
def test_wrong_endpoints_are_named(endpoint: str) -> None:
    assert repr(endpoint) in str(endpoint_problem(endpoint))
    assert endpoint_problem("https://collector:4317") is None


def test_a_service_without_the_extra_says_what_to_install() -> None:
    """The module that is missing is made to look so."""
    hidden = "import sys; sys.modules['opentelemetry'] = None; sys.argv = ['draft_service']"
    program = f"{hidden}; import draft_service.__main__ as worker; worker.main(worker.registered())"
    environment = {"PATH": "", "SPECDEC_OTLP_ENDPOINT": "http://127.0.0.1:1", "SPECDEC_DRAFTERS": "ngram"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("run: pip install 'specdec[tracing]', or name no endpoint")
