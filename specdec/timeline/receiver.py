"""Receives spans as an OpenTelemetry collector does (OTLP over gRPC), and keeps them in memory."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from specdec.timeline.errors import TraceError
from specdec.timeline.recorded import Recorded, SpanTree

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
MAX_SPANS = 1_000_000  # some 1 GB; a service that is not meant may send here


class SpanReceiver:
    """The spans that came, of any trace."""

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Recorded] = []
        self._came = asyncio.Event()

    def tree(self, trace_id: str) -> SpanTree:
        """Return the spans of one trace that have come."""
        return SpanTree(span for span in self.spans if span.trace_id == trace_id)

    async def until_complete(self, trace_id: str, quiet_s: float) -> SpanTree:
        """Return a trace once nothing of it is missing, or once nothing more of it has come for so long."""
        tree = self.tree(trace_id)
        while tree.missing:
            try:
                async with asyncio.timeout(quiet_s):
                    tree = await self._grown(trace_id, len(tree.spans))
            except TimeoutError:
                break
        return tree

    async def _grown(self, trace_id: str, num_spans: int) -> SpanTree:
        """Return a trace once it has more spans than that."""
        while len((tree := self.tree(trace_id)).spans) <= num_spans:
            self._came.clear()
            await self._came.wait()
        return tree

    def take(self, spans: Iterable[Recorded]) -> None:
        """Keep spans, and tell those who wait for more."""
        if len(self.spans) < MAX_SPANS:
            self.spans += spans
        self._came.set()

    async def export(self, request: collector.ExportTraceServiceRequest, _: object) -> object:
        """Answer an exporter."""
        self.take(_recorded(request))
        return collector.ExportTraceServiceResponse()


@asynccontextmanager
async def receiving(address: str) -> AsyncIterator[SpanReceiver]:
    """Listen at host:port (0: a free one) while the context lasts. Raises TraceError."""
    receiver = SpanReceiver()
    handler = grpc.unary_unary_rpc_method_handler(
        receiver.export,
        request_deserializer=collector.ExportTraceServiceRequest.FromString,
        response_serializer=collector.ExportTraceServiceResponse.SerializeToString,
    )
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        problem = f"cannot listen on {address}, perhaps because a collector does"
        raise TraceError(f"{problem}; give another --listen, and that one to the services' --otlp-endpoint") from None
    receiver.address = f"{address.rpartition(':')[0]}:{port}"
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(0)


def _recorded(request: collector.ExportTraceServiceRequest) -> Iterator[Recorded]:
    for resource in request.resource_spans:
        about = _attributes(resource.resource.attributes)
        service = str(about.get("service.name", ""))
        process = str(about.get("service.instance.id", service))
        for scope in resource.scope_spans:
            yield from (_span(span, process, service) for span in scope.spans)


def _span(span: trace_pb2.Span, process: str, service: str) -> Recorded:
    return Recorded(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        process=process,
        service=service,
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        has_failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}
